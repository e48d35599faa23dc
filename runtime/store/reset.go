package store

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/dgraph-io/badger/v4"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Reset moves the store in dir aside, to a folder next to it whose path it returns, and
// creates an empty one for the same node. It returns ErrInUse (wrapped) if a node has the
// store open. If it fails after the move, it returns the path as well.
func Reset(dir, nodeID string) (aside string, err error) {
	if !sandbox.IsID(nodeID) {
		return "", fmt.Errorf("invalid node id %q", nodeID)
	}
	if err := InUse(dir); err != nil {
		return "", err
	}
	aside = dir + ".damaged-" + time.Now().UTC().Format("20060102T150405Z")
	if err := os.Rename(dir, aside); err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("move the store aside: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return aside, fmt.Errorf("create the store's folder: %w", err)
	}
	db, err := badger.Open(badgerOptions(dir, discard, defaultTuning))
	if err != nil {
		return aside, fmt.Errorf("create an empty store in %s: %w", dir, err)
	}
	return aside, errors.Join(putNodeID(db, nodeID), db.Close())
}
