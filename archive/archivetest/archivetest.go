// Package archivetest makes archives for tests.
package archivetest

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"
)

// Entry is one entry of an archive.
type Entry struct {
	Name, Body, Link string
	Kind             byte  // default: a regular file
	Mode             int64 // default: 0644
	PAX              map[string]string
}

// Modified is the time of each entry.
var Modified = time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC)

// Tar returns an archive of the entries.
func Tar(t testing.TB, entries ...Entry) []byte {
	t.Helper()
	var all bytes.Buffer
	for _, e := range entries {
		h := &tar.Header{
			Name: e.Name, Typeflag: cmp.Or(e.Kind, tar.TypeReg), Linkname: e.Link, Mode: cmp.Or(e.Mode, 0o644),
			Size: int64(len(e.Body)), ModTime: Modified, PAXRecords: e.PAX,
		}
		if e.Kind == tar.TypeXGlobalHeader {
			h = &tar.Header{Typeflag: e.Kind, PAXRecords: e.PAX}
		}
		var one bytes.Buffer
		w := tar.NewWriter(&one)
		err := w.WriteHeader(h)
		if err == nil {
			_, err = io.WriteString(w, e.Body)
		}
		if err := errors.Join(err, w.Flush()); err != nil {
			t.Fatal(err)
		}
		all.Write(one.Bytes())
	}
	all.Write(make([]byte, 1024))
	return all.Bytes()
}

// Gzip compresses.
func Gzip(t testing.TB, b []byte) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	w.Write(b)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// ProjectFiles and ProjectBytes count what Project has.
const (
	ProjectFiles = 10
	ProjectBytes = 5 + 10 + 1 + 1 + 4
)

// Project returns an archive with everything that may be in one.
func Project(t testing.TB) []byte {
	t.Helper()
	return Tar(t,
		Entry{Name: "./", Kind: tar.TypeDir, Mode: 0o700},
		Entry{Name: "./index.js", Body: "hello"},
		Entry{Name: "./bin/run.sh", Body: "#!/bin/sh\n", Mode: 0o755},
		Entry{Name: "./sealed/", Kind: tar.TypeDir, Mode: 0o555},
		Entry{Name: "./sealed/file", Body: "x", Mode: 0o444},
		Entry{Name: "./node_modules/pkg/bin/x.js", Body: "x"},
		Entry{Name: "./node_modules/.bin/x", Kind: tar.TypeSymlink, Link: "../pkg/bin/x.js"},
		Entry{Name: "./current", Kind: tar.TypeSymlink, Link: "node_modules/pkg"},
		Entry{Name: "./dangling", Kind: tar.TypeSymlink, Link: "not/there"},
		Entry{Name: "./hard", Kind: tar.TypeLink, Link: "./index.js"},
		Entry{Name: "./" + strings.Repeat("long/", 50) + "file", Body: "deep"},
	)
}

// Sparse returns an archive of less than 2 KiB with a file of 8 GiB.
func Sparse(t testing.TB) []byte {
	t.Helper()
	b := Tar(t, Entry{Name: "sparse"})
	b[156] = tar.TypeGNUSparse
	copy(b[257:], "ustar  \x00")
	copy(b[386:], "00000000000\x0000000000000\x00") // one empty piece
	copy(b[483:], "77777777777\x00")                // the size when unpacked
	copy(b[148:], "        ")                       // the checksum counts as spaces
	sum := 0
	for _, c := range b[:512] {
		sum += int(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	return b
}
