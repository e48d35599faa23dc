package wakeproxy

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

// errNotReady: nobody listened on the port before the wait ended.
var errNotReady = errors.New("nothing listens on the port yet")

// gateKey names a port of one run of a container.
type gateKey struct {
	id      sandbox.ID
	port    uint16
	started int64 // Sandbox.StartedAt in Unix nanoseconds
}

// gates holds requests until a port of a container that has just started
// accepts connections. Of all who wait for one port, one at a time tries to
// connect: a thousand visitors knock no harder than one.
type gates struct {
	mu   sync.Mutex
	open map[gateKey]*gate // those somebody waits at
}

type gate struct {
	since   time.Time
	waiters int           // guarded by gates.mu
	turn    chan struct{} // holds one element while somebody tries
	opened  chan struct{} // closed when the port has accepted a connection, or never will
	err     error         // why it never will; valid once opened is closed
}

// wait returns when dial has succeeded: for whoever tried with the connection,
// for the others with nil. It returns errNotReady when ctx ends first, and at
// once any error of dial but that nobody accepts. A *sandbox.WakeError and a
// *crashError are the end for all who wait.
func (g *gates) wait(ctx context.Context, key gateKey, dial func(context.Context) (net.Conn, error)) (net.Conn, error) {
	gt := g.join(key)
	defer g.leave(key, gt)
	select {
	case gt.turn <- struct{}{}:
	case <-gt.opened:
		return nil, gt.err
	case <-ctx.Done():
		return nil, errNotReady
	}
	defer func() { <-gt.turn }()
	select {
	case <-gt.opened:
		return nil, gt.err
	default:
	}

	for {
		conn, err := dial(ctx)
		var ended *sandbox.WakeError
		var crashed *crashError
		switch {
		case err == nil:
			close(gt.opened)
			return conn, nil
		case errors.As(err, &ended), errors.As(err, &crashed):
			gt.err = err
			close(gt.opened)
			return nil, err
		case ctx.Err() != nil:
			return nil, errNotReady
		case !nobodyAccepts(err):
			return nil, err
		}
		timer := time.NewTimer(nextAttempt(time.Since(gt.since)))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, errNotReady
		}
	}
}

// nobodyAccepts says whether a connection was refused, or reset while it was
// made: a server that is about to start may listen on its port for a moment, to
// see whether it is free.
func nobodyAccepts(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET)
}

// nextAttempt is the pause before the next attempt to connect: attempts are
// made at 0, 2, 5, 10 and 20 ms, then every 25 ms. No exponential backoff: it
// turns a start of 500 ms into a wait of seconds.
func nextAttempt(elapsed time.Duration) time.Duration {
	for _, at := range [...]time.Duration{2, 5, 10, 20} {
		if at *= time.Millisecond; elapsed < at {
			return at - elapsed
		}
	}
	return 25 * time.Millisecond
}

// waitedAt reports whether somebody waits for the port.
func (g *gates) waitedAt(key gateKey) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.open[key] != nil
}

func (g *gates) join(key gateKey) *gate {
	g.mu.Lock()
	defer g.mu.Unlock()
	gt := g.open[key]
	if gt == nil {
		gt = &gate{since: time.Now(), turn: make(chan struct{}, 1), opened: make(chan struct{})}
		g.open[key] = gt
	}
	gt.waiters++
	return gt
}

func (g *gates) leave(key gateKey, gt *gate) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if gt.waiters--; gt.waiters == 0 {
		delete(g.open, key)
	}
}
