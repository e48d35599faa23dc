//go:build unix

package archive_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/doze-run/doze/archive"
	"github.com/doze-run/doze/archive/archivetest"
)

// side is one of those who unpack. Archives are hostile to both.
type side struct {
	name    string
	skips   bool
	options archive.UnpackOptions
}

var (
	guest  = side{name: "guest", options: archive.UnpackOptions{Gzip: true}}
	client = side{name: "client", skips: true, options: archive.UnpackOptions{FolderMode: 0o700}}
	sides  = []side{guest, client}
)

// unpack unpacks an archive into a folder and returns the names that were skipped.
func (s side) unpack(t testing.TB, folder string, r io.Reader) (res archive.Result, skipped []string, err error) {
	t.Helper()
	root, err := os.OpenRoot(folder)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	o := s.options
	if s.skips {
		o.Skip = func(name, _ string) { skipped = append(skipped, name) }
	}
	res, err = archive.Unpack(t.Context(), root, r, o)
	return res, skipped, err
}

func write(t testing.TB, path, content string, mode fs.FileMode) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), mode), os.Chmod(path, mode)); err != nil {
		t.Fatal(err)
	}
}

func read(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// removeAll removes a folder, whatever modes an archive gave to those in it.
func removeAll(dir string) {
	filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			os.Chmod(path, 0o755)
		}
		return nil
	})
	os.RemoveAll(dir)
}

