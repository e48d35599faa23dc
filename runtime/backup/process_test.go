package backup

import (
	"context"
	"encoding/json"
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// TestFailedThawIsReported: the helper ends while the programs are stopped, and they cannot continue.
func TestFailedThawIsReported(t *testing.T) {
	thaw := errors.New("the cgroup does not thaw")
	p := process{
		cmd: exec.Command("sh", "-c", `echo '{"ready":true}'; read -r request; read -r order; echo 'out of memory' >&2; exit 1`),
		stop: func(ctx context.Context, capture func(context.Context) error) (json.RawMessage, error) {
			return nil, errors.Join(capture(ctx), thaw)
		},
	}
	p.cmd.Stderr = &p.message
	_, err := p.run(testkit.Context(t), wire.Request{Operation: wire.Create, Running: true})
	if !errors.Is(err, thaw) || !strings.Contains(err.Error(), "out of memory") {
		t.Errorf("got %v", err)
	}
}

func TestFailuresOfTheHelperAreErrorsOfSandboxes(t *testing.T) {
	for code, want := range map[wire.Code]error{
		wire.Full: sandbox.ErrStoreFull, wire.NotFound: sandbox.ErrBackupNotFound, wire.Limit: sandbox.ErrTooManyBackups,
		wire.NeedsSnapshot: sandbox.ErrNeedsSnapshot, wire.Unsupported: sandbox.ErrBackupUnsupported,
	} {
		testkit.ErrorIs(t, string(code), failure(&wire.Error{Code: code}), want)
	}
	for code, want := range map[wire.Code]sandbox.ObjectStoreFailure{
		wire.Unreachable: sandbox.ObjectStoreUnreachable, wire.Denied: sandbox.ObjectStoreDenied, wire.NoBucket: sandbox.ObjectStoreNoBucket,
		wire.Password: sandbox.ObjectStorePassword, wire.Damaged: sandbox.ObjectStoreDamaged,
	} {
		if failed, ok := errors.AsType[*sandbox.ObjectStoreError](failure(&wire.Error{Code: code})); !ok || failed.Failure != want {
			t.Errorf("%s: %v, want %s", code, failed, want)
		}
	}
}
