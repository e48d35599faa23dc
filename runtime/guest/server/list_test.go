package server

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"testing"
)

func TestListingEndsWhenItIsFull(t *testing.T) {
	dir := t.TempDir()
	for i := range 10 {
		if err := os.MkdirAll(fmt.Sprintf("%s/a/%d", dir, i), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		entriesLeft int
		lines       int
		full        bool
	}{{5, 5, true}, {10, 10, true}, {11, 11, false}, {100, 11, false}} {
		var out bytes.Buffer
		l := &listing{server: &Server{cfg: Config{Root: "/"}}, w: &out, ctx: t.Context(), recursive: true, entriesLeft: tt.entriesLeft}
		err := l.folder(dir, []string{"a"})
		if errors.Is(err, errFull) != tt.full || l.truncated != tt.full || bytes.Count(out.Bytes(), []byte("\n")) != tt.lines {
			t.Errorf("with room for %d: %v, truncated %v, %s", tt.entriesLeft, err, l.truncated, &out)
		}
	}
}

func TestNamesThatAListingHoldsAreBounded(t *testing.T) {
	dir := t.TempDir()
	for i := range 2000 {
		if err := os.MkdirAll(fmt.Sprintf("%s/a/b/%d", dir, i), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, held := range []int{0, maxHeldNames} { // in folders above
		var out bytes.Buffer
		l := &listing{server: &Server{cfg: Config{Root: "/"}}, w: &out, ctx: t.Context(), recursive: true, entriesLeft: 10_000, held: held}
		err := l.folder(dir, []string{"a"})
		all := bytes.Count(out.Bytes(), []byte("\n")) == 2002
		if full := held > 0; err != nil || l.held != held || l.truncated != full || all == full {
			t.Errorf("with %d bytes held: %v, %d bytes held, truncated %v, all %v", held, err, l.held, l.truncated, all)
		}
	}
}
