package podman

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"go.podman.io/common/pkg/seccomp"
)

// operatorsProfile replaces Podman's default profile on a machine. Where it
// exists, Podman is left to take it as it is.
const operatorsProfile = "/etc/containers/seccomp.json"

// withheld are system calls of Podman's default profile that sandboxes do not have: to
// them the kernel has no keyrings. It counts keys by user, and all sandboxes share the
// node's sub-ids: with 20,000 keyrings in one, no other could start.
var withheld = []string{"add_key", "keyctl", "request_key"}

// writeProfile writes Podman's default seccomp profile, less what is withheld and the
// system calls of other architectures (i386 and x32 on amd64), and returns its path; empty for
// Podman's own choice. The runtime compiles the profile at each start: for three
// architectures that is 25 of 55 ms. Without them a sandbox also reaches less of
// the kernel; programs for those architectures end with SIGSYS.
//
// https://github.com/containers/common/blob/main/pkg/seccomp/seccomp.json
func writeProfile(dir string) (path string, err error) {
	if _, err := os.Stat(operatorsProfile); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	profile := seccomp.DefaultProfile()
	for i := range profile.ArchMap {
		profile.ArchMap[i].SubArches = nil
	}
	for _, rule := range profile.Syscalls {
		rule.Names = slices.DeleteFunc(rule.Names, func(name string) bool { return slices.Contains(withheld, name) })
	}
	data, err := json.Marshal(profile)
	if err != nil {
		return "", err
	}
	path = filepath.Join(dir, "seccomp.json")
	temporary := path + ".new" // a service may read the old one meanwhile
	if err := os.WriteFile(temporary, data, 0o600); err != nil {
		return "", err
	}
	return path, os.Rename(temporary, path)
}
