package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/dgraph-io/badger/v4"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// The contract of document.Store.
func TestDocumentsConform(t *testing.T) {
	conform(t, []contract{
		{"documents are listed unchanged, in order", documentsListed},
		{"a document replaces the older one", documentReplaces},
		{"a deleted document is gone and deleting is idempotent", documentDeleted},
		{"a document is read alone", documentRead},
		{"names are listed by prefix, and some skipped", documentNamesListed},
		{"kinds are separate", documentKindsSeparate},
		{"names are arbitrary bytes", documentNamesAreBytes},
		{"callers share no memory with the store", documentIsCopied},
		{"yield's error ends the iteration", documentsYieldError},
		{"yield may write", documentsYieldWrites},
		{"a document that is too large is refused and changes nothing", documentTooLarge},
		{"bad kinds and names are refused", documentBadKeys},
		{"an ended context changes nothing", documentsEndedContext},
		{"all methods work concurrently", documentsConcurrent},
		{"a closed store refuses", documentsClosedRefuses},
	})
}

// allDocuments returns every document of a kind by name, and fails the test if the names
// are not in order.
func allDocuments(t *testing.T, d *Badger, kind string) map[string]string {
	t.Helper()
	all := map[string]string{}
	var names []string
	must(t, d.Documents(t.Context(), kind, func(name string, value []byte) error {
		all[name] = string(value)
		names = append(names, name)
		return nil
	}))
	if !slices.IsSorted(names) || len(all) != len(names) {
		t.Errorf("got the names %q, want each once and in order", names)
	}
	return all
}

func documentsListed(t *testing.T, d *Badger) {
	want := map[string]string{}
	for n := range 300 {
		name, value := fmt.Sprintf("owner/%d", n), fmt.Sprintf("value %d\x00\xff", n)
		want[name] = value
		must(t, d.PutDocument(t.Context(), "rules", name, []byte(value)))
	}
	want["empty"] = ""
	must(t, d.PutDocument(t.Context(), "rules", "empty", nil))
	if got := allDocuments(t, d, "rules"); !maps.Equal(got, want) {
		t.Fatalf("got %d documents, want %d, or they differ", len(got), len(want))
	}
}

func documentReplaces(t *testing.T, d *Badger) {
	must(t, d.PutDocument(t.Context(), "rules", "a", []byte("a longer first value")))
	must(t, d.PutDocument(t.Context(), "rules", "a", []byte("second")))
	if got := allDocuments(t, d, "rules"); len(got) != 1 || got["a"] != "second" {
		t.Fatalf("got %q", got)
	}
}

func documentDeleted(t *testing.T, d *Badger) {
	must(t, d.PutDocument(t.Context(), "rules", "a", []byte("1")))
	must(t, d.PutDocument(t.Context(), "rules", "ab", []byte("2")))
	for range 2 {
		must(t, d.DeleteDocument(t.Context(), "rules", "a"))
	}
	if got := allDocuments(t, d, "rules"); len(got) != 1 || got["ab"] != "2" {
		t.Fatalf("got %q, want the second only", got)
	}
}

func documentRead(t *testing.T, d *Badger) {
	must(t, d.PutDocument(t.Context(), "rules", "a", []byte("value")))
	must(t, d.PutDocument(t.Context(), "rules", "empty", nil))
	for name, want := range map[string]string{"a": "value", "empty": ""} {
		if got, err := d.Document(t.Context(), "rules", name); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	for _, key := range [][2]string{{"rules", "b"}, {"rule", "a"}} {
		if got, err := d.Document(t.Context(), key[0], key[1]); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%q: %q, %v", key, got, err)
		}
	}
	if _, err := d.Document(t.Context(), "Rules", "a"); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a wrong kind: %v", err)
	}
}

func documentNamesListed(t *testing.T, d *Badger) {
	for _, name := range []string{"a", "a/1", "a/2", "b", "b/1", "ab"} {
		must(t, d.PutDocument(t.Context(), "rules", name, []byte(name)))
		must(t, d.PutDocument(t.Context(), "secrets", "other"+name, []byte(name)))
	}
	list := func(prefix string, next map[string]string) (names []string) {
		must(t, d.DocumentNames(t.Context(), "rules", prefix, func(name string) (string, error) {
			names = append(names, name)
			return next[name], nil
		}))
		return names
	}
	testkit.Diff(t, "all names", list("", nil), []string{"a", "a/1", "a/2", "ab", "b", "b/1"})
	testkit.Diff(t, "names with a prefix", list("a/", nil), []string{"a/1", "a/2"})
	testkit.Diff(t, "names without some", list("", map[string]string{"a/1": "a0", "b": "c"}), []string{"a", "a/1", "ab", "b"})
	testkit.Diff(t, "no names", list("c", nil), []string(nil))
	failed := errors.New("failed")
	testkit.ErrorIs(t, "DocumentNames", d.DocumentNames(t.Context(), "rules", "", func(string) (string, error) { return "", failed }), failed)
}

