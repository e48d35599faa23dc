package dial

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"
)

// attemptDelay is how long one address is tried alone before the next attempt
// starts in parallel (RFC 8305, section 5).
const attemptDelay = 250 * time.Millisecond

type attempt struct {
	conn net.Conn
	err  error
}

// race connects to one of the addresses, starting with the first. All attempts
// have ended when it returns. The error is a refusal only if all addresses were refused.
func (d *Dialer) race(ctx context.Context, r route) (net.Conn, error) {
	if len(r.addrs) == 1 {
		return d.attempt(ctx, r, r.addrs[0])
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	results := make(chan attempt)
	running, left := 0, r.addrs
	start := func() {
		a := left[0]
		left = left[1:]
		running++
		go func() { // race waits for the result below
			conn, err := d.attempt(ctx, r, a)
			results <- attempt{conn, err}
		}()
	}
	delay := time.NewTimer(attemptDelay)
	defer delay.Stop()
	start()
	var failed error
	for running > 0 {
		select {
		case <-delay.C:
		case result := <-results:
			running--
			if result.err == nil {
				cancel()
				for ; running > 0; running-- {
					if late := <-results; late.err == nil {
						late.conn.Close()
					}
				}
				return result.conn, nil
			}
			if failed == nil || isRefused(failed) {
				failed = result.err
			}
		}
		if len(left) > 0 && ctx.Err() == nil {
			start()
			delay.Reset(attemptDelay)
		}
	}
	return nil, failed
}

func isRefused(err error) bool {
	_, ok := errors.AsType[*RefusedError](err)
	return ok
}

func (d *Dialer) attempt(ctx context.Context, r route, a netip.Addr) (net.Conn, error) {
	checked := netip.AddrPortFrom(a, r.Port)
	return d.connect(ctx, checked, func(_ context.Context, _, actual string, _ syscall.RawConn) error {
		return d.guard(r, checked, actual)
	})
}

// guard is called with the address that the socket is about to connect to, and
// makes the final decision.
func (d *Dialer) guard(r route, checked netip.AddrPort, actual string) error {
	a, err := netip.ParseAddrPort(actual)
	if err != nil {
		return fmt.Errorf("parse the address to be dialed: %w", err)
	}
	if a != checked {
		return refuse(r.Target, a.Addr(), "which is not the address that was checked")
	}
	return d.allow(r.Target, r.grant, a.Addr())
}

type control = func(ctx context.Context, network, address string, c syscall.RawConn) error

func connect(ctx context.Context, a netip.AddrPort, control control) (net.Conn, error) {
	dialer := net.Dialer{ControlContext: control} // with Go's defaults for TCP_NODELAY and keep-alive
	return dialer.DialContext(ctx, "tcp", a.String())
}
