// Package documentstest is the conformance suite for stores of documents.
package documentstest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store/document"
)

// Documents is the interface under test. store.Badger documents its contract.
type Documents interface {
	document.Store
	Close() error
}

// Run checks the stores that open returns. Each must be empty; Run closes it.
func Run(t *testing.T, open func(t *testing.T) Documents) {
	tests := []struct {
		name string
		run  func(t *testing.T, d Documents)
	}{
		{"documents are listed unchanged, in order", listed},
		{"a document replaces the older one", replaces},
		{"a deleted document is gone and deleting is idempotent", deleted},
		{"kinds are separate", kindsSeparate},
		{"names are arbitrary bytes", anyName},
		{"callers share no memory with the store", copied},
		{"yield's error ends the iteration", yieldError},
		{"yield may write", yieldWrites},
		{"a document that is too large is refused and changes nothing", tooLarge},
		{"bad kinds and names are refused", badKeys},
		{"an ended context changes nothing", endedContext},
		{"all methods work concurrently", concurrent},
		{"a closed store refuses", closedRefuses},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := open(t)
			t.Cleanup(func() { d.Close() })
			tt.run(t, d)
		})
	}
}

// All returns every document of a kind by name, and fails the test if the names are not in
// order.
func All(t *testing.T, d Documents, kind string) map[string]string {
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

func listed(t *testing.T, d Documents) {
	want := map[string]string{}
	for n := range 300 {
		name, value := fmt.Sprintf("owner/%d", n), fmt.Sprintf("value %d\x00\xff", n)
		want[name] = value
		must(t, d.PutDocument(t.Context(), "rules", name, []byte(value)))
	}
	want["empty"] = ""
	must(t, d.PutDocument(t.Context(), "rules", "empty", nil))
	if got := All(t, d, "rules"); !maps.Equal(got, want) {
		t.Fatalf("got %d documents, want %d, or they differ", len(got), len(want))
	}
}

func replaces(t *testing.T, d Documents) {
	must(t, d.PutDocument(t.Context(), "rules", "a", []byte("a longer first value")))
	must(t, d.PutDocument(t.Context(), "rules", "a", []byte("second")))
	if got := All(t, d, "rules"); len(got) != 1 || got["a"] != "second" {
		t.Fatalf("got %q", got)
	}
}

func deleted(t *testing.T, d Documents) {
	must(t, d.PutDocument(t.Context(), "rules", "a", []byte("1")))
	must(t, d.PutDocument(t.Context(), "rules", "ab", []byte("2")))
	for range 2 {
		must(t, d.DeleteDocument(t.Context(), "rules", "a"))
	}
	if got := All(t, d, "rules"); len(got) != 1 || got["ab"] != "2" {
		t.Fatalf("got %q, want the second only", got)
	}
}

func kindsSeparate(t *testing.T, d Documents) {
	must(t, d.PutDocument(t.Context(), "rule", "s/a", []byte("1")))
	must(t, d.PutDocument(t.Context(), "rules", "a", []byte("2")))
	must(t, d.DeleteDocument(t.Context(), "rul", "es/a"))
	if got := All(t, d, "rule"); len(got) != 1 || got["s/a"] != "1" {
		t.Errorf("rule has %q", got)
	}
	if got := All(t, d, "rules"); len(got) != 1 || got["a"] != "2" {
		t.Errorf("rules has %q", got)
	}
	if got := All(t, d, "secrets"); len(got) != 0 {
		t.Errorf("secrets has %q", got)
	}
}

func anyName(t *testing.T, d Documents) {
	want := map[string]string{}
	for _, name := range []string{"/", "a/b/", "\x00", "ÿ\xff", " ", strings.Repeat("n", 200)} {
		want[name] = name
		must(t, d.PutDocument(t.Context(), "names", name, []byte(name)))
	}
	if got := All(t, d, "names"); !maps.Equal(got, want) {
		t.Fatalf("got %q, want %q", got, want)
	}
}

func copied(t *testing.T, d Documents) {
	value := []byte("as given")
	must(t, d.PutDocument(t.Context(), "rules", "a", value))
	value[0] = 'X'
	must(t, d.Documents(t.Context(), "rules", func(_ string, value []byte) error {
		value[0] = 'Y'
		return nil
	}))
	if got := All(t, d, "rules")["a"]; got != "as given" {
		t.Fatalf("got %q", got)
	}
}

func yieldError(t *testing.T, d Documents) {
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

func yieldWrites(t *testing.T, d Documents) {
	for _, name := range []string{"a", "b", "c"} {
		must(t, d.PutDocument(t.Context(), "rules", name, []byte("old")))
	}
	must(t, d.Documents(t.Context(), "rules", func(name string, _ []byte) error {
		return d.PutDocument(t.Context(), "rules", name, []byte("new"))
	}))
	for name, value := range All(t, d, "rules") {
		if value != "new" {
			t.Errorf("%s is %s, want new", name, value)
		}
	}
}

func tooLarge(t *testing.T, d Documents) {
	must(t, d.PutDocument(t.Context(), "rules", "a", []byte("small")))
	var invalid *sandbox.InvalidError
	if err := d.PutDocument(t.Context(), "rules", "a", bytes.Repeat([]byte("x"), 1<<20)); !errors.As(err, &invalid) {
		t.Fatalf("got %v, want an InvalidError", err)
	}
	if got := All(t, d, "rules"); got["a"] != "small" {
		t.Fatalf("got %.20q", got)
	}
}

func badKeys(t *testing.T, d Documents) {
	for _, key := range [][2]string{{"", "a"}, {"a/b", "a"}, {"Rules", "a"}, {"ru les", "a"}, {strings.Repeat("k", 33), "a"}, {"rules", ""}, {"rules", strings.Repeat("n", 201)}} {
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

func endedContext(t *testing.T, d Documents) {
	must(t, d.PutDocument(t.Context(), "rules", "a", []byte("1")))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for what, err := range map[string]error{
		"put":    d.PutDocument(ctx, "rules", "b", nil),
		"delete": d.DeleteDocument(ctx, "rules", "a"),
		"list":   d.Documents(ctx, "rules", func(string, []byte) error { return nil }),
	} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: got %v, want context.Canceled", what, err)
		}
	}
	if got := All(t, d, "rules"); len(got) != 1 || got["a"] != "1" {
		t.Errorf("got %q, want the first document only", got)
	}
}

func concurrent(t *testing.T, d Documents) {
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
	all := All(t, d, "rules")
	if len(all) != workers {
		t.Fatalf("got %d documents, want %d", len(all), workers)
	}
	for name, value := range all {
		if value != fmt.Sprint(rounds) {
			t.Errorf("%s has round %s, want the last one", name, value)
		}
	}
}

func closedRefuses(t *testing.T, d Documents) {
	must(t, d.PutDocument(t.Context(), "rules", "a", nil))
	must(t, d.Close())
	for what, err := range map[string]error{
		"put":    d.PutDocument(t.Context(), "rules", "b", nil),
		"delete": d.DeleteDocument(t.Context(), "rules", "a"),
		"list":   d.Documents(t.Context(), "rules", func(string, []byte) error { return nil }),
	} {
		if err == nil {
			t.Errorf("%s: got no error after Close", what)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
