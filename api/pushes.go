package api

import (
	"context"
	"sync"

	"github.com/doze-run/doze/problem"
)

const (
	// maxPushes is how many policies are pushed at once, from their first byte until
	// they are answered. One is compiled at a time, for 30 s at most, so the last of
	// them waits for less than four minutes; their modules take 128 MiB.
	maxPushes = 8
	// maxOwnerPushes are an owner's of these: the one that is compiled, and one that
	// arrives meanwhile. So nobody keeps all others from pushing.
	maxOwnerPushes = 2
)

// pushes bounds how many policies are pushed at once, of each owner and in all. As
// with a limiter, who comes too late is refused.
type pushes struct {
	mu      sync.Mutex
	all     int
	byOwner map[string]int // without those that push nothing
}

func newPushes() *pushes { return &pushes{byOwner: map[string]int{}} }

// enter takes a place for the request that ctx belongs to, or refuses it.
func (p *pushes) enter(ctx context.Context) error {
	owner := ownerOf(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.byOwner[owner] == maxOwnerPushes:
		return problem.Newf(problem.PushLimitExceeded, "you push %d policies already, of which one is compiled at a time; try again when one is answered", maxOwnerPushes)
	case p.all == maxPushes:
		return problem.Newf(problem.PushLimitExceeded, "%d policies are pushed already, of which one is compiled at a time; try again later", maxPushes)
	}
	p.all++
	p.byOwner[owner]++
	atEnd(ctx, func() { p.leave(owner) })
	return nil
}

func (p *pushes) leave(owner string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all--
	if p.byOwner[owner]--; p.byOwner[owner] == 0 {
		delete(p.byOwner, owner)
	}
}
