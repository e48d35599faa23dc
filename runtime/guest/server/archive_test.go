package server_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/server"
	"github.com/doze-run/doze/testkit"
)

// entry is one entry of an archive in a test.
type entry struct {
	name, body, link string
	kind             byte // default: a regular file
	mode             int64
	pax              map[string]string
}

var modified = time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC)

func makeTar(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Typeflag: e.kind, Linkname: e.link, Mode: e.mode, Size: int64(len(e.body)), ModTime: modified, PAXRecords: e.pax}
		if e.kind == 0 {
			h.Typeflag = tar.TypeReg
		}
		if e.mode == 0 {
			h.Mode = 0o644
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func gzipped(t testing.TB, b []byte) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	w.Write(b)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func project(t testing.TB) []byte {
	return makeTar(t,
		entry{name: "./", kind: tar.TypeDir, mode: 0o700},
		entry{name: "./index.js", body: "hello"},
		entry{name: "./bin/run.sh", body: "#!/bin/sh\n", mode: 0o755},
		entry{name: "./sealed/", kind: tar.TypeDir, mode: 0o555},
		entry{name: "./sealed/file", body: "x", mode: 0o444},
		entry{name: "./node_modules/pkg/bin/x.js", body: "x"},
		entry{name: "./node_modules/.bin/x", kind: tar.TypeSymlink, link: "../pkg/bin/x.js"},
		entry{name: "./current", kind: tar.TypeSymlink, link: "node_modules/pkg"},
		entry{name: "./dangling", kind: tar.TypeSymlink, link: "not/there"},
		entry{name: "./hard", kind: tar.TypeLink, link: "./index.js"},
		entry{name: "./" + strings.Repeat("long/", 50) + "file", body: "deep"},
	)
}

func TestPutArchive(t *testing.T) {
	for _, tt := range []struct {
		name    string
		archive func(t *testing.T) []byte
	}{
		{"tar", func(t *testing.T) []byte { return project(t) }},
		{"tar.gz", func(t *testing.T) []byte { return gzipped(t, project(t)) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "new")
			c := start(t, nil)
			for range 2 { // the second time over the first
				res, err := c.PutArchive(t.Context(), dir, bytes.NewReader(tt.archive(t)))
				if err != nil {
					t.Fatal(err)
				}
				if res.Files != 10 || res.Bytes != 5+10+1+1+4 {
					t.Errorf("result %+v", res)
				}
			}
			t.Cleanup(func() { os.Chmod(dir+"/sealed", 0o755) })
			for path, want := range map[string]struct {
				mode fs.FileMode
				body string
			}{
				"index.js": {0o644, "hello"}, "bin/run.sh": {0o755, "#!/bin/sh\n"}, "sealed/file": {0o444, "x"},
				"node_modules/.bin/x": {0o644, "x"}, "current/bin/x.js": {0o644, "x"}, "hard": {0o644, "hello"},
				strings.Repeat("long/", 50) + "file": {0o644, "deep"},
			} {
				info, err := os.Stat(filepath.Join(dir, path))
				if err != nil {
					t.Fatal(err)
				}
				if info.Mode() != want.mode || !info.ModTime().Equal(modified) || mustRead(t, filepath.Join(dir, path)) != want.body {
					t.Errorf("%s is %v of %v", path, info.Mode(), info.ModTime())
				}
			}
			if info, _ := os.Stat(dir + "/sealed"); info.Mode().Perm() != 0o555 || !info.ModTime().Equal(modified) {
				t.Errorf("folder is %v of %v", info.Mode(), info.ModTime())
			}
			if info, _ := os.Stat(dir); info.Mode().Perm() != 0o755 {
				t.Errorf("the folder itself is %v", info.Mode())
			}
			one, _ := os.Stat(dir + "/index.js")
			two, _ := os.Stat(dir + "/hard")
			if !os.SameFile(one, two) {
				t.Error("the hard link is a copy")
			}
		})
	}
}

// outside is what hostile archives must not change: files around the folder
// that is unpacked to.
type outside struct {
	base, folder string
	before       string
}

