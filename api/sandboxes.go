package api

import (
	"context"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// Sandboxes is what the API needs of *sandbox.Manager, whose comments are the
// contract.
type Sandboxes interface {
	Create(ctx context.Context, req sandbox.CreateRequest) (sb sandbox.Sandbox, created bool, err error)
	Get(owner, idOrName string) (sandbox.Sandbox, error)
	ByID(id sandbox.ID) (sandbox.Sandbox, bool)
	List(owner string, filter sandbox.Filter, after string, limit int) (sbs []sandbox.Sandbox, next string)
	Update(ctx context.Context, id sandbox.ID, patch sandbox.Patch) (sandbox.Sandbox, error)
	Destroy(ctx context.Context, id sandbox.ID) error

	Acquire(ctx context.Context, id sandbox.ID, cause sandbox.Cause) (*sandbox.Lease, error)
	Wake(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error)
	Sleep(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error)
	ForceSleep(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error)
	Stop(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error)
	ForceStop(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error)
	Hold(ctx context.Context, id sandbox.ID, d time.Duration) (sandbox.Sandbox, error)

	Expose(ctx context.Context, id sandbox.ID, port sandbox.Port) (sandbox.Port, error)
	Unexpose(ctx context.Context, id sandbox.ID, port uint16) error
	StartProcess(ctx context.Context, id sandbox.ID, spec guest.ProcessSpec) (guest.Process, error)
	StopProcess(ctx context.Context, id sandbox.ID, idOrName, signal string) (guest.Process, error)

	Adopt(ctx context.Context, owner string, id sandbox.ID, name string) (sandbox.Sandbox, error)
	RemoveQuarantined(ctx context.Context, owner string, id sandbox.ID) error

	Events(ctx context.Context, id sandbox.ID, after uint64, limit int) ([]sandbox.Event, error)
	Subscribe(id sandbox.ID) (<-chan sandbox.Event, func(), error)
	Feed(owner, cursor string) (*sandbox.FeedReader, error)
	Usage(ctx context.Context, id sandbox.ID) (sandbox.Usage, error)
	Info(ctx context.Context) sandbox.Info
}

var _ Sandboxes = (*sandbox.Manager)(nil)
