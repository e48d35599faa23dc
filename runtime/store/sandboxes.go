package store

import (
	"context"
	"fmt"

	"github.com/doze-run/doze/runtime/sandbox"
)

// PutSandbox implements sandbox.Store. A record of more than 800 KiB is refused
// with a *sandbox.InvalidError.
func (s *Badger) PutSandbox(ctx context.Context, sb sandbox.Sandbox) error {
	return s.putRecord(ctx, sandboxPrefix, string(sb.ID), "sandbox", sb)
}

// DeleteSandbox implements sandbox.Store.
func (s *Badger) DeleteSandbox(ctx context.Context, id sandbox.ID) error {
	return s.deleteRecord(ctx, sandboxPrefix, string(id))
}

// putRecord writes the record of what with that id.
func (s *Badger) putRecord(ctx context.Context, prefix []byte, id, what string, record any) error {
	key, err := recordKey(prefix, id)
	if err != nil {
		return err
	}
	value, err := encode(what, record, s.maxRecord)
	if err != nil {
		return err
	}
	return s.writeAndWait(ctx, &write{key: key, value: value})
}

func (s *Badger) deleteRecord(ctx context.Context, prefix []byte, id string) error {
	key, err := recordKey(prefix, id)
	if err != nil {
		return err
	}
	return s.writeAndWait(ctx, &write{key: key})
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
