package server

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
)

// binaryProbe is how much of a file is searched for a zero byte, which text files do not
// have.
const binaryProbe = 8 << 10

// search finds files by their names, or lines of files by a regular expression.
func (s *Server) search(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	root, err := s.path(q.Get("path"))
	if err != nil {
		return err
	}
	limit, err := strconv.Atoi(q.Get("limit"))
	if err != nil || limit < 1 || limit > guest.MaxMatches {
		return refuse(guest.CodeInvalid, "limit %.40q is not a number from 1 to %d", q.Get("limit"), guest.MaxMatches)
	}
	x := &searching{server: s, w: w, left: limit, hidden: q.Get("hidden") == "true", name: q.Get("name"), exclude: q["exclude"]}
	for _, glob := range append(slices.Clone(x.exclude), x.name) {
		if _, err := path.Match(glob, ""); err != nil {
			return refuse(guest.CodeInvalid, "%.100q is not a pattern of names", glob)
		}
	}
	if q.Has("content") {
		if x.content, err = regexp.Compile(q.Get("content")); err != nil {
			return refuse(guest.CodeInvalid, "content: %v", err)
		}
		x.lines = bufio.NewReaderSize(nil, guest.MaxSearchLine)
	}
	info, err := os.Stat(root)
	if err != nil {
		return err
	}
	var cancel context.CancelFunc
	x.ctx, cancel = context.WithTimeoutCause(r.Context(), guest.SearchTimeout, errTimeout)
	defer cancel()
	w.Header().Set("Content-Type", "application/x-ndjson")
	if info.IsDir() {
		err = x.directory(root)
	} else {
		err = x.file(root, info)
	}
	end := guest.SearchEnd{}
	switch {
	case errors.Is(err, errFull):
		end.Stopped = guest.SearchStoppedByLimit
	case context.Cause(x.ctx) == errTimeout:
		end.Stopped = guest.SearchStoppedByTime
	case err != nil:
		panic(http.ErrAbortHandler) // the client is gone, or the search cannot go on
	}
	return x.send(guest.SearchLine{End: &end})
}

// errTimeout ends a search after guest.SearchTimeout.
var errTimeout = errors.New("the search took too long")

// searching is one search. It follows no symbolic links, and skips what it cannot read.
type searching struct {
	server  *Server
	w       http.ResponseWriter
	ctx     context.Context
	left    int // results
	hidden  bool
	name    string // pattern; empty: any
	exclude []string
	content *regexp.Regexp // nil: only names
	lines   *bufio.Reader
}

// directory searches a directory. It reads some names at a time.
func (x *searching) directory(folder string) error {
	dir, err := openDirectory(folder)
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		return err // a search without this directory would not be complete
	}
	if err != nil {
		return x.ctx.Err()
	}
	defer dir.Close()
	for {
		names, err := dir.Readdirnames(namesPart)
		slices.Sort(names)
		if err := x.names(folder, names); err != nil {
			return err
		}
		if err != nil { // io.EOF, or it was removed
			return x.ctx.Err()
		}
	}
}

func (x *searching) names(folder string, names []string) error {
	for _, name := range names {
		if err := x.ctx.Err(); err != nil {
			return err
		}
		if !x.hidden && strings.HasPrefix(name, ".") || slices.ContainsFunc(x.exclude, func(glob string) bool { return matches(glob, name) }) {
			continue
		}
		full := filepath.Join(folder, name)
		info, err := os.Lstat(full)
		if err != nil {
			continue
		}
		if err := x.file(full, info); err != nil {
			return err
		}
		if info.IsDir() {
			if err := x.directory(full); err != nil {
				return err
			}
		}
	}
	return nil
}

// matches reports whether a valid pattern matches a name.
func matches(glob, name string) bool {
	ok, _ := path.Match(glob, name)
	return ok
}

// file sends a file that matches, or its lines that match.
func (x *searching) file(full string, info fs.FileInfo) error {
	if x.name != "" && !matches(x.name, filepath.Base(full)) {
		return nil
	}
	if x.content == nil {
		file := x.server.describe(full, info)
		return x.result(guest.SearchLine{File: &file})
	}
	if !info.Mode().IsRegular() {
		return nil
	}
	fd, err := unix.Open(full, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), full)
	defer f.Close()
	x.lines.Reset(untilDone{x.ctx, f})
	if head, _ := x.lines.Peek(binaryProbe); bytes.IndexByte(head, 0) >= 0 {
		return nil
	}
	return x.linesOf(full)
}

// linesOf sends the matching lines of the file that x.lines reads. Lines that exceed
// guest.MaxSearchLine do not match.
func (x *searching) linesOf(full string) error {
	for number := 1; ; number++ {
		line, err := x.lines.ReadSlice('\n')
		long := false
		for err == bufio.ErrBufferFull {
			long = true
			_, err = x.lines.ReadSlice('\n')
		}
		line = bytes.TrimRight(line, "\r\n")
		if at := x.content.FindIndex(line); at != nil && !long && !(err != nil && len(line) == 0) {
			match := guest.NewMatch(x.server.shown(full), number, at[0], line)
			if err := x.result(guest.SearchLine{Match: &match}); err != nil {
				return err
			}
		}
		if err != nil {
			return x.ctx.Err()
		}
	}
}

// result sends a result, or returns errFull if there are as many as permitted.
func (x *searching) result(line guest.SearchLine) error {
	if x.left == 0 {
		return errFull
	}
	x.left--
	return x.send(line)
}

func (x *searching) send(line guest.SearchLine) error {
	b, err := json.Marshal(line)
	if err == nil {
		_, err = x.w.Write(append(b, '\n'))
	}
	return err
}
