package sandbox

import (
	"context"
	"fmt"
	"time"
)

// Bounds of a TTL. The longest is far beyond what a node runs for and keeps
// timestamps within what JSON and the store can hold.
const (
	minTTL = time.Second
	maxTTL = 10 * 365 * 24 * time.Hour
)

// maxExpiryTimer bounds one timer for an expiry: Go's timers stand still while
// the machine is suspended, and the wall clock may be set.
const maxExpiryTimer = time.Minute

func validateTTL(d Duration) error {
	if v := time.Duration(d); v != 0 && (v < minTTL || v > maxTTL) {
		return &InvalidError{Field: "ttl", Reason: fmt.Sprintf("%s is out of range", v),
			Want: fmt.Sprintf(`use "0s" for no limit, or %s to %s`, minTTL, maxTTL)}
	}
	return nil
}

// setTTL makes the sandbox expire ttl after now, or never if ttl is 0.
func (sb *Sandbox) setTTL(ttl Duration, now time.Time) {
	sb.TTL, sb.ExpiresAt = ttl, time.Time{}
	if ttl != 0 {
		sb.ExpiresAt = now.Add(time.Duration(ttl))
	}
}

// expiresIn is how long the sandbox still lives; 0 or less when it has expired.
// It lives without a limit when ok is false.
func (b *liveSandbox) expiresIn() (d time.Duration, ok bool) {
	at := b.view.Load().ExpiresAt
	return time.Until(at), !at.IsZero()
}

// expired reports whether the TTL has passed.
func (b *liveSandbox) expired() bool {
	left, ok := b.expiresIn()
	return ok && left <= 0
}

// expire destroys the sandbox if its TTL has passed, whether it is in use or not.
func (b *liveSandbox) expire(ctx context.Context) error {
	if err := b.lockTransition(ctx); err != nil {
		return err
	}
	defer b.unlockTransition()
	if b.m.liveByID(b.id) != b {
		return nil // destroyed by a caller meanwhile
	}
	// A caller may have extended the TTL since the timer fired.
	err := b.destroyDue(ctx, ReasonTTLExpired, b.expired)
	b.destroyLater(err) // a destroyed sandbox has no timer
	return err
}
