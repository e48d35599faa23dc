//go:build integration

package podman

import (
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
)

// BenchmarkContainer times each step of a container's life on its own.
func BenchmarkContainer(b *testing.B) {
	n := open(b)
	ctx := b.Context()
	if err := n.EnsureImage(ctx, baseImage, nil); err != nil {
		b.Fatal(err)
	}
	steps := newStopwatch()
	for b.Loop() {
		spec := n.spec(b, sandbox.NewID())
		spec.GuestBinary = guestBinary(b)
		steps.do(b, "image", func() error { return n.EnsureImage(ctx, baseImage, nil) })
		steps.do(b, "create", func() error { return n.Create(ctx, spec) })
		steps.do(b, "start", func() error { _, err := n.Start(ctx, spec.ID, limits); return err })
		steps.do(b, "inspect", func() error { _, err := n.Inspect(ctx, spec.ID); return err })
		steps.do(b, "pause", func() error { return n.pause(ctx, spec.ID) })
		steps.do(b, "unpause", func() error { return n.unpause(ctx, spec.ID) })
		steps.do(b, "remove", func() error { return n.Remove(ctx, spec.ID) })
	}
	steps.report(b)
}
