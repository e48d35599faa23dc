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
	// trustWait bounds the installation of the Uplink's CAs by a guest, which takes some
	// milliseconds too. The first command waits for it.
	trustWait = 5 * time.Second
)

// attach connects the sandbox, whose container runs or is frozen, to its network. Needs the
// transition lock.
func (b *liveSandbox) attach(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, attachWait)
	defer cancel()
	if err := b.m.uplink.Attach(ctx, b.sandbox(), int(b.pid.Load())); err != nil {
		return fmt.Errorf("attach its network: %w", err)
	}
	return nil
}

// disconnect closes all connections into and out of a container that has ended or is about
// to, the event stream of its guest among them. Needs the transition lock, so that it cannot affect
// the next container.
func (b *liveSandbox) disconnect() {
	b.unwatch()
	b.dropKernels()
	pid := int(b.pid.Swap(0))
	b.m.deps.Network.Forget(b.id)
	b.m.deps.Buckets.Forget(b.id, pid)
	b.mounted.clear()
	b.m.uplink.Detach(b.id)
	b.cutOff.Store(false)
	b.guest.Close()
}

// noteAttached records whether an adopted sandbox could be attached. After an error it runs
// on without a network, and runCheck tries again. Needs the transition lock.
func (b *liveSandbox) noteAttached(err error) {
	switch {
	case err != nil:
		b.failures.Add(1)
		if !b.cutOff.Swap(true) {
			b.m.log.Error("failed to attach a sandbox's network, trying again", "sandbox", b.id, "error", err)
		}
		b.setCondition(ConditionNetworkLost, "it has no network; the node tries again: "+err.Error())
	case b.cutOff.Swap(false):
		b.endConditionOf(ConditionNetworkLost)
	}
}

// noteTrust records the CAs that the guest has in this run.
func (b *liveSandbox) noteTrust(digest string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.trusts = digest
}

// trustsOthers reports whether the guest has other CAs than the Uplink's present ones.
func (b *liveSandbox) trustsOthers() bool {
	ca := b.m.uplink.Trust()
	if len(ca) == 0 {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.trusts != guest.TrustDigest(ca)
}

// trustUplink makes the guest trust the Uplink's CAs, unless it does already. A failure, as
// on a full disk, is a condition and does not stop the sandbox; the next attempt is with the
// next CAs or in the guest's next run. Needs the transition lock.
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
	if err == nil && result.NeedsRoots && b.m.deps.PublicRoots != nil {
		var roots []byte
		if roots, err = b.m.deps.PublicRoots(); err == nil {
			trust.Roots = string(roots)
			_, err = b.guest.Trust(ctx, trust)
		}
	}
	if err != nil {
		b.m.log.Warn("failed to install the node's CA in a sandbox", "sandbox", b.id, "error", err)
		_ = b.failed(ConditionTrustFailed, fmt.Errorf("its programs may not trust the node's CA: %w", err))
	}
}
