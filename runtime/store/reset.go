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
// creates an empty one for the same node. If dir has no store, the path is empty. Reset returns
// ErrInUse (wrapped) if a node has the store open.
func Reset(dir, nodeID string) (aside string, err error) {
	if !sandbox.IsID(nodeID) {
		return "", fmt.Errorf("invalid node id %q", nodeID)
	}
	if err := InUse(dir); err != nil {
		return "", err
	}
	aside = dir + ".damaged-" + time.Now().UTC().Format("20060102T150405Z")
	switch err := os.Rename(dir, aside); {
	case errors.Is(err, os.ErrNotExist):
		aside = ""
	case err != nil:
		return "", fmt.Errorf("move the store aside: %w", err)
	}
	if err := createEmpty(dir, nodeID); err != nil {
		return "", fmt.Errorf("create an empty store in %s, whose previous content is in %q: %w", dir, aside, err)
	}
	return aside, nil
}

// createEmpty creates an empty store of a node.
func createEmpty(dir, nodeID string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	db, err := badger.Open(badgerOptions(dir, discard, defaultTuning))
	if err != nil {
		return err
	}
	return errors.Join(putNodeID(db, nodeID), db.Close())
}
