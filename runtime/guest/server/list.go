package server

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
)

// maxHeldNames bounds the memory for names of a listing, and heldName is the cost of one
// beyond its bytes. A full folder with the longest names fits, and so does any that the
// listing itself may have; beyond that the listing is truncated.
const (
	maxHeldNames = guest.MaxListing
	heldName     = 32
)

func (s *Server) list(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	path, err := s.path(q.Get("path"))
	if err != nil {
		return err
	}
	names, held, more, err := readNames(path, maxHeldNames)
	if err != nil {
		return err
	}
	l := &listing{
		server: s, w: w, ctx: r.Context(), entriesLeft: guest.MaxEntries, held: held, truncated: more,
		recursive: q.Get("recursive") == "true", hidden: q.Get("hidden") == "true",
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	if err := l.folder(path, names); err != nil && !errors.Is(err, errFull) {
		panic(http.ErrAbortHandler) // the client is gone
	}
	return l.line(guest.ListLine{End: &guest.ListEnd{Truncated: l.truncated}})
}

// errFull ends a listing that has reached a limit.
var errFull = errors.New("the listing is full")

// listing writes the lines of one listing.
type listing struct {
	server            *Server
	w                 io.Writer
	ctx               context.Context
	recursive, hidden bool

	entriesLeft int
	bytes       int
	held        int // in bytes, for names in the folders that it is in
	truncated   bool
}

// folder writes the entries of a folder and, if the listing is recursive, of those in it. It
// omits entries that vanish meanwhile or cannot be read.
func (l *listing) folder(path string, names []string) error {
	for _, name := range names {
		if !l.hidden && strings.HasPrefix(name, ".") {
			continue
		}
		full := filepath.Join(path, name)
		info, err := os.Lstat(full)
		if err != nil {
			continue
		}
		entry := l.server.describe(full, info)
		if err := l.line(guest.ListLine{Entry: &entry}); err != nil {
			return err
		}
		if !l.recursive || !info.IsDir() {
			continue
		}
		below, held, more, err := readNames(full, maxHeldNames-l.held)
		if err != nil {
			continue
		}
		l.truncated = l.truncated || more
		l.held += held
		if err := l.folder(full, below); err != nil {
			return err
		}
		l.held -= held
	}
	return l.ctx.Err()
}

func (l *listing) line(line guest.ListLine) error {
	b, err := json.Marshal(line)
	if err != nil {
		return err
	}
	if line.Entry != nil {
		if l.entriesLeft == 0 || l.bytes+len(b) >= guest.MaxListing {
			l.truncated = true
			return errFull
		}
		l.entriesLeft--
	}
	l.bytes += len(b) + 1
	_, err = l.w.Write(append(b, '\n'))
	return err
}

// namesPart is how many names of a folder are read together.
const namesPart = 1024

// openDirectory opens a folder and nothing else: opening a pipe would wait for its writer.
func openDirectory(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
}

// readNames returns the sorted names in a folder, not many more than a listing may have or
// than limit bytes, how many bytes they take, and whether the folder has more.
func readNames(path string, limit int) (names []string, held int, more bool, err error) {
	dir, err := openDirectory(path)
	if err != nil {
		return nil, 0, false, err
	}
	defer dir.Close()
	for {
		part, err := dir.Readdirnames(namesPart)
		names = append(names, part...)
		for _, name := range part {
			held += len(name) + heldName
		}
		if len(names) > guest.MaxEntries || held > limit {
			more = true
			break
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, 0, false, err
		}
	}
	slices.Sort(names)
	return names, held, more, nil
}
