package egress

import (
	"context"
	"crypto/rand"
	"fmt"

	"github.com/doze-run/doze/egress/secret/seal"
)

// keysKind is the kind of the documents that hold the node's sealed keys.
// placeholderKey is the name of the key from which placeholders are derived.
const (
	keysKind       = "keys"
	placeholderKey = "placeholder"
)

// openPlaceholderKey reads the key of placeholders, or makes it. A value sealed with an
// old key is sealed again with the current one.
func (e *Egress) openPlaceholderKey(ctx context.Context) error {
	record := seal.Document{Store: e.cfg.Documents, Key: e.key, Kind: keysKind, Name: placeholderKey}
	key, old, err := record.Read(ctx)
	if err != nil {
		return fmt.Errorf("read the key of placeholders: %w", err)
	}
	e.placeholderKey = key
	if key == nil {
		e.placeholderKey = make([]byte, 32)
		rand.Read(e.placeholderKey)
	}
	if key != nil && !old {
		return nil
	}
	if err := record.Write(ctx, e.placeholderKey); err != nil && key == nil {
		return fmt.Errorf("write the key of placeholders: %w", err)
	} else if err != nil {
		e.log.Error("failed to seal the key of placeholders with the new key; keep the old one", "error", err)
	}
	return nil
}
