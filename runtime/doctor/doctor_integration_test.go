//go:build integration

package doctor

import (
	"os"
	"path/filepath"
	"testing"
)

// On a host that packaging/host/setup has prepared, entered by
// packaging/host/enter, a sandbox can run.
func TestAPreparedHostCanRunSandboxes(t *testing.T) {
	findings := Check(t.Context(), Config{NetnsHelper: filepath.Join(os.Getenv("DOZE_BIN"), "doze-netns")})
	for _, f := range findings {
		t.Logf("%+v", f)
		if !f.OK && f.Level == LevelError {
			t.Errorf("%s: %s; %s", f.Name, f.Detail, f.Remedy)
		}
	}
	if !CanRun(findings) {
		t.Error("it cannot run")
	}
}
