package node

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
)

func TestCheckChangeNamesOptionsThatNeedARestart(t *testing.T) {
	running := Config{Home: t.TempDir(), Sandbox: sandbox.DefaultConfig()}
	if err := running.fill(); err != nil {
		t.Fatal(err)
	}
	same := Config{Home: running.Home, Sandbox: sandbox.DefaultConfig()}
	same.Sandbox.MaxSandboxes++
	if err := running.CheckChange(same); err != nil {
		t.Errorf("no option needs a restart: %v", err)
	}
	other := same
	other.Guest, other.TokenFile = "/elsewhere/guest", "/elsewhere/token"
	err := running.CheckChange(other)
	if err == nil {
		t.Fatal("it is accepted")
	}
	for _, want := range []string{
		`guest cannot change from "` + running.Guest + `" to "/elsewhere/guest" while the node runs: restart it`,
		`token_file cannot change from "` + running.TokenFile + `" to "/elsewhere/token"`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v\nlacks %s", err, want)
		}
	}
	other = same
	other.Sandbox.MaxSandboxes = -1
	if err := running.CheckChange(other); err == nil {
		t.Error("invalid settings of sandboxes are accepted")
	}
}