func newOutside(t testing.TB, base string) *outside {
	o := &outside{base: base, folder: filepath.Join(base, "folder")}
	mustWrite(t, base+"/secret", "secret", 0o600)
	mustWrite(t, base+"/dir/file", "file", 0o640)
	mustWrite(t, o.folder+"/there/file", "there", 0o644)
	os.Symlink("../secret", o.folder+"/to-secret")
	os.Symlink("../dir", o.folder+"/to-dir")
	os.Symlink(base+"/dir", o.folder+"/to-dir-absolute")
	os.Symlink("there", o.folder+"/to-there")
	os.Symlink(".", o.folder+"/there/up")
	os.Symlink("../..", o.folder+"/there/out")
	os.Link(base+"/dir/file", o.folder+"/same-as-outside")
	o.before = o.picture(t)
	return o
}

// picture is everything outside of the folder that must not change.
func (o *outside) picture(t testing.TB) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(o.base, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if path == o.folder {
			return fs.SkipDir
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		fmt.Fprintf(&b, "%s %v %d", path, info.Mode(), st.Ino)
		if path != o.base { // holds the folder, which changes
			fmt.Fprintf(&b, " %v", info.ModTime())
		}
		if info.Mode().IsRegular() {
			fmt.Fprintf(&b, " %q", mustRead(t, path))
		}
		b.WriteByte('\n')
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func (o *outside) check(t testing.TB) {
	t.Helper()
	if now := o.picture(t); now != o.before {
		t.Errorf("something outside has changed.\nbefore:\n%snow:\n%s", o.before, now)
	}
}

var hostile = []struct {
	name       string
	entries    []entry
	code, hint string
}{
	{"dots", []entry{{name: "../secret", body: "x"}}, guest.CodeUnsafeArchive, "leads out"},
	{"dots within", []entry{{name: "a/../b", body: "x"}}, guest.CodeUnsafeArchive, "leads out"},
	{"dots at the end", []entry{{name: "a/..", kind: tar.TypeDir}}, guest.CodeUnsafeArchive, "leads out"},
	{"absolute", []entry{{name: "/tmp/x", body: "x"}}, guest.CodeUnsafeArchive, "absolute"},
	{"symlink up", []entry{{name: "l", kind: tar.TypeSymlink, link: "../secret"}}, guest.CodeUnsafeArchive, "leads out"},
	{"symlink up from below", []entry{{name: "a/l", kind: tar.TypeSymlink, link: "../../secret"}}, guest.CodeUnsafeArchive, "leads out"},
	{"symlink absolute", []entry{{name: "l", kind: tar.TypeSymlink, link: "/etc/passwd"}}, guest.CodeUnsafeArchive, "leads out"},
	{"symlink down and up", []entry{{name: "l", kind: tar.TypeSymlink, link: "there/up/../../x"}}, guest.CodeUnsafeArchive, "leads out"},
	{"symlink from a folder that is less deep than its name", []entry{
		{name: "there/deep", kind: tar.TypeSymlink, link: ".."},
		{name: "there/deep/l", kind: tar.TypeSymlink, link: "../secret"},
	}, guest.CodeUnsafeArchive, "leads out"},
	{"empty symlink", []entry{{name: "l", kind: tar.TypeSymlink, link: ""}}, guest.CodeUnsafeArchive, "leads out"},
	{"through a link that is there", []entry{{name: "to-dir/file", body: "x"}}, guest.CodeUnsafeArchive, "leads out"},
	{"through an absolute link that is there", []entry{{name: "to-dir-absolute/new", body: "x"}}, guest.CodeUnsafeArchive, "leads out"},
	{"folder through a link", []entry{{name: "to-dir/new/", kind: tar.TypeDir}}, guest.CodeUnsafeArchive, "leads out"},
	{"folder in place of a link", []entry{{name: "to-dir/", kind: tar.TypeDir, mode: 0o777}}, guest.CodeUnsafeArchive, "leads out"},
	{"far through links", []entry{{name: "there/up/up/out/dir/file", body: "x"}}, guest.CodeUnsafeArchive, "leads out"},
	{"hard link up", []entry{{name: "h", kind: tar.TypeLink, link: "../secret"}}, guest.CodeUnsafeArchive, "leads out"},
	{"hard link absolute", []entry{{name: "h", kind: tar.TypeLink, link: "/etc/passwd"}}, guest.CodeUnsafeArchive, "absolute"},
	{"hard link through a link", []entry{{name: "h", kind: tar.TypeLink, link: "to-dir/file"}}, guest.CodeUnsafeArchive, "leads out"},
	{"hard link to a link", []entry{{name: "h", kind: tar.TypeLink, link: "to-secret"}}, guest.CodeInvalid, "no regular file"},
	{"hard link to nothing", []entry{{name: "h", kind: tar.TypeLink, link: "none"}}, guest.CodeNotFound, ""},
	{"device", []entry{{name: "d", kind: tar.TypeChar}}, guest.CodeInvalid, "device"},
	{"block device", []entry{{name: "d", kind: tar.TypeBlock}}, guest.CodeInvalid, "device"},
	{"pipe", []entry{{name: "p", kind: tar.TypeFifo}}, guest.CodeInvalid, "pipe"},
	{"file in place of a folder", []entry{{name: "there", body: "x"}}, guest.CodeIsDirectory, ""},
	{"link in place of a folder", []entry{{name: "there", kind: tar.TypeSymlink, link: "x"}}, guest.CodeIsDirectory, ""},
	{"folder in place of a file", []entry{{name: "there/file", kind: tar.TypeDir}}, guest.CodeNotDirectory, ""},
	{"file below a file", []entry{{name: "there/file/x", body: "x"}}, guest.CodeNotDirectory, ""},
	{"long name", []entry{{name: strings.Repeat("x/", 3000), kind: tar.TypeDir}}, guest.CodeInvalid, "4096"},
	// What is allowed, and still must not reach out.
	{"file in place of a link out", []entry{{name: "to-secret", body: "mine", mode: 0o777}}, "", ""},
	{"file in place of a hard link", []entry{{name: "same-as-outside", body: "mine", mode: 0o777}}, "", ""},
	{"link in place of a link", []entry{{name: "to-secret", kind: tar.TypeSymlink, link: "there/file"}}, "", ""},
	{"through a link within", []entry{{name: "to-there/new", body: "x"}, {name: "to-there/", kind: tar.TypeDir}}, "", ""},
	{"hard link to itself", []entry{{name: "there/file", kind: tar.TypeLink, link: "there/file"}}, "", ""},
	{"git's comment", []entry{{name: "pax_global_header", kind: tar.TypeXGlobalHeader, pax: map[string]string{"comment": "1"}}, {name: "x", body: "x"}}, "", ""},
}

func TestHostileArchives(t *testing.T) {
	for _, tt := range hostile {
		t.Run(tt.name, func(t *testing.T) {
			o := newOutside(t, t.TempDir())
			c := start(t, nil)
			var buf bytes.Buffer
			for _, e := range tt.entries {
				if e.kind == tar.TypeXGlobalHeader {
					e.name = ""
				}
				buf.Write(bytes.TrimSuffix(makeTarLoose(t, e), make([]byte, 1024)))
			}
			buf.Write(make([]byte, 1024))
			_, err := c.PutArchive(t.Context(), o.folder, &buf)
			if tt.code == "" && err != nil {
				t.Errorf("refused: %v", err)
			}
			if tt.code != "" {
				wantCode(t, err, tt.code, tt.hint)
			}
			o.check(t)
		})
	}
}

func makeTarLoose(t testing.TB, e entry) []byte {
	if e.kind == tar.TypeXGlobalHeader {
		var buf bytes.Buffer
		w := tar.NewWriter(&buf)
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: e.pax}); err != nil {
			t.Fatal(err)
		}
		w.Close()
		return buf.Bytes()
	}
	return makeTar(t, e)
}

