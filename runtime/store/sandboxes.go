package store

import (
	"context"
	"fmt"

	"github.com/doze-run/doze/runtime/sandbox"
)

// PutSandbox implements sandbox.Store. A record of more than 800 KiB is refused
// with a *sandbox.InvalidError.
func (s *Badger) PutSandbox(ctx context.Context, sb sandbox.Sandbox) error {
	if err := checkID(sb.ID); err != nil {
		return err
	}
	value, err := encode("sandbox", sb, s.maxRecord)
	if err != nil {
		return err
	}
	return s.writeAndWait(ctx, &write{key: sandboxKey(sb.ID), value: value})
}

// DeleteSandbox implements sandbox.Store.
func (s *Badger) DeleteSandbox(ctx context.Context, id sandbox.ID) error {
	if err := checkID(id); err != nil {
		return err
	}
	return s.writeAndWait(ctx, &write{key: sandboxKey(id)})
}

// Sandboxes implements sandbox.Store. It fails on the first unreadable record: a node that
// ignored the record would treat the sandbox's container as one without a record.
func (s *Badger) Sandboxes(ctx context.Context, yield func(sandbox.Sandbox) error) error {
	return s.each(ctx, sandboxPrefix, func(id string, value []byte) error {
		sb, err := decodeSandbox(sandbox.ID(id), value)
		if err != nil {
			return err
		}
		return yield(sb)
	})
}

// decodeSandbox decodes the record of a sandbox.
func decodeSandbox(id sandbox.ID, value []byte) (sandbox.Sandbox, error) {
	var sb sandbox.Sandbox
	if err := decode(value, &sb); err != nil {
		return sandbox.Sandbox{}, fmt.Errorf("record of sandbox %s: %w", id, err)
	}
	if sb.ID != id {
		return sandbox.Sandbox{}, fmt.Errorf("record of sandbox %s: it has the id %q", id, sb.ID)
	}
	return sb, nil
}
