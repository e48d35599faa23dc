package egress

import (
	"context"
	"sync"
)

// turn is a lock for whose turn its waiters can cease to wait. They get it in the
// order in which they came.
type turn chan struct{}

func newTurn() turn { return make(turn, 1) }

// Lock is for waiters without a limit of their own.
func (t turn) Lock() { t <- struct{}{} }

// Unlock gives the turn to the next, also if another goroutine took it.
func (t turn) Unlock() { <-t }

// take is Lock that ends with ctx, and returns why it did.
func (t turn) take(ctx context.Context) error {
	select {
	case t <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// ownerTurns are a turn for each owner who changes something: of many changes of an
// owner one waits among those of others.
type ownerTurns struct {
	mu sync.Mutex
	of map[string]*ownerTurn
}

type ownerTurn struct {
	turn
	users int // that have it or wait; guarded by ownerTurns.mu
}

// take takes the owner's turn until leave is called.
func (t *ownerTurns) take(ctx context.Context, owner string) (leave func(), err error) {
	t.mu.Lock()
	o := t.of[owner]
	if o == nil {
		o = &ownerTurn{turn: newTurn()}
		t.of[owner] = o
	}
	o.users++
	t.mu.Unlock()
	if err := o.turn.take(ctx); err != nil {
		t.leave(owner, o)
		return nil, err
	}
	return func() {
		o.Unlock()
		t.leave(owner, o)
	}, nil
}

func (t *ownerTurns) leave(owner string, o *ownerTurn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if o.users--; o.users == 0 {
		delete(t.of, owner)
	}
}
