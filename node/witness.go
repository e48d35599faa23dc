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

// witness is a file in the folder of Podman's containers with the number of commits that
// the node's store has had. A store with fewer commits is an older copy that was restored:
// the containers are newer than its records. The file is locked while the node runs, so
// that two nodes on copies of one home do not use the same containers.
//
// The file is not synced. After a loss of power its count may be lower than the store's,
// and then an older copy may go unnoticed; it is never higher.
type witness struct {
	file *os.File
	log  *slog.Logger
}

// nodesDir is the folder of all nodes' files inside the folder of Podman's containers.
func nodesDir(containers string) string { return filepath.Join(containers, "doze") }

// countLen is the length of the count in the file: the decimal digits of a uint64.
const countLen = 20

// openWitness opens the witness of a node in the folder of Podman's containers, and
// creates it if it does not exist. commits is the recorded count, 0 if it is unreadable.
// It returns store.ErrInUse (wrapped) if a running node has the same id.
func openWitness(containers, nodeID, home string, log *slog.Logger) (w *witness, commits uint64, err error) {
	dir := nodesDir(containers)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, 0, fmt.Errorf("create the folder of the node's witness: %w", err)
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
		count, after, _ := strings.Cut(string(b), "\n")
		holder, _, _ = strings.Cut(after, "\n") // the end of a longer path may follow
		if commits, err = strconv.ParseUint(strings.TrimSpace(count), 10, 64); err != nil && count != "" {
			log.Warn("ignoring unreadable witness of the store", "file", path, "error", err)
			commits = 0
		}
	}
	if err := lockWitness(file, path); err != nil {
		if errors.Is(err, store.ErrInUse) {
			return nil, 0, fmt.Errorf("node %s already runs on these containers, with its data in %s: %s is a copy of it; a node needs its own data, "+
				"so remove %[4]s and the store from the copy: %[5]w", nodeID, holder, home, filepath.Join(home, nodeIDFile), err)
		}
		return nil, 0, err
	}
	w = &witness{file: file, log: log}
	if _, err := file.WriteAt(fmt.Appendf(nil, "%0*d\n%s\n", countLen, commits, home), 0); err != nil {
		log.Warn("failed to write the witness of the store", "file", path, "error", err)
	}
	return w, commits, nil
}

// watch records every commit of the store. restored reports whether the store is older
// than the recorded count.
func (w *witness) watch(records *store.Badger, commits uint64) (restored bool) {
	if restored = commits > records.Commits(); restored {
		w.log.Error("the node's data is older than its containers: an older copy was restored, or the newest changes were lost",
			"commits", records.Commits(), "expected_commits", commits, "remedy", "see `doze doctor`: containers without a record are in quarantine")
		records.AdvanceCommits(commits)
	}
	records.Witness(w.record)
	return restored
}

const (
	// lockWait is how long the lock of a killed node may outlive the lock of its store.
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

// record writes the count of commits; it takes a microsecond.
func (w *witness) record(commits uint64) {
	if _, err := w.file.WriteAt(fmt.Appendf(nil, "%0*d", countLen, commits), 0); err != nil {
		w.log.Warn("failed to write the witness of the store", "error", err)
	}
}

func (w *witness) Close() error { return w.file.Close() }
