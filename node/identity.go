package node

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/doze-run/doze/egress"
	"github.com/doze-run/doze/runtime/store"
)

// nodeIDFile in the home has the id of the node to which the home belongs. It is not in
// the store, so that a missing store, or another node's, is detected: a node with a new
// id would not recognize its containers.
const nodeIDFile = "node_id"

// StoreDir is the folder of the store in a node's home.
func StoreDir(home string) string { return filepath.Join(home, "store") }

// SealingKeyFile is the file in a node's home with the key that encrypts secrets. It does not
// exist if systemd provides the key.
func SealingKeyFile(home string) string {
	return filepath.Join(egressFolder(home), egress.SealingKeyFile)
}

// egressFolder is the folder of egress in a node's home.
func egressFolder(home string) string { return filepath.Join(home, "egress") }

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

// WriteNodeID writes the id of the node to which a home belongs.
func WriteNodeID(home, id string) error {
	return writeNew(filepath.Join(home, nodeIDFile), 0o600, []byte(id+"\n"))
}

// OpenStore opens the store of the node to which the home belongs. In a new home it
// creates the store and the node's id. The caller closes the store.
//
// Errors: store.ErrInUse (wrapped) if another node uses the home, and the errors of store.Open.
func OpenStore(home string, log *slog.Logger) (*store.Badger, error) {
	if err := os.MkdirAll(home, 0o700); err != nil {
		return nil, fmt.Errorf("create the node's folder: %w", err)
	}
	restrict(home, log)
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
	if err := WriteNodeID(home, records.NodeID()); err != nil {
		return nil, errors.Join(err, records.Close())
	}
	return records, nil
}