func documentKindsSeparate(t *testing.T, d *Badger) {
	must(t, d.PutDocument(t.Context(), "rule", "s/a", []byte("1")))
	must(t, d.PutDocument(t.Context(), "rules", "a", []byte("2")))
	must(t, d.DeleteDocument(t.Context(), "rul", "es/a"))
	if got := allDocuments(t, d, "rule"); len(got) != 1 || got["s/a"] != "1" {
		t.Errorf("rule has %q", got)
	}
	if got := allDocuments(t, d, "rules"); len(got) != 1 || got["a"] != "2" {
		t.Errorf("rules has %q", got)
	}
	if got := allDocuments(t, d, "secrets"); len(got) != 0 {
		t.Errorf("secrets has %q", got)
	}
}

func documentNamesAreBytes(t *testing.T, d *Badger) {
	want := map[string]string{}
	for _, name := range []string{"/", "a/b/", "\x00", "ÿ\xff", " ", strings.Repeat("n", 1000)} {
		want[name] = name
		must(t, d.PutDocument(t.Context(), "names", name, []byte(name)))
	}
	if got := allDocuments(t, d, "names"); !maps.Equal(got, want) {
		t.Fatalf("got %q, want %q", got, want)
	}
}

func documentIsCopied(t *testing.T, d *Badger) {
	value := []byte("as given")
	must(t, d.PutDocument(t.Context(), "rules", "a", value))
	value[0] = 'X'
	must(t, d.Documents(t.Context(), "rules", func(_ string, value []byte) error {
		value[0] = 'Y'
		return nil
	}))
	if got := allDocuments(t, d, "rules")["a"]; got != "as given" {
		t.Fatalf("got %q", got)
	}
}

func documentsYieldError(t *testing.T, d *Badger) {
	for _, name := range []string{"a", "b", "c"} {
		must(t, d.PutDocument(t.Context(), "rules", name, nil))
	}
	enough := errors.New("enough")
	calls := 0
	err := d.Documents(t.Context(), "rules", func(string, []byte) error { calls++; return enough })
	if err != enough || calls != 1 {
		t.Fatalf("got %v after %d calls, want %v after 1", err, calls, enough)
	}
}

func documentsYieldWrites(t *testing.T, d *Badger) {
	for _, name := range []string{"a", "b", "c"} {
		must(t, d.PutDocument(t.Context(), "rules", name, []byte("old")))
	}
	must(t, d.Documents(t.Context(), "rules", func(name string, _ []byte) error {
		return d.PutDocument(t.Context(), "rules", name, []byte("new"))
	}))
	for name, value := range allDocuments(t, d, "rules") {
		if value != "new" {
			t.Errorf("%s is %s, want new", name, value)
		}
	}
}

func documentTooLarge(t *testing.T, d *Badger) {
	must(t, d.PutDocument(t.Context(), "rules", "a", []byte("small")))
	var invalid *sandbox.InvalidError
	if err := d.PutDocument(t.Context(), "rules", "a", bytes.Repeat([]byte("x"), 1<<20)); !errors.As(err, &invalid) {
		t.Fatalf("got %v, want an InvalidError", err)
	}
	if got := allDocuments(t, d, "rules"); got["a"] != "small" {
		t.Fatalf("got %.20q", got)
	}
}

func documentBadKeys(t *testing.T, d *Badger) {
	for _, key := range [][2]string{{"", "a"}, {"a/b", "a"}, {"Rules", "a"}, {"ru les", "a"}, {strings.Repeat("k", 33), "a"}, {"rules", ""}, {"rules", strings.Repeat("n", 1001)}} {
		for what, err := range map[string]error{
			"put":    d.PutDocument(t.Context(), key[0], key[1], nil),
			"delete": d.DeleteDocument(t.Context(), key[0], key[1]),
		} {
			var invalid *sandbox.InvalidError
			if !errors.As(err, &invalid) {
				t.Errorf("%s of %.40q: got %v, want an InvalidError", what, key, err)
			}
		}
	}
	var invalid *sandbox.InvalidError
	if err := d.Documents(t.Context(), "a/b", func(string, []byte) error { return nil }); !errors.As(err, &invalid) {
		t.Errorf("listing got %v, want an InvalidError", err)
	}
}