func TestArchiveIntoDozeIsRefused(t *testing.T) {
	root := t.TempDir()
	mustWrite(t, root+"/.doze/run/x", "x", 0o644)
	os.Symlink(".doze", root+"/sneaky")
	c := start(t, func(cfg *server.Config) { cfg.Root = root })
	for _, tt := range []struct{ folder, name string }{
		{"/", ".doze/run/y"}, {"/", "sneaky/run/y"}, {"/.doze", "y"}, {"/sneaky/run", "y"},
	} {
		_, err := c.PutArchive(t.Context(), tt.folder, bytes.NewReader(makeTar(t, entry{name: tt.name, body: "y"})))
		wantCode(t, err, guest.CodeNotPermitted, "doze")
	}
	onlyEntries(t, root+"/.doze/run", "x")
}

func TestBrokenArchives(t *testing.T) {
	whole := project(t)
	packed := gzipped(t, whole)
	for _, tt := range []struct {
		name string
		body io.Reader
		hint string
	}{
		{"text", strings.NewReader(strings.Repeat("this is no archive. ", 100)), "tar"},
		{"cut in a header", bytes.NewReader(whole[:700]), "early"},
		{"cut in a file", bytes.NewReader(whole[:1026]), "early"},
		{"cut gzip", bytes.NewReader(packed[:len(packed)/2]), "early"},
		{"gzip without its checksum", bytes.NewReader(packed[:len(packed)-4]), "early"},
		{"gzip with a wrong checksum", bytes.NewReader(append(bytes.Clone(packed[:len(packed)-8]), 1, 2, 3, 4, 5, 6, 7, 8)), "tar"},
		{"megabytes after the end", io.MultiReader(bytes.NewReader(whole), io.LimitReader(zeroes{}, 3<<20)), "follows"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := start(t, nil)
			dir := t.TempDir()
			_, err := c.PutArchive(t.Context(), dir, tt.body)
			os.Chmod(dir+"/sealed", 0o755)
			wantCode(t, err, guest.CodeInvalid, tt.hint)
		})
	}
	t.Run("upload fails", func(t *testing.T) {
		c := start(t, nil)
		dir := t.TempDir()
		body := io.MultiReader(bytes.NewReader(makeTar(t, entry{name: "big", body: strings.Repeat("x", 100_000)})[:50_000]), iotest.ErrReader(errors.New("gone")))
		if _, err := c.PutArchive(t.Context(), dir, body); err == nil {
			t.Error("no error")
		}
		testkit.Eventually(t, "the half file is gone", func() bool { e, _ := os.ReadDir(dir); return len(e) == 0 })
	})
}

