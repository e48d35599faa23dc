package store

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/dgraph-io/badger/v4"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// exported returns all entries of a store.
func exported(t *testing.T, s *Badger) map[string]string {
	t.Helper()
	e, err := s.BeginExport(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	return entriesOf(t, e)
}

func entriesOf(t *testing.T, e *Export) map[string]string {
	t.Helper()
	all := map[string]string{}
	must(t, e.Entries(t.Context(), func(key, value []byte) error {
		must(t, CheckEntry(key, value))
		all[string(key)] = string(value)
		return nil
	}))
	return all
}

// createFrom creates a store with entries and opens it.
func createFrom(t *testing.T, nodeID string, entries map[string]string) *Badger {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "store")
	must(t, Create(dir, nodeID, func(put func(key, value []byte) error) error {
		for key, value := range entries {
			if err := put([]byte(key), []byte(value)); err != nil {
				return err
			}
		}
		return nil
	}))
	s, err := OpenOf(nodeID, dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestCreatedStoreHasAllEntries(t *testing.T) {
	s := openAt(t, t.TempDir(), defaultTuning)
	must(t, s.PutSandbox(t.Context(), testRecord(1)))
	must(t, s.AppendEvents(t.Context(), testEvents(1, 1, 7)))
	must(t, s.PutDocument(t.Context(), "rules", strings.Repeat("n", maxDocumentName), []byte("value")))
	must(t, s.PutDocument(t.Context(), "rules", "deleted", []byte("value")))
	must(t, s.DeleteDocument(t.Context(), "rules", "deleted"))
	entries := exported(t, s)
	if _, ok := entries["d/rules/deleted"]; ok {
		t.Error("the export has a deleted document")
	}

	created := createFrom(t, s.NodeID(), entries)
	if got := exported(t, created); !maps.Equal(got, entries) {
		t.Errorf("the created store has %d entries, want %d, or they differ", len(got), len(entries))
	}
	if got, want := created.Commits(), s.Commits(); got != want {
		t.Errorf("got %d commits, want %d", got, want)
	}
	if seq, err := created.LastSeq(t.Context(), testID(1)); err != nil || seq != 7 {
		t.Errorf("got last seq %d, %v; want 7", seq, err)
	}
	must(t, created.PutSandbox(t.Context(), testRecord(2)))
}

// More than Badger's level 0 may have: writes would wait for a merger.
func TestEventsOfACreatedStoreExpire(t *testing.T) {
	source := openAt(t, t.TempDir(), defaultTuning)
	must(t, source.AppendEvents(t.Context(), testEvents(1, 1, 3)))
	created := createFrom(t, source.NodeID(), exported(t, source))
	expiries := func(s *Badger) (list []uint64) {
		must(t, s.db.View(func(txn *badger.Txn) error {
			it := txn.NewIterator(badger.DefaultIteratorOptions)
			defer it.Close()
			for it.Seek(eventsPrefix); it.ValidForPrefix(eventsPrefix); it.Next() {
				list = append(list, it.Item().ExpiresAt())
			}
			return nil
		}))
		return list
	}
	want := expiries(source)
	if len(want) != 3 || want[0] == 0 {
		t.Fatalf("the source has the expiries %v", want)
	}
	testkit.Diff(t, "expiries", expiries(created), want)
}

func TestCreatedStoreMayHaveManyTables(t *testing.T) {
	const documents = 200
	value := strings.Repeat("v", maxRecord-1)
	source := openAt(t, t.TempDir(), defaultTuning)
	dir := filepath.Join(t.TempDir(), "store")
	must(t, Create(dir, source.NodeID(), func(put func(key, value []byte) error) error {
		for key, value := range exported(t, source) {
			must(t, put([]byte(key), []byte(value)))
		}
		for n := range documents {
			if err := put(fmt.Appendf(nil, "d/rules/%d", n), append([]byte{encodingBytes}, value...)); err != nil {
				return err
			}
		}
		return nil
	}))
	s, err := OpenOf(source.NodeID(), dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	got := 0
	must(t, s.Documents(t.Context(), "rules", func(_ string, have []byte) error {
		if string(have) != value {
			t.Error("a document differs")
		}
		got++
		return nil
	}))
	if got != documents {
		t.Errorf("got %d documents, want %d", got, documents)
	}
}

func TestExportHasAllAcknowledgedWritesAndNoGap(t *testing.T) {
	const writers = 8
	s := openAt(t, t.TempDir(), small)
	var acknowledged [writers]atomic.Int64
	stop := make(chan struct{})
	var all sync.WaitGroup
	defer all.Wait()
	defer close(stop)
	for n := range writers {
		all.Go(func() {
			for round := int64(1); ; round++ {
				select {
				case <-stop:
					return
				default:
				}
				// A document, then a record: an export with the record of a round has its document.
				name, value := strconv.Itoa(n), strconv.FormatInt(round, 10)
				sb := testRecord(n)
				sb.StateReason = sandbox.StateReason(value)
				if err := errors.Join(s.PutDocument(t.Context(), "rules", name, []byte(value)), s.PutSandbox(t.Context(), sb)); err != nil {
					t.Error(err)
					return
				}
				acknowledged[n].Store(round)
			}
		})
	}
	for range 20 {
		var before [writers]int64
		testkit.Eventually(t, "all writers write", func() bool {
			for n := range writers {
				if acknowledged[n].Load() <= before[n] {
					return false
				}
			}
			return true
		})
		for n := range writers {
			before[n] = acknowledged[n].Load()
		}
		entries := exported(t, s)
		for n := range writers {
			document, err := strconv.ParseInt(entries["d/rules/"+strconv.Itoa(n)][1:], 10, 64)
			must(t, err)
			sb, err := decodeSandbox(testID(n), []byte(entries[string(sandboxPrefix)+string(testID(n))]))
			must(t, err)
			record, err := strconv.ParseInt(string(sb.StateReason), 10, 64)
			must(t, err)
			if record < before[n] || document < record || document > record+1 {
				t.Fatalf("the export has the document of round %d and the record of round %d; %d was acknowledged before", document, record, before[n])
			}
		}
	}
}

// An export is the state of its beginning, even if it is read later.
func TestExportDoesNotChange(t *testing.T) {
	s := openAt(t, t.TempDir(), small)
	must(t, s.PutDocument(t.Context(), "rules", "a", []byte("before")))
	e, err := s.BeginExport(t.Context())
	must(t, err)
	defer e.Close()
	commits := s.Commits()
	must(t, s.DeleteDocument(t.Context(), "rules", "a"))
	big := []byte(strings.Repeat("v", small.maxRecord()-1))
	for n := range 40 { // several tables, which are merged
		must(t, s.PutDocument(t.Context(), "rules", strconv.Itoa(n%4), big))
	}
	if got := entriesOf(t, e); got["d/rules/a"] != "\x02before" || len(got) != 3 {
		t.Errorf("got %d entries and the document %q", len(got), got["d/rules/a"])
	}
	if e.Commits() != commits {
		t.Errorf("got %d commits, want %d", e.Commits(), commits)
	}
}

func TestCreateRefuses(t *testing.T) {
	s := openAt(t, t.TempDir(), small)
	id := s.NodeID()
	of := func(entries ...string) func(put func(key, value []byte) error) error {
		return func(put func(key, value []byte) error) error {
			for n := 0; n < len(entries); n += 2 {
				if err := put([]byte(entries[n]), []byte(entries[n+1])); err != nil {
					return err
				}
			}
			return nil
		}
	}
	node := exported(t, s)[string(nodeIDKey)]
	full := filepath.Join(t.TempDir(), "full")
	must(t, Create(full, id, of("n/", node)))
	for name, test := range map[string]struct {
		dir, id, want string
		entries       func(put func(key, value []byte) error) error
	}{
		"a folder with a store":   {full, id, "already contains a store", of("n/", node)},
		"an invalid id":           {"", "nope", "invalid node id", of("n/", node)},
		"entries without an id":   {"", id, "read the node's id", of("d/rules/a", "\x02v")},
		"entries of another node": {"", string(testID(1)), "belong to node " + id, of("n/", node)},
		"a foreign key":           {"", id, "invalid key", of("n/", node, "nope", "\x02v")},
		"a long key":              {"", id, "invalid key", of("n/", node, "d/"+strings.Repeat("k", maxKey), "\x02v")},
		"an empty value":          {"", id, "invalid value of 0 bytes", of("n/", node, "d/rules/a", "")},
		"a large value":           {"", id, "invalid value", of("n/", node, "d/rules/a", strings.Repeat("v", maxRecord+2))},
	} {
		dir := test.dir
		if dir == "" {
			dir = filepath.Join(t.TempDir(), "store")
		}
		if err := Create(dir, test.id, test.entries); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, test.want)
		}
	}
}