func documentsEndedContext(t *testing.T, d *Badger) {
	must(t, d.PutDocument(t.Context(), "rules", "a", []byte("1")))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for what, err := range map[string]error{
		"put":    d.PutDocument(ctx, "rules", "b", nil),
		"delete": d.DeleteDocument(ctx, "rules", "a"),
		"list":   d.Documents(ctx, "rules", func(string, []byte) error { return nil }),
		"names":  d.DocumentNames(ctx, "rules", "", func(string) (string, error) { return "", nil }),
		"read":   second(d.Document(ctx, "rules", "a")),
	} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: got %v, want context.Canceled", what, err)
		}
	}
	if got := allDocuments(t, d, "rules"); len(got) != 1 || got["a"] != "1" {
		t.Errorf("got %q, want the first document only", got)
	}
}

func second[T any](_ T, err error) error { return err }

func documentsConcurrent(t *testing.T, d *Badger) {
	const workers, rounds = 16, 20
	var wg sync.WaitGroup
	for n := range workers {
		wg.Go(func() {
			for round := 1; round <= rounds; round++ {
				if err := errors.Join(
					d.PutDocument(t.Context(), "rules", fmt.Sprint(n), fmt.Append(nil, round)),
					d.PutDocument(t.Context(), "rules", fmt.Sprint(workers+n), nil),
					d.DeleteDocument(t.Context(), "rules", fmt.Sprint(workers+n)),
					d.Documents(t.Context(), "rules", func(string, []byte) error { return nil }),
				); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	all := allDocuments(t, d, "rules")
	if len(all) != workers {
		t.Fatalf("got %d documents, want %d", len(all), workers)
	}
	for name, value := range all {
		if value != fmt.Sprint(rounds) {
			t.Errorf("%s has round %s, want the last one", name, value)
		}
	}
}

func documentsClosedRefuses(t *testing.T, d *Badger) {
	must(t, d.PutDocument(t.Context(), "rules", "a", nil))
	must(t, d.Close())
	for what, err := range map[string]error{
		"put":    d.PutDocument(t.Context(), "rules", "b", nil),
		"delete": d.DeleteDocument(t.Context(), "rules", "a"),
		"list":   d.Documents(t.Context(), "rules", func(string, []byte) error { return nil }),
		"names":  d.DocumentNames(t.Context(), "rules", "", func(string) (string, error) { return "", nil }),
		"read":   second(d.Document(t.Context(), "rules", "a")),
		"export": second(d.BeginExport(t.Context())),
	} {
		if err == nil {
			t.Errorf("%s: got no error after Close", what)
		}
	}
}

func TestDocumentsSurviveReopening(t *testing.T) {
	dir := t.TempDir()
	s := openAt(t, dir, defaultTuning)
	if err := s.PutDocument(t.Context(), "secrets", "owner/token", []byte("sealed")); err != nil {
		t.Fatal(err)
	}
	if err := s.PutSandbox(t.Context(), testRecord(1)); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openAt(t, dir, defaultTuning)
	if got := allDocuments(t, s, "secrets"); len(got) != 1 || got["owner/token"] != "sealed" {
		t.Errorf("got %q", got)
	}
	if got := allRecords(t, s); len(got) != 1 {
		t.Errorf("got %d sandboxes in addition to the document, want 1", len(got))
	}
}

func TestDocumentsNeedHeadroom(t *testing.T) {
	s := openAt(t, t.TempDir(), defaultTuning)
	if err := s.PutDocument(t.Context(), "rules", "a", nil); err != nil {
		t.Fatal(err)
	}
	s.reserve.headroom = 1 << 62
	if err := s.PutDocument(t.Context(), "rules", "b", nil); !errors.Is(err, sandbox.ErrStoreFull) {
		t.Errorf("got %v, want ErrStoreFull", err)
	}
	if err := s.DeleteDocument(t.Context(), "rules", "a"); err != nil {
		t.Errorf("delete on a full disk: %v", err)
	}
	s.reserve.headroom = 0
}

func TestDocumentOfAnotherEncodingIsRefused(t *testing.T) {
	s := openAt(t, t.TempDir(), small)
	key, err := documentKey("rules", "a")
	must(t, err)
	must(t, s.db.Update(func(txn *badger.Txn) error { return txn.Set(key, []byte{encodingBytes + 1, 'x'}) }))
	err = s.Documents(t.Context(), "rules", func(string, []byte) error { return nil })
	if err == nil || !strings.Contains(err.Error(), `document rules "a"`) || !strings.Contains(err.Error(), "newer doze") {
		t.Errorf("got %v, want an error that names the document and the cause", err)
	}
}
