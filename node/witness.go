package node

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/doze-run/doze/runtime/store"
)

// witness is a file in the folder of Podman's containers with how many commits the
// node's store has had. A store with fewer is an older copy that was put back: what
// the containers are is then newer than what the store says. The file is locked while
// the node runs, so that two nodes on copies of one home do not use the same
// containers.
//
// Nothing waits until it is on the disk: after a loss of power it may be behind the
// store, and then an older copy may not be noticed; it is never ahead of it.
type witness struct {
	file *os.File
	log  *slog.Logger
}

// nodesDir is a folder of nodes' own in that of Podman's containers.
func nodesDir(containers string) string { return filepath.Join(containers, "doze") }

// creationsDir is where a node notes the creations that are under way.
func creationsDir(containers, nodeID string) string {
	return filepath.Join(nodesDir(containers), nodeID+".creating")
}

// originsDir is where a node notes the settings of its sandboxes.
func originsDir(containers, nodeID string) string {
	return filepath.Join(nodesDir(containers), nodeID+".origins")
}

// countLen is the length of the count in the file: digits of a uint64.
const countLen = 20

// openWitness opens, or makes, the witness of a node in the folder of Podman's
// containers. ErrInUse (wrapped) when a node with that id has it.
func openWitness(containers, nodeID, home string, log *slog.Logger) (w *witness, commits uint64, err error) {
	dir := nodesDir(containers)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, 0, fmt.Errorf("make the folder of the node's witness: %w", err)
	}
	path := filepath.Join(dir, nodeID)
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, 0, fmt.Errorf("open the node's witness: %w", err)
	}
	defer func() {
		if err != nil {
			file.Close()
		}
	}()
	holder := ""
	if b, err := io.ReadAll(io.LimitReader(file, 1<<12)); err == nil {
		count, rest, _ := strings.Cut(string(b), "\n")
		holder, _, _ = strings.Cut(rest, "\n") // the end of a longer one may follow
		if commits, err = strconv.ParseUint(strings.TrimSpace(count), 10, 64); err != nil && count != "" {
			log.Warn("ignoring unreadable witness of the store", "file", path, "error", err)
			commits = 0
		}
	}
	if err := lockWitness(file, path); err != nil {
		if errors.Is(err, store.ErrInUse) {
			return nil, 0, fmt.Errorf("node %s runs already on these containers, with its data in %s: %s is a copy of it; a node needs data of its own, "+
				"so remove %[4]s and its store from the copy: %[5]w", nodeID, holder, home, filepath.Join(home, nodeIDFile), err)
		}
		return nil, 0, err
	}
	w = &witness{file: file, log: log}
	if _, err := file.WriteAt(fmt.Appendf(nil, "%0*d\n%s\n", countLen, commits, home), 0); err != nil {
		log.Warn("failed to write the witness of the store", "file", path, "error", err)
	}
	return w, commits, nil
}

const (
	// lockWait is how long the lock of a killed node may outlive that of its store.
	lockWait = 2 * time.Second
	lockPoll = 5 * time.Millisecond
)

func lockWitness(file *os.File, path string) error {
	deadline := time.Now().Add(lockWait)
	for {
		err := store.Lock(file, path)
		if !errors.Is(err, store.ErrInUse) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(lockPoll)
	}
}

// note writes the count of commits; it takes a microsecond.
func (w *witness) note(commits uint64) {
	if _, err := w.file.WriteAt(fmt.Appendf(nil, "%0*d", countLen, commits), 0); err != nil {
		w.log.Warn("failed to write the witness of the store", "error", err)
	}
}

func (w *witness) Close() error { return w.file.Close() }
