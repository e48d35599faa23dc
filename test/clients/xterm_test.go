//go:build clients

package clients

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/doze-run/doze/test/testnode"
)

// TestXtermIsUnmodified compares the vendored files of package terminalpage with the npm
// packages, whose versions and digests its lock names.
func TestXtermIsUnmodified(t *testing.T) {
	const vendored = "../../api/terminalpage/assets/xterm"
	modules := filepath.Join(testnode.Modules(t, vendored), "node_modules", "@xterm")
	origins := map[string]string{"xterm.css": "xterm/css/xterm.css", "package.json": "", "package-lock.json": ""}
	for _, name := range []string{"xterm", "addon-fit", "addon-unicode11"} {
		origins[name+".mjs"] = filepath.Join(name, "lib", name+".mjs")
		origins["LICENSE."+name] = filepath.Join(name, "LICENSE")
	}
	entries, err := os.ReadDir(vendored)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != len(origins) {
		t.Errorf("%d files are vendored, want %d", len(entries), len(origins))
	}
	for _, entry := range entries {
		origin, ok := origins[entry.Name()]
		if !ok {
			t.Errorf("%s is of no package", entry.Name())
		}
		if origin == "" {
			continue
		}
		want, err := os.ReadFile(filepath.Join(modules, origin))
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(vendored, entry.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s differs from %s; run make xterm", entry.Name(), origin)
		}
	}
}
