package sandboxtest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Uplink is a sandbox.Uplink that only records attachments. It fails the test on
// concurrent calls for the same sandbox. It can be made to fail and to hang, by operation:
// "attach", and "forget", which then does not delete the state, as when the disk is full.
type Uplink struct {
	Faults
	t testing.TB

	mu       sync.Mutex
	attached map[sandbox.ID]int // pid
	known    map[sandbox.ID]bool
	busy     map[sandbox.ID]bool
	ended    map[int]bool

	attaches   atomic.Int64
	trust, env atomic.Value
}

// NewUplink returns an Uplink that knows no sandbox, has no CA and no variables.
func NewUplink(t testing.TB) *Uplink {
	return &Uplink{t: t, attached: map[sandbox.ID]int{}, known: map[sandbox.ID]bool{}, busy: map[sandbox.ID]bool{}, ended: map[int]bool{}}
}

// SetTrust sets what Trust returns.
func (u *Uplink) SetTrust(pem []byte) { u.trust.Store(pem) }

// SetEnvironment sets what Environment returns of every sandbox.
func (u *Uplink) SetEnvironment(env map[string]string) { u.env.Store(env) }

// Attached is the pid of the container that is attached, 0 if none is.
func (u *Uplink) Attached(id sandbox.ID) (pid int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.attached[id]
}

// Attaches counts the calls of Attach.
func (u *Uplink) Attaches() int { return int(u.attaches.Load()) }

// Knows reports whether the sandbox was attached once and not forgotten since.
func (u *Uplink) Knows(id sandbox.ID) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.known[id]
}

// Restart drops the attachments, as the end of a node does.
func (u *Uplink) Restart() {
	u.mu.Lock()
	defer u.mu.Unlock()
	clear(u.attached)
}

// exclusive begins a call for a sandbox, and done ends it.
func (u *Uplink) exclusive(id sandbox.ID) (done func()) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.busy[id] {
		u.t.Errorf("concurrent calls for %s", id)
	}
	u.busy[id] = true
	return func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.busy[id] = false
	}
}

// Attach implements sandbox.Uplink.
func (u *Uplink) Attach(ctx context.Context, sb sandbox.Sandbox, pid int) error {
	defer u.exclusive(sb.ID)()
	err := u.begin(ctx, "attach")
	if ctx.Err() != nil {
		return err
	}
	u.attaches.Add(1)
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.attached, sb.ID)
	if err != nil {
		return err
	}
	if pid <= 0 || u.ended[pid] {
		return fmt.Errorf("there is no process %d", pid)
	}
	u.attached[sb.ID], u.known[sb.ID] = pid, true
	return nil
}

// Detach implements sandbox.Uplink.
func (u *Uplink) Detach(id sandbox.ID) {
	defer u.exclusive(id)()
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.attached, id)
}

// Forget implements sandbox.Uplink.
func (u *Uplink) Forget(id sandbox.ID) {
	defer u.exclusive(id)()
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.attached[id] != 0 {
		u.t.Errorf("%s is forgotten while it is attached", id)
	}
	if u.begin(context.Background(), "forget") == nil {
		delete(u.known, id)
	}
}

// Known implements sandbox.Uplink.
func (u *Uplink) Known() []sandbox.ID {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Collect(maps.Keys(u.known))
}

// Trust implements sandbox.Uplink.
func (u *Uplink) Trust() []byte {
	pem, _ := u.trust.Load().([]byte)
	return pem
}

// Environment implements sandbox.Uplink.
func (u *Uplink) Environment(sandbox.ID) map[string]string {
	env, _ := u.env.Load().(map[string]string)
	return env
}
