package egress

import (
	"context"
	"sync"
)

// contextMutex is a mutex whose waiters can give up. Waiters acquire it in the order of
// their calls.
type contextMutex chan struct{}

func newContextMutex() contextMutex { return make(contextMutex, 1) }

func (m contextMutex) Lock() { m <- struct{}{} }

// Unlock unlocks the mutex, even if another goroutine locked it.
func (m contextMutex) Unlock() { <-m }

// LockContext is Lock, but returns the cause of ctx if ctx ends first.
func (m contextMutex) LockContext(ctx context.Context) error {
	select {
	case m <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// ownerLocks holds one lock per owner, so that at most one of an owner's changes competes
// with the changes of other owners.
type ownerLocks struct {
	mu      sync.Mutex
	byOwner map[string]*ownerLock // no entry without users
}

type ownerLock struct {
	contextMutex
	users int // number of holders and waiters; guarded by ownerLocks.mu
}

// LockContext locks the owner's lock until unlock is called.
func (l *ownerLocks) LockContext(ctx context.Context, owner string) (unlock func(), err error) {
	l.mu.Lock()
	o := l.byOwner[owner]
	if o == nil {
		if l.byOwner == nil {
			l.byOwner = map[string]*ownerLock{}
		}
		o = &ownerLock{contextMutex: newContextMutex()}
		l.byOwner[owner] = o
	}
	o.users++
	l.mu.Unlock()
	if err := o.contextMutex.LockContext(ctx); err != nil {
		l.removeUser(owner, o)
		return nil, err
	}
	return func() {
		o.Unlock()
		l.removeUser(owner, o)
	}, nil
}

func (l *ownerLocks) removeUser(owner string, o *ownerLock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if o.users--; o.users == 0 {
		delete(l.byOwner, owner)
	}
}
