//go:build integration

package podman

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
)

// unshared runs a command as root of the user's own user namespace, which may do
// to the sandboxes' processes and files what the user alone may not.
func unshared(t testing.TB, command ...string) error {
	t.Helper()
	out, err := exec.Command("podman", append([]string{"unshare"}, command...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%v: %w: %s", command, err, out)
	}
	return nil
}

func itoa(n int) string { return strconv.Itoa(n) }

// guestBinary is the guest that `make build` makes.
func guestBinary(t testing.TB) string {
	t.Helper()
	dir := os.Getenv("DOZE_BIN")
	if dir == "" {
		t.Fatal("DOZE_BIN is not set: run this by `make test-integration PACKAGES=./runtime/podman`")
	}
	return filepath.Join(dir, "doze-guest")
}
