package node

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/store"
)

func TestHomeAndStoreBelongToOneNode(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	home := t.TempDir()
	records, err := OpenStore(home, log)
	if err != nil {
		t.Fatal(err)
	}
	id := records.NodeID()
	if err := records.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadNodeID(home); err != nil || got != id {
		t.Errorf("the home has the id %q, %v; want %s", got, err, id)
	}
	// As of an earlier version.
	if err := os.Remove(filepath.Join(home, nodeIDFile)); err != nil {
		t.Fatal(err)
	}
	if records, err = OpenStore(home, log); err != nil || records.NodeID() != id {
		t.Fatalf("without the file: %v", err)
	}
	if err := records.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(StoreDir(home)); err != nil {
		t.Fatal(err)
	}
	var damage *store.DamageError
	if _, err := OpenStore(home, log); !errors.As(err, &damage) {
		t.Errorf("without the store: %v", err)
	}
}

func TestWitnessStoresTheCountAndExcludesASecondNode(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	containers := t.TempDir()
	open := func(home string) (*witness, uint64, error) { return openWitness(containers, "abcdefghijkl", home, log) }
	w, commits, err := open("/home/a")
	if err != nil || commits != 0 {
		t.Fatalf("new: %d, %v", commits, err)
	}
	w.record(41)
	w.record(42)
	if _, _, err := open("/home/b"); !errors.Is(err, store.ErrInUse) {
		t.Errorf("a second node: %v", err)
	}
	if other, _, err := openWitness(containers, "bbbbbbbbbbbb", "/home/b", log); err != nil {
		t.Errorf("another node: %v", err)
	} else {
		other.Close()
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	w, commits, err = open("/a")
	if err != nil || commits != 42 {
		t.Fatalf("again: %d, %v", commits, err)
	}
	if _, _, err := open("/home/b"); err == nil || !strings.Contains(err.Error(), "its data in /a: ") {
		t.Errorf("a second node: %v; want the folder of the first", err)
	}
	w.Close()
	if err := os.WriteFile(filepath.Join(containers, "doze", "abcdefghijkl"), []byte("garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
	if w, commits, err = open("/a"); err != nil || commits != 0 {
		t.Errorf("unreadable: %d, %v", commits, err)
	} else {
		w.Close()
	}
}
