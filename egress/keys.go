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

// NodeKey returns the node's key of that name, of 32 random bytes. It is made when it is
// first requested, and sealed in the store. Calls for one name must not overlap.
func (e *Egress) NodeKey(ctx context.Context, name string) ([]byte, error) {
	record := seal.Document{Store: e.cfg.Documents, Key: e.key, Kind: keysKind, Name: name, Log: e.log}
	key, err := record.Read(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the node's key %s: %w", name, err)
	}
	if key != nil {
		return key, nil
	}
	key = make([]byte, 32)
	rand.Read(key)
	if err := record.Write(ctx, key); err != nil {
		return nil, fmt.Errorf("write the node's key %s: %w", name, err)
	}
	return key, nil
}
