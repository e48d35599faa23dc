package node

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/doze-run/doze/runtime/store"
)

// nodeIDFile in the home has the id of the node to which the home belongs. It is not in
// the store, so that a missing store, or another node's, is detected: a node with a new
// id would not recognize its containers.
const nodeIDFile = "node_id"

// StoreDir is the folder of the store in a node's home.
func StoreDir(home string) string { return filepath.Join(home, "store") }

// ReadNodeID returns the id of the node to which a home belongs, or "" if it has none yet.
func ReadNodeID(home string) (string, error) {
	b, err := os.ReadFile(filepath.Join(home, nodeIDFile))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read the node's id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// openStore opens the store of the node to which the home belongs. In a new home it
// creates the store and the node's id. The caller closes the store.
func openStore(home string, log *slog.Logger) (*store.Badger, error) {
	id, err := ReadNodeID(home)
	if err != nil {
		return nil, err
	}
	if id != "" {
		return store.OpenOf(id, StoreDir(home), log)
	}
	records, err := store.Open(StoreDir(home), log)
	if err != nil {
		return nil, err
	}
	if err := writeNew(filepath.Join(home, nodeIDFile), 0o600, []byte(records.NodeID()+"\n")); err != nil {
		return nil, errors.Join(err, records.Close())
	}
	return records, nil
}