func TestUnpack(t *testing.T) {
	for _, tt := range []struct {
		name    string
		side    side
		archive func(testing.TB) []byte
		sealed  fs.FileMode
	}{
		{"tar by a guest", guest, archivetest.Project, 0o555},
		{"tar.gz by a guest", guest, func(t testing.TB) []byte { return archivetest.Gzip(t, archivetest.Project(t)) }, 0o555},
		{"tar by a client", client, archivetest.Project, 0o755},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			for range 2 { // the second time over the first
				res, skipped, err := tt.side.unpack(t, dir, bytes.NewReader(tt.archive(t)))
				if err != nil || skipped != nil {
					t.Fatalf("skipped %q, %v", skipped, err)
				}
				if res.Files != archivetest.ProjectFiles || res.Bytes != archivetest.ProjectBytes {
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
				if info.Mode() != want.mode || !info.ModTime().Equal(archivetest.Modified) || read(t, filepath.Join(dir, path)) != want.body {
					t.Errorf("%s is %v of %v", path, info.Mode(), info.ModTime())
				}
			}
			if info, _ := os.Stat(dir + "/sealed"); info.Mode().Perm() != tt.sealed || !info.ModTime().Equal(archivetest.Modified) {
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

// surroundings is what hostile archives must not change: files around the folder
// that is unpacked to.
type surroundings struct {
	base, folder string
	before       string
}

func newSurroundings(t testing.TB, base string) *surroundings {
	o := &surroundings{base: base, folder: filepath.Join(base, "folder")}
	write(t, base+"/secret", "secret", 0o600)
	write(t, base+"/dir/file", "file", 0o640)
	write(t, o.folder+"/there/file", "there", 0o644)
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
func (o *surroundings) picture(t testing.TB) string {
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
			fmt.Fprintf(&b, " %q", read(t, path))
		}
		b.WriteByte('\n')
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func (o *surroundings) check(t testing.TB) {
	t.Helper()
	if now := o.picture(t); now != o.before {
		t.Errorf("something outside has changed.\nbefore:\n%snow:\n%s", o.before, now)
	}
}

var hostile = []struct {
	name    string
	entries []archivetest.Entry
	err     error  // of a guest
	hint    string // in its message
	skips   bool   // a client leaves out the unsafe entry
}{
	{"dots", []archivetest.Entry{{Name: "../secret", Body: "x"}}, archive.ErrUnsafe, "leads out", false},
	{"dots within", []archivetest.Entry{{Name: "a/../b", Body: "x"}}, archive.ErrUnsafe, "leads out", false},
	{"dots at the end", []archivetest.Entry{{Name: "a/..", Kind: tar.TypeDir}}, archive.ErrUnsafe, "leads out", false},
	{"absolute", []archivetest.Entry{{Name: "/tmp/x", Body: "x"}}, archive.ErrUnsafe, "absolute", false},
	{"symlink up", []archivetest.Entry{{Name: "l", Kind: tar.TypeSymlink, Link: "../secret"}}, archive.ErrUnsafe, "leads out", true},
	{"symlink up from below", []archivetest.Entry{{Name: "a/l", Kind: tar.TypeSymlink, Link: "../../secret"}}, archive.ErrUnsafe, "leads out", true},
	{"symlink absolute", []archivetest.Entry{{Name: "l", Kind: tar.TypeSymlink, Link: "/etc/passwd"}}, archive.ErrUnsafe, "leads out", true},
	{"symlink down and up", []archivetest.Entry{{Name: "l", Kind: tar.TypeSymlink, Link: "there/up/../../x"}}, archive.ErrUnsafe, "leads out", true},
	{"symlink from a folder that is less deep than its name", []archivetest.Entry{
		{Name: "there/deep", Kind: tar.TypeSymlink, Link: ".."},
		{Name: "there/deep/l", Kind: tar.TypeSymlink, Link: "../secret"},
	}, archive.ErrUnsafe, "leads out", true},
	{"empty symlink", []archivetest.Entry{{Name: "l", Kind: tar.TypeSymlink, Link: ""}}, archive.ErrUnsafe, "leads out", true},
	{"through an existing link", []archivetest.Entry{{Name: "to-dir/file", Body: "x"}}, archive.ErrUnsafe, "leads out", false},
	{"through an existing absolute link", []archivetest.Entry{{Name: "to-dir-absolute/new", Body: "x"}}, archive.ErrUnsafe, "leads out", false},
	{"folder through a link", []archivetest.Entry{{Name: "to-dir/new/", Kind: tar.TypeDir}}, archive.ErrUnsafe, "leads out", false},
	{"folder in place of a link", []archivetest.Entry{{Name: "to-dir/", Kind: tar.TypeDir, Mode: 0o777}}, archive.ErrUnsafe, "leads out", false},
	{"far through links", []archivetest.Entry{{Name: "there/up/up/out/dir/file", Body: "x"}}, archive.ErrUnsafe, "leads out", false},
	{"hard link up", []archivetest.Entry{{Name: "h", Kind: tar.TypeLink, Link: "../secret"}}, archive.ErrUnsafe, "leads out", false},
	{"hard link absolute", []archivetest.Entry{{Name: "h", Kind: tar.TypeLink, Link: "/etc/passwd"}}, archive.ErrUnsafe, "absolute", false},
	{"hard link through a link", []archivetest.Entry{{Name: "h", Kind: tar.TypeLink, Link: "to-dir/file"}}, archive.ErrUnsafe, "leads out", false},
	{"hard link to a link", []archivetest.Entry{{Name: "h", Kind: tar.TypeLink, Link: "to-secret"}}, archive.ErrInvalid, "not a regular file", false},
	{"hard link to nothing", []archivetest.Entry{{Name: "h", Kind: tar.TypeLink, Link: "none"}}, fs.ErrNotExist, "", false},
	{"device", []archivetest.Entry{{Name: "d", Kind: tar.TypeChar}}, archive.ErrInvalid, "device", true},
	{"block device", []archivetest.Entry{{Name: "d", Kind: tar.TypeBlock}}, archive.ErrInvalid, "device", true},
	{"pipe", []archivetest.Entry{{Name: "p", Kind: tar.TypeFifo}}, archive.ErrInvalid, "pipe", true},
	{"file in place of a folder", []archivetest.Entry{{Name: "there", Body: "x"}}, syscall.EISDIR, "", false},
	{"link in place of a folder", []archivetest.Entry{{Name: "there", Kind: tar.TypeSymlink, Link: "x"}}, syscall.EISDIR, "", false},
	{"folder in place of a file", []archivetest.Entry{{Name: "there/file", Kind: tar.TypeDir}}, syscall.ENOTDIR, "", false},
	{"file below a file", []archivetest.Entry{{Name: "there/file/x", Body: "x"}}, syscall.ENOTDIR, "", false},
	{"long name", []archivetest.Entry{{Name: strings.Repeat("x/", 3000), Kind: tar.TypeDir}}, archive.ErrInvalid, "4096", false},
	{"dots behind a link that is replaced", []archivetest.Entry{
		{Name: "d", Kind: tar.TypeDir, Mode: 0o755}, {Name: "d/l", Kind: tar.TypeSymlink, Link: "../x"},
		{Name: "x", Kind: tar.TypeSymlink, Link: "d"}, {Name: "d/l/../../../evil", Body: "x"},
	}, archive.ErrUnsafe, "leads out", false},
	{"file through a link of the archive", []archivetest.Entry{
		{Name: "l", Kind: tar.TypeSymlink, Link: "../"}, {Name: "l/evil", Body: "x"},
	}, archive.ErrUnsafe, "leads out", true},
	// Allowed, but must not reach out.
	{"file in place of a link out", []archivetest.Entry{{Name: "to-secret", Body: "mine", Mode: 0o777}}, nil, "", false},
	{"file in place of a hard link", []archivetest.Entry{{Name: "same-as-outside", Body: "mine", Mode: 0o777}}, nil, "", false},
	{"link in place of a link", []archivetest.Entry{{Name: "to-secret", Kind: tar.TypeSymlink, Link: "there/file"}}, nil, "", false},
	{"through a link within", []archivetest.Entry{{Name: "to-there/new", Body: "x"}, {Name: "to-there/", Kind: tar.TypeDir}}, nil, "", false},
	{"hard link to itself", []archivetest.Entry{{Name: "there/file", Kind: tar.TypeLink, Link: "there/file"}}, nil, "", false},
	{"comment of git", []archivetest.Entry{{Name: "pax_global_header", Kind: tar.TypeXGlobalHeader, PAX: map[string]string{"comment": "1"}}, {Name: "x", Body: "x"}}, nil, "", false},
}

func TestHostileArchives(t *testing.T) {
	for _, side := range sides {
		for _, tt := range hostile {
			t.Run(side.name+"/"+tt.name, func(t *testing.T) {
				o := newSurroundings(t, t.TempDir())
				_, skipped, err := side.unpack(t, o.folder, bytes.NewReader(archivetest.Tar(t, tt.entries...)))
				o.check(t)
				want, skips := tt.err, 0
				if side.skips && tt.skips {
					want, skips = nil, 1
				}
				if len(skipped) != skips {
					t.Errorf("skipped %q, want %d", skipped, skips)
				}
				if !errors.Is(err, want) || want != nil && !strings.Contains(err.Error(), tt.hint) {
					t.Errorf("got %v, want %v with %q", err, want, tt.hint)
				}
			})
		}
	}
}

func TestClientGoesOnAfterAnUnsafeEntry(t *testing.T) {
	for _, e := range []archivetest.Entry{
		{Name: "up", Kind: tar.TypeSymlink, Link: "../secret"},
		{Name: "absolute", Kind: tar.TypeSymlink, Link: "/etc/passwd"},
		{Name: "device", Kind: tar.TypeChar},
		{Name: "block-device", Kind: tar.TypeBlock},
		{Name: "pipe", Kind: tar.TypeFifo},
	} {
		b := archivetest.Tar(t, archivetest.Entry{Name: "before", Body: "x"}, e, archivetest.Entry{Name: "zz-after", Body: "x"})
		o := newSurroundings(t, t.TempDir())
		res, skipped, err := client.unpack(t, o.folder, bytes.NewReader(b))
		if err != nil || res.Files != 2 || len(skipped) != 1 || skipped[0] != e.Name {
			t.Errorf("%s: %+v, skipped %q, %v", e.Name, res, skipped, err)
		}
		if _, err := os.Lstat(filepath.Join(o.folder, e.Name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s was made: %v", e.Name, err)
		}
		read(t, o.folder+"/zz-after")
		o.check(t)
		if _, _, err := guest.unpack(t, t.TempDir(), bytes.NewReader(b)); !errors.Is(err, archive.ErrUnsafe) && !errors.Is(err, archive.ErrInvalid) {
			t.Errorf("a guest took %s: %v", e.Name, err)
		}
	}
}

func TestOnlyATrustedArchiveHasSpecialModesAndLinksOut(t *testing.T) {
	b := archivetest.Tar(t,
		archivetest.Entry{Name: "f", Body: "x", Mode: 0o6755},
		archivetest.Entry{Name: "d", Kind: tar.TypeDir, Mode: 0o1777},
	)
	trusted := side{name: "trusted", options: archive.UnpackOptions{Trusted: true}}
	for _, s := range append([]side{trusted}, sides...) {
		dir := t.TempDir()
		if os.Geteuid() != 0 && s.options.Trusted {
			continue // an owner other than the user's
		}
		if _, _, err := s.unpack(t, dir, bytes.NewReader(b)); err != nil {
			t.Fatal(err)
		}
		const special = fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky
		file, _ := os.Stat(dir + "/f")
		folder, _ := os.Stat(dir + "/d")
		if got := (file.Mode() | folder.Mode()) & special; (got == special) != s.options.Trusted || got != 0 && !s.options.Trusted {
			t.Errorf("%s: modes %v, %v", s.name, file.Mode(), folder.Mode())
		}
	}
	b = archivetest.Tar(t, archivetest.Entry{Name: "l", Kind: tar.TypeSymlink, Link: "../secret"})
	dir := t.TempDir()
	if _, _, err := trusted.unpack(t, dir, bytes.NewReader(b)); err != nil && os.Geteuid() == 0 {
		t.Errorf("a trusted link: %v", err)
	}
}

func TestReservedFolderIsNotWrittenTo(t *testing.T) {
	for _, side := range sides {
		root := t.TempDir()
		write(t, root+"/.doze/run/x", "x", 0o644)
		os.Symlink(".doze", root+"/sneaky")
		side.options.Reserved = root + "/.doze"
		for _, tt := range []struct {
			folder string
			entry  archivetest.Entry
		}{
			{"", archivetest.Entry{Name: ".doze", Body: "y"}},
			{"", archivetest.Entry{Name: ".doze/", Kind: tar.TypeDir}},
			{"", archivetest.Entry{Name: ".doze/run/y", Body: "y"}},
			{"", archivetest.Entry{Name: "sneaky/run/y", Body: "y"}},
			{"", archivetest.Entry{Name: ".doze/y", Kind: tar.TypeSymlink, Link: "run"}},
			{"", archivetest.Entry{Name: "sneaky/y", Kind: tar.TypeLink, Link: ".doze/run/x"}},
			{"/.doze", archivetest.Entry{Name: "y", Body: "y"}},
			{"/sneaky/run", archivetest.Entry{Name: "y", Body: "y"}},
		} {
			_, _, err := side.unpack(t, root+tt.folder, bytes.NewReader(archivetest.Tar(t, tt.entry)))
			if !errors.Is(err, archive.ErrReserved) {
				t.Errorf("%s, %s in %s: %v", side.name, tt.entry.Name, tt.folder, err)
			}
		}
		for dir, want := range map[string]string{"/.doze": "run", "/.doze/run": "x"} {
			if entries, err := os.ReadDir(root + dir); err != nil || len(entries) != 1 || entries[0].Name() != want {
				t.Errorf("%s has %v, %v", dir, entries, err)
			}
		}
	}
}

func TestBrokenArchives(t *testing.T) {
	whole := archivetest.Project(t)
	packed := archivetest.Gzip(t, whole)
	for _, tt := range []struct {
		name       string
		compressed bool
		body       func() io.Reader
		hint       string
	}{
		{"text", false, func() io.Reader { return strings.NewReader(strings.Repeat("text, not an archive. ", 100)) }, "tar"},
		{"cut in a header", false, func() io.Reader { return bytes.NewReader(whole[:700]) }, "early"},
		{"cut in a file", false, func() io.Reader { return bytes.NewReader(whole[:1026]) }, "early"},
		{"megabytes after the end", false, func() io.Reader { return io.MultiReader(bytes.NewReader(whole), io.LimitReader(zeroes{}, 3<<20)) }, "follow"},
		{"sparse", false, func() io.Reader { return bytes.NewReader(archivetest.Sparse(t)) }, ""},
		{"cut gzip", true, func() io.Reader { return bytes.NewReader(packed[:len(packed)/2]) }, "early"},
		{"gzip without its checksum", true, func() io.Reader { return bytes.NewReader(packed[:len(packed)-4]) }, "early"},
		{"gzip with a wrong checksum", true, func() io.Reader {
			return bytes.NewReader(append(bytes.Clone(packed[:len(packed)-8]), 1, 2, 3, 4, 5, 6, 7, 8))
		}, "tar"},
		{"gzip", true, func() io.Reader { return bytes.NewReader(packed) }, "tar"},
	} {
		for _, side := range sides {
			t.Run(side.name+"/"+tt.name, func(t *testing.T) {
				dir := t.TempDir()
				defer os.Chmod(dir+"/sealed", 0o755)
				hint := tt.hint
				switch {
				case tt.compressed && !side.options.Gzip:
					hint = "" // it is not a tar stream
				case tt.name == "gzip":
					return
				}
				if _, _, err := side.unpack(t, dir, tt.body()); !errors.Is(err, archive.ErrInvalid) || !strings.Contains(err.Error(), hint) {
					t.Errorf("got %v, want a message with %q", err, hint)
				}
				if tt.name == "sparse" || tt.compressed && !side.options.Gzip {
					if entries, _ := os.ReadDir(dir); len(entries) > 0 {
						t.Errorf("made %v", entries)
					}
				}
			})
		}
	}
}

type zeroes struct{}

func (zeroes) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func TestUnpackASingleFile(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/outside", "safe", 0o600)
	write(t, dir+"/in/old", "before", 0o600)
	os.Symlink("../outside", dir+"/in/link")
	root, err := os.OpenRoot(dir + "/in")
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	file := archivetest.Tar(t,
		archivetest.Entry{Name: "folder/", Kind: tar.TypeDir, Mode: 0o755}, archivetest.Entry{Name: "../link", Kind: tar.TypeSymlink, Link: "/etc"},
		archivetest.Entry{Name: "../../any", Body: "content", Mode: 0o4750},
	)
	o := client.options
	for _, name := range []string{"new", "old", "link"} {
		o.File = name
		if _, err := archive.Unpack(t.Context(), root, bytes.NewReader(file), o); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if info, err := os.Lstat(dir + "/in/" + name); err != nil || info.Mode() != 0o750 || read(t, dir+"/in/"+name) != "content" {
			t.Errorf("%s is %v, %v", name, info, err)
		}
	}
	for name, b := range map[string][]byte{
		"cut": archivetest.Tar(t, archivetest.Entry{Name: "f", Body: strings.Repeat("x", 2000)})[:1024], "sparse": archivetest.Sparse(t),
		"empty": archivetest.Tar(t), "no file": archivetest.Tar(t, archivetest.Entry{Name: "d/", Kind: tar.TypeDir}), "text": make([]byte, 0),
	} {
		o.File = "old"
		if _, err := archive.Unpack(t.Context(), root, bytes.NewReader(b), o); !errors.Is(err, archive.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := os.Mkdir(dir+"/in/folder", 0o755); err != nil {
		t.Fatal(err)
	}
	o.File = "folder"
	if _, err := archive.Unpack(t.Context(), root, bytes.NewReader(file), o); !errors.Is(err, syscall.EISDIR) {
		t.Errorf("in place of a folder: %v", err)
	}
	if entries, _ := os.ReadDir(dir + "/in"); len(entries) != 4 || read(t, dir+"/in/old") != "content" || read(t, dir+"/outside") != "safe" {
		t.Errorf("the folder has %v", entries)
	}
}

func TestPackForAClient(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/sub/file", "content", 0o640)
	os.Link(dir+"/sub/file", dir+"/sub/same")
	for name, target := range map[string]string{"within": "sub/file", "sub/up": "../sub", "passwd": "/etc/passwd", "out": "../x", "sub/out": "../../x"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(dir+"/fifo", 0o644); err != nil {
		t.Fatal(err)
	}
	var skipped []string
	var size int64
	o := archive.PackOptions{
		ExactTimes: true,
		Skip:       func(path, _ string) { skipped = append(skipped, strings.TrimPrefix(path, dir+"/")) },
		Content:    func(r io.Reader) io.Reader { return io.TeeReader(r, counter{&size}) },
	}
	var b bytes.Buffer
	if err := archive.Pack(t.Context(), &b, dir, "", o); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(skipped, " "); got != "fifo out passwd sub/out" {
		t.Errorf("skipped %q", got)
	}
	if size != int64(len("content")) {
		t.Errorf("counted %d bytes", size)
	}
	var names []string
	in := tar.NewReader(bytes.NewReader(b.Bytes()))
	for {
		h, err := in.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name+h.Linkname)
		if h.Uid != 0 || h.Gid != 0 || h.Uname != "" || h.Gname != "" {
			t.Errorf("%s has the owner %d %d %q %q", h.Name, h.Uid, h.Gid, h.Uname, h.Gname)
		}
		if info, err := os.Lstat(filepath.Join(dir, h.Name)); err != nil || !info.ModTime().Equal(h.ModTime) {
			t.Errorf("%s is of %v, %v", h.Name, h.ModTime, err)
		}
	}
	if got := strings.Join(names, " "); got != "sub/ sub/file sub/samesub/file sub/up../sub withinsub/file" {
		t.Errorf("packed %q", got)
	}
	for _, side := range sides { // neither refuses nor skips anything of it
		if res, skipped, err := side.unpack(t, t.TempDir(), bytes.NewReader(b.Bytes())); err != nil || skipped != nil || res.Files != 5 {
			t.Errorf("%s: %+v, skipped %q, %v", side.name, res, skipped, err)
		}
	}
	o.Strict = true
	if err := archive.Pack(t.Context(), io.Discard, dir, "", o); !errors.Is(err, archive.ErrSpecial) {
		t.Errorf("strict: %v", err)
	}
}

type counter struct{ n *int64 }

func (c counter) Write(b []byte) (int, error) { *c.n += int64(len(b)); return len(b), nil }

func FuzzUnpack(f *testing.F) {
	for _, tt := range hostile {
		f.Add(archivetest.Tar(f, tt.entries...))
	}
	f.Add(archivetest.Project(f))
	f.Add(archivetest.Gzip(f, archivetest.Project(f)))
	f.Add(archivetest.Sparse(f))
	base := f.TempDir()
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, side := range sides {
			dir, err := os.MkdirTemp(base, "")
			if err != nil {
				t.Fatal(err)
			}
			o := newSurroundings(t, dir)
			side.unpack(t, o.folder, bytes.NewReader(b))
			o.check(t)
			removeAll(dir)
		}
	})
}
