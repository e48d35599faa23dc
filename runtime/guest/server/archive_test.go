package server_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"

	"github.com/doze-run/doze/archive/archivetest"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/server"
	"github.com/doze-run/doze/testkit"
)

func TestPutArchive(t *testing.T) {
	c := start(t, nil)
	for name, b := range map[string][]byte{"tar": archivetest.Project(t), "tar.gz": archivetest.Gzip(t, archivetest.Project(t))} {
		dir := filepath.Join(t.TempDir(), "new", "folder")
		res, err := c.PutArchive(t.Context(), dir, bytes.NewReader(b))
		t.Cleanup(func() { os.Chmod(dir+"/sealed", 0o755) })
		if want := (guest.ArchiveResult{Files: archivetest.ProjectFiles, Bytes: archivetest.ProjectBytes}); err != nil || res != want {
			t.Errorf("%s: %+v, %v", name, res, err)
		}
		onlyEntries(t, dir, "bin", "current", "dangling", "hard", "index.js", "long", "node_modules", "sealed")
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o755 {
			t.Errorf("%s: the folder itself is %v, %v", name, info, err)
		}
	}
}

// Package archive tests what is refused.
func TestArchiveRefusals(t *testing.T) {
	dir := t.TempDir()
	mustWrite(t, dir+"/folder/file", "there", 0o644)
	os.Symlink("/etc", dir+"/out")
	c := start(t, nil)
	for _, tt := range []struct {
		name       string
		entry      archivetest.Entry
		code, hint string
	}{
		{"dots", archivetest.Entry{Name: "../x", Body: "x"}, guest.CodeUnsafeArchive, "leads out"},
		{"link up", archivetest.Entry{Name: "l", Kind: tar.TypeSymlink, Link: "../x"}, guest.CodeUnsafeArchive, "leads out"},
		{"through a link", archivetest.Entry{Name: "out/x", Body: "x"}, guest.CodeUnsafeArchive, "leads out"},
		{"device", archivetest.Entry{Name: "d", Kind: tar.TypeChar}, guest.CodeInvalid, "device"},
		{"file in place of a folder", archivetest.Entry{Name: "folder", Body: "x"}, guest.CodeIsDirectory, ""},
		{"file below a file", archivetest.Entry{Name: "folder/file/x", Body: "x"}, guest.CodeNotDirectory, ""},
		{"hard link to nothing", archivetest.Entry{Name: "h", Kind: tar.TypeLink, Link: "none"}, guest.CodeNotFound, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := c.PutArchive(t.Context(), dir, bytes.NewReader(archivetest.Tar(t, tt.entry)))
			wantCode(t, err, tt.code, tt.hint)
		})
	}
	for hint, b := range map[string][]byte{"early": archivetest.Project(t)[:700], "sparse": archivetest.Sparse(t), "tar": bytes.Repeat([]byte("text "), 200)} {
		_, err := c.PutArchive(t.Context(), t.TempDir(), bytes.NewReader(b))
		wantCode(t, err, guest.CodeInvalid, hint)
	}
}

func TestArchiveIntoDozeIsRefused(t *testing.T) {
	root := t.TempDir()
	mustWrite(t, root+"/.doze/run/x", "x", 0o644)
	os.Symlink(".doze", root+"/sneaky")
	c := start(t, func(cfg *server.Config) { cfg.Root = root })
	for _, tt := range []struct{ folder, name string }{
		{"/", ".doze/run/y"}, {"/", "sneaky/run/y"}, {"/.doze", "y"}, {"/sneaky/run", "y"},
	} {
		_, err := c.PutArchive(t.Context(), tt.folder, bytes.NewReader(archivetest.Tar(t, archivetest.Entry{Name: tt.name, Body: "y"})))
		wantCode(t, err, guest.CodeNotPermitted, "doze")
	}
	onlyEntries(t, root+"/.doze/run", "x")
}

func TestFailedArchiveUploadLeavesNoFile(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	body := io.MultiReader(bytes.NewReader(archivetest.Tar(t, archivetest.Entry{Name: "big", Body: strings.Repeat("x", 100_000)})[:50_000]), iotest.ErrReader(errors.New("gone")))
	if _, err := c.PutArchive(t.Context(), dir, body); err == nil {
		t.Error("no error")
	}
	testkit.Eventually(t, "the partial file is removed", func() bool { e, _ := os.ReadDir(dir); return len(e) == 0 })
}

func TestRefusalReachesClientThatIsStillSending(t *testing.T) {
	c := start(t, nil)
	bad := archivetest.Tar(t, archivetest.Entry{Name: "../x", Body: "x"})
	for range 10 {
		_, err := c.PutArchive(t.Context(), t.TempDir(), io.MultiReader(bytes.NewReader(bad), io.LimitReader(zeroes{}, 64<<20)))
		wantCode(t, err, guest.CodeUnsafeArchive, "")
	}
}

func TestArchiveRoundTrip(t *testing.T) {
	c := start(t, nil)
	from, to := t.TempDir(), t.TempDir()
	if _, err := c.PutArchive(t.Context(), from, bytes.NewReader(archivetest.Project(t))); err != nil {
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
	if res.Bytes != archivetest.ProjectBytes {
		t.Errorf("result %+v", res)
	}
	onlyEntries(t, to, "bin", "current", "dangling", "hard", "index.js", "long", "node_modules", "sealed")
	one, _ := os.Stat(to + "/index.js")
	two, _ := os.Stat(to + "/hard")
	if !os.SameFile(one, two) || !one.ModTime().Equal(archivetest.Modified) {
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

func TestConcurrentArchivesDoNotMixTheirFiles(t *testing.T) {
	c := start(t, nil)
	dir := t.TempDir()
	mustWrite(t, dir+"/a", "old", 0o644)
	mustWrite(t, dir+"/b", "old", 0o644)
	long := strings.Repeat("a", 1<<20)
	first := archivetest.Tar(t, archivetest.Entry{Name: "a", Body: long})
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
	if _, err := c.PutArchive(t.Context(), dir, bytes.NewReader(archivetest.Tar(t, archivetest.Entry{Name: "b", Body: "b"}))); err != nil {
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
	entries := make([]archivetest.Entry, 10_000)
	for i := range entries {
		entries[i] = archivetest.Entry{Name: fmt.Sprintf("node_modules/p%d/lib/f%d.js", i/20, i), Body: "module.exports = 1\n"}
	}
	c := start(t, nil)
	dir := t.TempDir()
	res, err := c.PutArchive(t.Context(), dir, bytes.NewReader(archivetest.Tar(t, entries...)))
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
