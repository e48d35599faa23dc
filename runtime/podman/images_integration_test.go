//go:build integration

package podman

import (
	"testing"

	"github.com/doze-run/doze/runtime/guest"
)

func TestGuestRunsInAMuslImage(t *testing.T) {
	b := open(t).boot(t, "localhost/doze/test-musl:latest")
	if out := b.must("ls /lib/ld-musl-*; id -u"); out == "" {
		t.Error("it is not a musl system")
	}
}

func TestGuestRunsInAnImageWithoutAShell(t *testing.T) {
	b := open(t).boot(t, "localhost/doze/test-noshell:latest")
	out, code := b.exec(guest.ExecRequest{Command: guest.Command{Argv: []string{"/greet", "there"}}})
	if code != 0 || out != "hello there" {
		t.Errorf("code %d, %q", code, out)
	}
}
