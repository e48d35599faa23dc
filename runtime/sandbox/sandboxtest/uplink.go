package sandboxtest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Uplink is a sandbox.Uplink that only records attachments. It fails the test on
// concurrent calls for the same sandbox.
type Uplink struct {
	t testing.TB

	mu       sync.Mutex
	attached map[sandbox.ID]int // pid
	known    map[sandbox.ID]bool
	keeping  bool
	busy     map[sandbox.ID]bool
	ended    map[int]bool
	failure  error
	attaches int
	block    *block
	trust    []byte
	env      map[string]string
}

// NewUplink returns an Uplink that knows no sandbox, has no CA and no variables.
func NewUplink(t testing.TB) *Uplink {
	return &Uplink{t: t, attached: map[sandbox.ID]int{}, known: map[sandbox.ID]bool{}, busy: map[sandbox.ID]bool{}, ended: map[int]bool{}}
}

// Fail makes Attach return err; nil ends that.
func (u *Uplink) Fail(err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.failure = err
}

// Block makes the next Attach hang until the returned function is called; reached is
// closed when it does.
func (u *Uplink) Block() (reached <-chan struct{}, release func()) {
	b := newBlock()
	u.mu.Lock()
	defer u.mu.Unlock()
	u.block = b
	return b.reached, func() { close(b.release) }
}

// SetTrust sets what Trust returns.
func (u *Uplink) SetTrust(pem []byte) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.trust = pem
}

// SetEnvironment sets what Environment returns of every sandbox.
func (u *Uplink) SetEnvironment(env map[string]string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.env = env
}

// Attached is the pid of the container that is attached, 0 if none is.
func (u *Uplink) Attached(id sandbox.ID) (pid int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.attached[id]
}

// Attaches counts the calls of Attach.
func (u *Uplink) Attaches() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.attaches
}

// Knows reports whether the sandbox was attached once and not forgotten since.
func (u *Uplink) Knows(id sandbox.ID) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.known[id]
}

// FailForget makes Forget fail to delete the state, as when the disk is full.
func (u *Uplink) FailForget(fail bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.keeping = fail
}

// End ends a process, to which nothing can be attached any more.
func (u *Uplink) End(pid int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.ended[pid] = true
}

// Restart drops the attachments, as the end of a node does.
func (u *Uplink) Restart() {
	u.mu.Lock()
	defer u.mu.Unlock()
	clear(u.attached)
}

// begin begins a call for a sandbox, and done ends it.
func (u *Uplink) begin(id sandbox.ID) (done func()) {
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
	defer u.begin(sb.ID)()
	u.mu.Lock()
	b := u.block
	u.block = nil
	u.mu.Unlock()
	if err := b.pass(ctx); err != nil {
		return err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.attaches++
	delete(u.attached, sb.ID)
	switch {
	case u.failure != nil:
		return u.failure
	case pid <= 0 || u.ended[pid]:
		return fmt.Errorf("there is no process %d", pid)
	}
	u.attached[sb.ID], u.known[sb.ID] = pid, true
	return nil
}

// Detach implements sandbox.Uplink.
func (u *Uplink) Detach(id sandbox.ID) {
	defer u.begin(id)()
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.attached, id)
}

// Forget implements sandbox.Uplink.
func (u *Uplink) Forget(id sandbox.ID) {
	defer u.begin(id)()
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.attached[id] != 0 {
		u.t.Errorf("%s is forgotten while it is attached", id)
	}
	if !u.keeping {
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
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.trust
}

// Environment implements sandbox.Uplink.
func (u *Uplink) Environment(sandbox.ID) map[string]string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.env
}
