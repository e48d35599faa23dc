package podman

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"go.podman.io/common/pkg/seccomp"

	"github.com/doze-run/doze/runtime/podman/ociruntime"
)

// operatorsProfile is the operator's replacement for Podman's default profile. If it exists,
// Podman uses it unchanged.
const operatorsProfile = "/etc/containers/seccomp.json"

// withheld are system calls of Podman's default profile that are refused to sandboxes, as by
// a kernel without keyrings. The kernel counts keys by user, and all sandboxes share the
// node's sub-ids: with 20,000 keyrings in one sandbox, no other could start.
var withheld = []string{"add_key", "keyctl", "request_key"}

// writeProfile writes Podman's default seccomp profile without the withheld system calls and
// without other architectures (i386 and x32 on amd64). It returns its path, or "" if the
// operator has a profile. The runtime compiles the profile at each start: for three
// architectures that takes 25 of 55 ms. Without the other architectures, less of the kernel
// is exposed to a sandbox; programs for them end with SIGSYS.
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
	return path, ociruntime.Replace(path, data, 0o600) // a service may read the old one meanwhile
}
