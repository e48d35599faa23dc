package podman

import (
	"encoding/json"
	"os"
	"slices"
	"testing"

	"go.podman.io/common/pkg/seccomp"
)

func TestTheProfileAllowsNoKeyrings(t *testing.T) {
	if _, err := os.Stat(operatorsProfile); err == nil {
		t.Fatalf("this machine has %s, which replaces the profile", operatorsProfile)
	}
	path, err := writeProfile(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var profile seccomp.Seccomp
	if err := json.Unmarshal(text, &profile); err != nil {
		t.Fatal(err)
	}
	if profile.DefaultAction != seccomp.ActErrno || profile.DefaultErrno != "ENOSYS" {
		t.Errorf("other calls get %s %s, want an error ENOSYS", profile.DefaultAction, profile.DefaultErrno)
	}
	others := false
	for _, rule := range profile.Syscalls {
		others = others || slices.Contains(rule.Names, "openat") && rule.Action == seccomp.ActAllow
		for _, name := range []string{"add_key", "keyctl", "request_key"} {
			if rule.Action == seccomp.ActAllow && (rule.Name == name || slices.Contains(rule.Names, name)) {
				t.Errorf("%s is allowed", name)
			}
		}
	}
	if !others {
		t.Error("openat is not allowed")
	}
}