func TestRefusalReachesClientThatIsStillSending(t *testing.T) {
	c := start(t, nil)
	bad := makeTar(t, entry{name: "../x", body: "x"})
	for range 10 {
		_, err := c.PutArchive(t.Context(), t.TempDir(), io.MultiReader(bytes.NewReader(bad), io.LimitReader(zeroes{}, 64<<20)))
		wantCode(t, err, guest.CodeUnsafeArchive, "")
	}
}

func TestArchiveRoundTrip(t *testing.T) {
	c := start(t, nil)
	from, to := t.TempDir(), t.TempDir()
	if _, err := c.PutArchive(t.Context(), from, bytes.NewReader(project(t))); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(from+"/fifo", 0o644); err != nil { // left out
		t.Fatal(err)
	}
	body, err := c.GetArchive(t.Context(), from)
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	res, err := c.PutArchive(t.Context(), to, body)
	if err != nil {
		t.Fatal(err)
	}
	os.Chmod(from+"/sealed", 0o755)
	os.Chmod(to+"/sealed", 0o755)
	if res.Bytes != 5+10+1+1+4 {
		t.Errorf("result %+v", res)
	}
	onlyEntries(t, to, "bin", "current", "dangling", "hard", "index.js", "long", "node_modules", "sealed")
	one, _ := os.Stat(to + "/index.js")
	two, _ := os.Stat(to + "/hard")
	if !os.SameFile(one, two) || !one.ModTime().Equal(modified) {
		t.Error("a hard link or a time was lost")
	}
	file, err := c.GetArchive(t.Context(), from+"/index.js")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	r := tar.NewReader(file)
	if h, err := r.Next(); err != nil || h.Name != "index.js" || h.Size != 5 {
		t.Errorf("a single file is packed as %+v, %v", h, err)
	}
	_, err = c.GetArchive(t.Context(), from+"/none")
	wantCode(t, err, guest.CodeNotFound, "")
}

