package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	// attachWait bounds an attachment, which takes some milliseconds.
	attachWait = 10 * time.Second
	// trustWait bounds what a guest does to trust the Uplink, which takes some
	// milliseconds too, and keeps the first command waiting.
	trustWait = 5 * time.Second
)

// attach gives the sandbox, whose container runs or is frozen, its network. Needs
// the turn.
func (b *liveSandbox) attach(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, attachWait)
	defer cancel()
	if err := b.m.uplink.Attach(ctx, b.sandbox(), int(b.pid.Load())); err != nil {
		return fmt.Errorf("attaching its network: %w", err)
	}
	return nil
}

// outOfReach drops what leads into a container, and out of it, that has ended or
// is about to. Needs the turn, without which it could hit the container's successor.
func (b *liveSandbox) disconnect() {
	b.pid.Store(0)
	b.m.network.Forget(b.id)
	b.m.uplink.Detach(b.id)
	b.cutOff.Store(false)
	b.guest.Close()
}

// noteAttached notes whether an adopted sandbox could be attached. It is worth
// more without a network than stopped, so it stays as it is, and look tries again.
// Needs the turn.
func (b *liveSandbox) noteAttached(err error) {
	switch {
	case err != nil:
		b.failures.Add(1)
		if !b.cutOff.Swap(true) {
			b.m.log.Error("a sandbox has no network; trying again", "sandbox", b.id, "error", err)
		}
		b.setCondition(ConditionNetworkLost, "it has no network; the node tries again: "+err.Error())
	case b.cutOff.Swap(false):
		b.endConditionOf(ConditionNetworkLost)
	}
}

// reattach is attach for a sandbox that is still cut off when it gets the turn.
func (b *liveSandbox) reattach(ctx context.Context) error {
	if err := b.lockTransition(ctx); err != nil {
		return err
	}
	defer b.unlockTransition()
	if b.cutOff.Load() && !b.isGone() {
		b.noteAttached(b.attach(ctx))
	}
	return nil
}

// noteTrust notes which CAs the guest was given in this run.
func (b *liveSandbox) noteTrust(digest string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.trusts = digest
}

// trustsOthers says whether the guest was given other CAs than the Uplink has now.
func (b *liveSandbox) trustsOthers() bool {
	ca := b.m.uplink.Trust()
	if len(ca) == 0 {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.trusts != guest.TrustDigest(ca)
}

// trustUplink has the guest trust the Uplink's CAs, unless it does. That it cannot,
// as on a full disk, is a condition and keeps nothing from running; it is tried
// again with the next CAs or in the guest's next run. Needs the turn.
func (b *liveSandbox) trustUplink(ctx context.Context) {
	ca := b.m.uplink.Trust()
	if len(ca) == 0 || !b.trustsOthers() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, trustWait)
	defer cancel()
	b.noteTrust(guest.TrustDigest(ca))
	trust := guest.Trust{CA: string(ca)}
	result, err := b.guest.Trust(ctx, trust)
	if err == nil && result.NeedsRoots && b.m.roots != nil {
		var roots []byte
		if roots, err = b.m.roots(); err == nil {
			trust.Roots = string(roots)
			_, err = b.guest.Trust(ctx, trust)
		}
	}
	if err != nil {
		b.m.log.Warn("a sandbox may not trust the node's CA", "sandbox", b.id, "error", err)
		_ = b.failed(ConditionTrustFailed, fmt.Errorf("its programs may not trust the node's CA: %w", err))
	}
}

// renewTrust is trustUplink for a running sandbox.
func (b *liveSandbox) renewTrust(ctx context.Context) error {
	if err := b.lockTransition(ctx); err != nil {
		return err
	}
	defer b.unlockTransition()
	if b.state() == StateRunning && !b.isGone() {
		b.trustUplink(ctx)
	}
	return nil
}
