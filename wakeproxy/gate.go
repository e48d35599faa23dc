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

// errNotReady: no process listened on the port, or its process was not ready, before the wait
// ended.
var errNotReady = errors.New("the server on the port is not ready yet")

// gateKey names a port of one run of a container.
type gateKey struct {
	id      sandbox.ID
	port    uint16
	started int64 // Sandbox.StartedAt in Unix nanoseconds
}

// gates holds requests until a port of a container that has just started
// accepts connections. Of the requests that wait for one port, one at a time tries
// to connect: a thousand visitors cause no more attempts than one.
type gates struct {
	mu   sync.Mutex
	open map[gateKey]*gate // with at least one waiter
}

type gate struct {
	since   time.Time
	waiters int           // guarded by gates.mu
	dialing chan struct{} // holds one element while a waiter tries to connect
	done    chan struct{} // closed when the port has accepted a connection, or never will
	err     error         // the reason why it never will; valid once done is closed
}

// wait returns when dial has succeeded: the connection to the waiter whose dial it
// was, nil to the others. It returns errNotReady when ctx ends first, and any error
// of dial except a refused connection. A *sandbox.WakeError and a *crashError end
// the wait of all.
func (g *gates) wait(ctx context.Context, key gateKey, dial func(context.Context) (net.Conn, error)) (net.Conn, error) {
	gt := g.join(key)
	defer g.quit(key, gt)
	select {
	case gt.dialing <- struct{}{}:
	case <-gt.done:
		return nil, gt.err
	case <-ctx.Done():
		return nil, errNotReady
	}
	defer func() { <-gt.dialing }()
	select {
	case <-gt.done:
		return nil, gt.err
	default:
	}

	for {
		conn, err := dial(ctx)
		_, ended := errors.AsType[*sandbox.WakeError](err)
		_, crashed := errors.AsType[*crashError](err)
		switch {
		case err == nil:
			close(gt.done)
			return conn, nil
		case ended, crashed:
			gt.err = err
			close(gt.done)
			return nil, err
		case ctx.Err() != nil:
			return nil, errNotReady
		case !connectionRefused(err):
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

// connectionRefused reports whether a connection was refused, or reset while it was
// made: a server that is about to start may listen on its port for a moment, to
// check that it is free.
func connectionRefused(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET)
}

// nextAttempt returns the pause before the next attempt to connect: attempts are
// made at 0, 2, 5, 10 and 20 ms, then every 25 ms. An exponential backoff would turn
// a start of 500 ms into a wait of seconds.
func nextAttempt(elapsed time.Duration) time.Duration {
	for _, at := range [...]time.Duration{2, 5, 10, 20} {
		if at *= time.Millisecond; elapsed < at {
			return at - elapsed
		}
	}
	return 25 * time.Millisecond
}

// hasWaiters reports whether a request waits for the port.
func (g *gates) hasWaiters(key gateKey) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.open[key] != nil
}

func (g *gates) join(key gateKey) *gate {
	g.mu.Lock()
	defer g.mu.Unlock()
	gt := g.open[key]
	if gt == nil {
		gt = &gate{since: time.Now(), dialing: make(chan struct{}, 1), done: make(chan struct{})}
		g.open[key] = gt
	}
	gt.waiters++
	return gt
}

func (g *gates) quit(key gateKey, gt *gate) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if gt.waiters--; gt.waiters == 0 {
		delete(g.open, key)
	}
}