func TestArchiveOfAFileThatShrinksIsBroken(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	mustWrite(t, dir+"/file", strings.Repeat("x", 8<<20), 0o644)
	body, err := c.GetArchive(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	if err := os.Truncate(dir+"/file", 10); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, body); !errors.Is(err, guest.ErrLost) {
		t.Errorf("the archive ended with %v", err)
	}
}

func TestArchivesUnpackedAtOnceDoNotMixTheirFiles(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	mustWrite(t, dir+"/a", "old", 0o644)
	mustWrite(t, dir+"/b", "old", 0o644)
	long := strings.Repeat("a", 1<<20)
	first := makeTar(t, entry{name: "a", body: long})
	half, more := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		_, err := c.PutArchive(t.Context(), dir, half)
		ended <- err
	}()
	if _, err := more.Write(first[:1<<19]); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the first is in the middle of its file", func() bool { e, _ := os.ReadDir(dir); return len(e) == 3 })
	if _, err := c.PutArchive(t.Context(), dir, bytes.NewReader(makeTar(t, entry{name: "b", body: "b"}))); err != nil {
		t.Error(err)
	}
	if _, err := more.Write(first[1<<19:]); err != nil {
		t.Fatal(err)
	}
	more.Close()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	onlyEntries(t, dir, "a", "b")
	if mustRead(t, dir+"/a") != long || mustRead(t, dir+"/b") != "b" {
		t.Error("a file has another's content")
	}
}

func TestTenThousandFiles(t *testing.T) {
	entries := make([]entry, 10_000)
	for i := range entries {
		entries[i] = entry{name: fmt.Sprintf("node_modules/p%d/lib/f%d.js", i/20, i), body: "module.exports = 1\n"}
	}
	c := start(t, nil)
	dir := t.TempDir()
	res, err := c.PutArchive(t.Context(), dir, bytes.NewReader(makeTar(t, entries...)))
	if err != nil || res.Files != len(entries) {
		t.Fatalf("%+v, %v", res, err)
	}
	listed, truncated, err := c.List(t.Context(), dir, guest.ListOptions{Recursive: true})
	if err != nil || truncated || len(listed) != 10_000+1+2*500 {
		t.Errorf("%d entries listed, %v", len(listed), err)
	}
	body, err := c.GetArchive(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	n := 0
	for r := tar.NewReader(body); ; n++ {
		if _, err := r.Next(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if n != len(listed) {
		t.Errorf("%d entries packed, %d listed", n, len(listed))
	}
}

func TestSparseArchiveIsRefused(t *testing.T) {
	header := makeTar(t, entry{name: "sparse", body: ""})
	header[156] = tar.TypeGNUSparse
	copy(header[257:], "ustar  \x00")
	copy(header[386:], "00000000000\x0000000000000\x00") // one empty piece
	copy(header[483:], "77777777777\x00")
	sum := 0
	copy(header[148:], "        ")
	for _, b := range header[:512] {
		sum += int(b)
	}
	copy(header[148:], fmt.Sprintf("%06o\x00 ", sum))
	c := start(t, nil)
	_, err := c.PutArchive(t.Context(), t.TempDir(), bytes.NewReader(header))
	wantCode(t, err, guest.CodeInvalid, "")
}

func FuzzUnpack(f *testing.F) {
	for _, tt := range hostile {
		for _, e := range tt.entries {
			if e.kind != tar.TypeXGlobalHeader {
				f.Add(makeTar(f, e))
			}
		}
	}
	f.Add(project(f))
	f.Add(gzipped(f, project(f)))
	base := f.TempDir()
	f.Fuzz(func(t *testing.T, archive []byte) {
		dir, err := os.MkdirTemp(base, "")
		if err != nil {
			t.Fatal(err)
		}
		defer removeAll(dir)
		o := newOutside(t, dir)
		server.Unpack(t.Context(), o.folder, bytes.NewReader(archive))
		o.check(t)
	})
}

// removeAll removes a folder whatever modes an archive gave to those in it.
func removeAll(dir string) {
	filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			os.Chmod(path, 0o755)
		}
		return nil
	})
	os.RemoveAll(dir)
}
