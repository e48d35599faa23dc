package sandboxtest

import (
	"cmp"
	"context"
	"sync"
	"testing"

	"github.com/doze-run/doze/testkit"
)

// Faults makes operations of a fake fail and hang. Its zero value is ready for use.
type Faults struct {
	mu       sync.Mutex
	failures map[string]failure
	blocks   map[string]*block
}

type failure struct {
	err  error
	once bool
}

type block struct {
	reached chan struct{}
	release chan struct{}
	once    sync.Once
}

// Fail makes an operation return err; nil ends that.
func (f *Faults) Fail(operation string, err error) { f.fail(operation, failure{err: err}) }

// FailOnce makes the next call of an operation return err.
func (f *Faults) FailOnce(operation string, err error) { f.fail(operation, failure{err, true}) }

// FailAll makes every operation return err, as when the node has died; nil ends that.
func (f *Faults) FailAll(err error) { f.fail("", failure{err: err}) }

func (f *Faults) fail(operation string, next failure) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.failures == nil {
		f.failures = map[string]failure{}
	}
	f.failures[operation] = next
}

// Block makes an operation hang until the returned function is called, which does something
// once only.
func (f *Faults) Block(operation string) (release func()) {
	b := &block{reached: make(chan struct{}), release: make(chan struct{})}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.blocks == nil {
		f.blocks = map[string]*block{}
	}
	f.blocks[operation] = b
	return sync.OnceFunc(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.blocks, operation)
		close(b.release)
	})
}

// AwaitBlocked waits until a call hangs in a blocked operation.
func (f *Faults) AwaitBlocked(t testing.TB, operation string) {
	t.Helper()
	f.mu.Lock()
	b := f.blocks[operation]
	f.mu.Unlock()
	testkit.Closed(t, "a call of "+operation, b.reached)
}

// begin is the start of every operation: it hangs while the operation is blocked and ctx has
// not ended, and returns the failure.
func (f *Faults) begin(ctx context.Context, operation string) error {
	f.mu.Lock()
	all, failing, b := f.failures[""], f.failures[operation], f.blocks[operation]
	if failing.once {
		delete(f.failures, operation)
	}
	f.mu.Unlock()
	if b != nil && ctx.Err() == nil {
		b.once.Do(func() { close(b.reached) })
		select {
		case <-b.release:
		case <-ctx.Done():
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return cmp.Or(all.err, failing.err)
}
