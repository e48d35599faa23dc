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

// openPlaceholderKey reads the key of placeholders, or makes it.
func (e *Egress) openPlaceholderKey(ctx context.Context) (err error) {
	record := seal.Document{Store: e.cfg.Documents, Key: e.key, Kind: keysKind, Name: placeholderKey, Log: e.log}
	if e.placeholderKey, err = record.Read(ctx); err != nil {
		return fmt.Errorf("read the key of placeholders: %w", err)
	}
	if e.placeholderKey != nil {
		return nil
	}
	e.placeholderKey = make([]byte, 32)
	rand.Read(e.placeholderKey)
	if err := record.Write(ctx, e.placeholderKey); err != nil {
		return fmt.Errorf("write the key of placeholders: %w", err)
	}
	return nil
}
