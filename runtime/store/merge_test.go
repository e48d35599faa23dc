package store

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/dgraph-io/badger/v4"

	"github.com/doze-run/doze/testkit"
)

// awaitMerged waits until Badger's tables have been merged into a lower level.
func awaitMerged(t *testing.T, s *Badger) {
	t.Helper()
	testkit.Eventually(t, "a table is in a lower level", func() bool {
		return slices.ContainsFunc(s.db.Levels()[1:], func(l badger.LevelInfo) bool { return l.NumTables > 0 })
	}, func() string { return fmt.Sprintf("%d tables are in level 0", s.db.Levels()[0].NumTables) })
}

func TestTablesAreMergedWhileTheStoreIsWritten(t *testing.T) {
	s := openAt(t, t.TempDir(), small)
	value := bytes.Repeat([]byte("x"), 90<<10)
	// Of 1 MiB each; four times as many as Badger accepts without merging.
	const tables = 60
	for n := range (tables << 20) / len(value) {
		if err := s.PutDocument(t.Context(), "kind", fmt.Sprint("name-", n%10), value); err != nil {
			t.Fatalf("write %d: %v", n, err)
		}
	}
	awaitMerged(t, s)
}

func TestTablesOfEarlierRunsAreMerged(t *testing.T) {
	dir := t.TempDir()
	for n := range level0Tables + 2 {
		s := openAt(t, dir, small)
		if err := s.PutDocument(t.Context(), "kind", fmt.Sprint("name-", n), []byte("value")); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	s := openAt(t, dir, small)
	awaitMerged(t, s)
	found := 0
	if err := s.Documents(t.Context(), "kind", func(string, []byte) error { found++; return nil }); err != nil || found != level0Tables+2 {
		t.Fatalf("%d documents after merging, want %d (%v)", found, level0Tables+2, err)
	}
}
