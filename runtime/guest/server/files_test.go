package server_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
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

func mustWrite(t testing.TB, path, content string, mode fs.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

func mustRead(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// onlyEntries fails the test when a folder holds anything else.
func onlyEntries(t testing.TB, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("%s holds %q, want %q", dir, got, want)
	}
}

func TestWriteFile(t *testing.T) {
	for _, tt := range []struct {
		name     string
		setup    func(t *testing.T, dir string)
		path     string
		mode     fs.FileMode
		wantPath string // of the file that has the content afterwards; default: path
		wantMode fs.FileMode
	}{
		{name: "new", path: "a.txt", wantMode: 0o644},
		{name: "new with mode", path: "a.sh", mode: 0o755, wantMode: 0o755},
		{name: "folders are made", path: "a/b/c.txt", wantMode: 0o644},
		{name: "mode of an existing file is kept", path: "a.sh", wantMode: 0o700,
			setup: func(t *testing.T, dir string) { mustWrite(t, dir+"/a.sh", "old", 0o700) }},
		{name: "mode of an existing file is changed", path: "a.sh", mode: 0o600, wantMode: 0o600,
			setup: func(t *testing.T, dir string) { mustWrite(t, dir+"/a.sh", "old", 0o755) }},
		{name: "through a link", path: "link", wantPath: "real/a.txt", wantMode: 0o640,
			setup: func(t *testing.T, dir string) {
				mustWrite(t, dir+"/real/a.txt", "old", 0o640)
				os.Symlink("real/a.txt", dir+"/link")
			}},
		{name: "through a dangling link", path: "link", wantPath: "new/a.txt", wantMode: 0o644,
			setup: func(t *testing.T, dir string) { os.Symlink("new/a.txt", dir+"/link") }},
		{name: "longest name", path: strings.Repeat("n", 255), wantMode: 0o644},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			if tt.setup != nil {
				tt.setup(t, dir)
			}
			c := start(t, nil)
			info, err := c.WriteFile(t.Context(), filepath.Join(dir, tt.path), tt.mode, strings.NewReader("content"))
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, tt.path)
			if tt.wantPath != "" {
				path = filepath.Join(dir, tt.wantPath)
			}
			if got := mustRead(t, path); got != "content" {
				t.Errorf("file holds %q", got)
			}
			if want := fmt.Sprintf("%04o", tt.wantMode); info.Mode != want || info.Path != path || info.Type != "file" || info.Size != 7 || info.Name != filepath.Base(path) {
				t.Errorf("info %+v, want mode %s", info, want)
			}
			if st, _ := os.Stat(path); st.Mode().Perm() != tt.wantMode {
				t.Errorf("mode is %v", st.Mode())
			}
			onlyEntries(t, filepath.Dir(path), filepath.Base(path))
			if tt.name == "through a link" {
				if target, err := os.Readlink(dir + "/link"); err != nil || target != "real/a.txt" {
					t.Errorf("the link became %q, %v", target, err)
				}
			}
		})
	}
}

func TestWriteFileRefusals(t *testing.T) {
	dir := t.TempDir()
	mustWrite(t, dir+"/file", "old", 0o644)
	if err := syscall.Mkfifo(dir+"/fifo", 0o644); err != nil {
		t.Fatal(err)
	}
	os.Symlink("loop", dir+"/loop")
	os.MkdirAll(dir+"/root/.doze/run", 0o755)
	os.Symlink(".doze", dir+"/root/sneaky")
	for _, tt := range []struct {
		name, path string
		root       string
		code, hint string
	}{
		{"no path", "", "", guest.CodeInvalid, "empty"},
		{"zero byte", "/tmp/a\x00b", "", guest.CodeInvalid, "zero byte"},
		{"path of 1 MB", "/" + strings.Repeat("x", 20_000), "", guest.CodeInvalid, "4096"},
		{"name of 256 bytes", dir + "/" + strings.Repeat("x", 256), "", guest.CodeInvalid, "too long"},
		{"a folder", dir, "", guest.CodeIsDirectory, "directory"},
		{"below a file", dir + "/file/x", "", guest.CodeNotDirectory, "directory"},
		{"a pipe", dir + "/fifo", "", guest.CodeInvalid, "regular"},
		{"a device", "/dev/null", "", guest.CodeInvalid, "regular"},
		{"a loop of links", dir + "/loop", "", guest.CodeInvalid, "too many"},
		{"doze's own folder", "/.doze/x", dir + "/root", guest.CodeNotPermitted, "belongs to doze"},
		{"doze's own folder by dots", "/a/../.doze/x", dir + "/root", guest.CodeNotPermitted, "belongs to doze"},
		{"doze's own folder by a link", "/sneaky/run/x", dir + "/root", guest.CodeNotPermitted, "belongs to doze"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := start(t, func(cfg *server.Config) { cfg.Root = tt.root })
			_, err := c.WriteFile(t.Context(), tt.path, 0, strings.NewReader("content"))
			wantCode(t, err, tt.code, tt.hint)
			if got := mustRead(t, dir+"/file"); got != "old" {
				t.Errorf("file holds %q", got)
			}
			onlyEntries(t, dir, "fifo", "file", "loop", "root")
			onlyEntries(t, dir+"/root/.doze/run")
		})
	}
}

func TestUploadThatEndsEarlyLeavesTheFile(t *testing.T) {
	broken := errors.New("the visitor left")
	for _, tt := range []struct {
		name string
		body io.Reader
	}{
		{"body fails immediately", iotest.ErrReader(broken)},
		{"body fails later", io.MultiReader(bytes.NewReader(make([]byte, 1<<20)), iotest.ErrReader(broken))},
		{"body is shorter than announced", &short{strings.NewReader("new"), 100}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			mustWrite(t, dir+"/file", "old", 0o644)
			c := start(t, nil)
			if _, err := c.WriteFile(t.Context(), dir+"/file", 0, tt.body); err == nil {
				t.Fatal("no error")
			}
			if got := mustRead(t, dir+"/file"); got != "old" {
				t.Errorf("file holds %.20q", got)
			}
			testkit.Eventually(t, "the temporary file is gone", func() bool {
				entries, _ := os.ReadDir(dir)
				return len(entries) == 1
			})
		})
	}
}

// short announces more than it has.
type short struct {
	*strings.Reader
	announced int
}

func (s *short) Len() int { return s.announced }

func TestConnectionCutInUpload(t *testing.T) {
	dir := t.TempDir()
	mustWrite(t, dir+"/file", "old", 0o644)
	var socket string
	start(t, func(cfg *server.Config) { socket = filepath.Join(cfg.RunDir, guest.SocketName) })
	for _, framing := range []string{"Content-Length: 1000\r\n\r\nnew", "Transfer-Encoding: chunked\r\n\r\n3\r\nnew\r\n"} {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "PUT /file?path=%s/file HTTP/1.1\r\nHost: x\r\n%s", dir, framing)
		testkit.Eventually(t, "the upload has begun", func() bool { e, _ := os.ReadDir(dir); return len(e) == 2 })
		conn.Close()
		testkit.Eventually(t, "the upload is over", func() bool { e, _ := os.ReadDir(dir); return len(e) == 1 })
		if got := mustRead(t, dir+"/file"); got != "old" {
			t.Errorf("file holds %q", got)
		}
	}
}

type zeroes struct{}

func (zeroes) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestReadFile(t *testing.T) {
	dir := t.TempDir()
	mustWrite(t, dir+"/digits", "0123456789", 0o644)
	mustWrite(t, dir+"/empty", "", 0o644)
	os.Symlink("digits", dir+"/link")
	for _, tt := range []struct {
		name, path, ranges string
		status             int
		body, contentRange string
	}{
		{"whole", "digits", "", 200, "0123456789", ""},
		{"by a link", "link", "", 200, "0123456789", ""},
		{"empty", "empty", "", 200, "", ""},
		{"first bytes", "digits", "bytes=0-3", 206, "0123", "bytes 0-3/10"},
		{"last bytes", "digits", "bytes=-2", 206, "89", "bytes 8-9/10"},
		{"from", "digits", "bytes=7-", 206, "789", "bytes 7-9/10"},
		{"beyond", "digits", "bytes=10-", 416, "", "bytes */10"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := start(t, nil)
			f, err := c.ReadFile(t.Context(), filepath.Join(dir, tt.path), http.Header{"Range": {tt.ranges}})
			if err != nil {
				t.Fatal(err)
			}
			defer f.Body.Close()
			b, err := io.ReadAll(f.Body)
			if err != nil {
				t.Fatal(err)
			}
			if f.ContentType != "application/octet-stream" {
				t.Errorf("content type %q", f.ContentType)
			}
			if f.Status != tt.status || string(b) != tt.body || f.ContentRange != tt.contentRange {
				t.Errorf("status %d, body %q, range %q", f.Status, b, f.ContentRange)
			}
			if f.Status != 416 && (f.ETag == "" || time.Since(f.ModifiedAt) > time.Hour || f.Size != int64(len(b))) {
				t.Errorf("etag %q, modified %v, size %d", f.ETag, f.ModifiedAt, f.Size)
			}
		})
	}
}

// Such a file says to have no bytes, or a page of them, and changes without
// another time.
func TestReadFileOfTheKernel(t *testing.T) {
	c := start(t, nil)
	for _, path := range []string{"/proc/version", "/sys/class/net/lo/mtu"} {
		t.Run(path, func(t *testing.T) {
			f, err := c.ReadFile(t.Context(), path, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Body.Close()
			if b, err := io.ReadAll(f.Body); err != nil || string(b) != mustRead(t, path) {
				t.Errorf("got %.40q, %v", b, err)
			}
			if f.ETag != "" || !f.ModifiedAt.IsZero() {
				t.Errorf("etag %q, modified %v", f.ETag, f.ModifiedAt)
			}
		})
	}
}

func TestReadFileRefusals(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mkfifo(dir+"/fifo", 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, path, code string }{
		{"missing", dir + "/none", guest.CodeNotFound},
		{"a folder", dir, guest.CodeIsDirectory},
		{"a pipe", dir + "/fifo", guest.CodeInvalid},
		{"a device", "/dev/zero", guest.CodeInvalid},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := start(t, nil)
			_, err := c.ReadFile(t.Context(), tt.path, nil)
			wantCode(t, err, tt.code, "")
		})
	}
}

func TestFileThatShrinksWhileItIsRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	mustWrite(t, path, strings.Repeat("x", 8<<20), 0o644)
	c := start(t, nil)
	f, err := c.ReadFile(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Body.Close()
	if err := os.Truncate(path, 100); err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, f.Body); !errors.Is(err, guest.ErrLost) {
		t.Errorf("read %d bytes and then %v", n, err)
	}
}

func TestList(t *testing.T) {
	dir := t.TempDir()
	mustWrite(t, dir+"/b.txt", "bb", 0o600)
	mustWrite(t, dir+"/a/inner.txt", "", 0o644)
	mustWrite(t, dir+"/a/.hidden", "", 0o644)
	mustWrite(t, dir+"/.git/config", "", 0o644)
	os.Symlink("a", dir+"/link")
	for _, tt := range []struct {
		name string
		opts guest.ListOptions
		want string
	}{
		{"plain", guest.ListOptions{}, "a b.txt link"},
		{"hidden", guest.ListOptions{Hidden: true}, ".git a b.txt link"},
		{"recursive", guest.ListOptions{Recursive: true}, "a a/inner.txt b.txt link"},
		{"recursive and hidden", guest.ListOptions{Recursive: true, Hidden: true}, ".git .git/config a a/.hidden a/inner.txt b.txt link"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := start(t, nil)
			entries, truncated, err := c.List(t.Context(), dir, tt.opts)
			if err != nil || truncated {
				t.Fatal(truncated, err)
			}
			var names []string
			for _, e := range entries {
				rel, _ := filepath.Rel(dir, e.Path)
				names = append(names, rel)
				switch e.Name {
				case "link":
					if e.Type != "symlink" || e.Target != "a" {
						t.Errorf("link is %+v", e)
					}
				case "b.txt":
					if e.Type != "file" || e.Size != 2 || e.Mode != "0600" || e.ModifiedAt.IsZero() {
						t.Errorf("file is %+v", e)
					}
				case "a":
					if e.Type != "directory" {
						t.Errorf("folder is %+v", e)
					}
				}
			}
			if got := strings.Join(names, " "); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
	c := start(t, nil)
	_, _, err := c.List(t.Context(), dir+"/none", guest.ListOptions{})
	wantCode(t, err, guest.CodeNotFound, "none")
	_, _, err = c.List(t.Context(), dir+"/b.txt", guest.ListOptions{})
	wantCode(t, err, guest.CodeNotDirectory, "")
	_, _, err = c.List(t.Context(), fifoFolder(t)+"/fifo", guest.ListOptions{})
	wantCode(t, err, guest.CodeNotDirectory, "")
	if entries, _, err := c.List(t.Context(), dir+"/.git/../.git", guest.ListOptions{}); err != nil || len(entries) != 1 {
		t.Errorf("a folder that is itself hidden: %v, %v", entries, err)
	}
}

func TestStatRemoveMkdirMove(t *testing.T) {
	dir := t.TempDir()
	c := start(t, func(cfg *server.Config) { cfg.Root = dir; cfg.Workdir = "/src" })
	ctx := t.Context()
	mustWrite(t, dir+"/src/file", "x", 0o644)
	mustWrite(t, dir+"/.doze/run/guest", "x", 0o644)
	mustWrite(t, dir+"/full/file", "x", 0o644)
	os.Symlink("nowhere", dir+"/dangling")

	if info, err := c.Stat(ctx, "file", guest.StatOptions{}); err != nil || info.Path != "/src/file" {
		t.Errorf("a path relative to the working directory: %+v, %v", info, err)
	}
	if info, err := c.Stat(ctx, "/dangling", guest.StatOptions{}); err != nil || info.Type != "symlink" || info.Target != "nowhere" {
		t.Errorf("a dangling link: %+v, %v", info, err)
	}
	_, err := c.Stat(ctx, "/none", guest.StatOptions{})
	wantCode(t, err, guest.CodeNotFound, "/none")

	info, err := c.Mkdir(ctx, "/new/deep", 0o777)
	if err != nil || info.Mode != "0777" || info.Type != "directory" || info.Path != "/new/deep" {
		t.Errorf("mkdir: %+v, %v", info, err)
	}
	if info, err = c.Mkdir(ctx, "/new/deep", 0o700); err != nil || info.Mode != "0777" {
		t.Errorf("mkdir again: %+v, %v", info, err)
	}
	_, err = c.Mkdir(ctx, "/src/file", 0)
	wantCode(t, err, guest.CodeExists, "")
	_, err = c.Mkdir(ctx, "/.doze/x", 0)
	wantCode(t, err, guest.CodeNotPermitted, "doze")

	if info, err = c.Move(ctx, "/src/file", "/made/by/move", ""); err != nil || info.Path != "/made/by/move" || info.Size != 1 {
		t.Errorf("move: %+v, %v", info, err)
	}
	_, err = c.Move(ctx, "/src/file", "/x", "")
	wantCode(t, err, guest.CodeNotFound, "")
	_, err = c.Move(ctx, "/made/by/move", "/full", "")
	wantCode(t, err, guest.CodeExists, "")
	_, err = c.Move(ctx, "/full", "/full/inner", "")
	wantCode(t, err, guest.CodeInvalid, "itself")
	_, err = c.Move(ctx, "/full", "/.doze/full", "")
	wantCode(t, err, guest.CodeNotPermitted, "doze")
	_, err = c.Move(ctx, "/.doze/run/guest", "/guest", "")
	wantCode(t, err, guest.CodeNotPermitted, "doze")
	if _, err = c.Move(ctx, "/dangling", "/still-dangling", ""); err != nil {
		t.Errorf("moving a link: %v", err)
	}

	wantCode(t, c.Remove(ctx, "/none", false, ""), guest.CodeNotFound, "none")
	wantCode(t, c.Remove(ctx, "/none", true, ""), guest.CodeNotFound, "none")
	wantCode(t, c.Remove(ctx, "/full", false, ""), guest.CodeNotEmpty, "full")
	for _, own := range []string{"/", "/.", "/../", "/.doze", "/.doze/run", "/src/../.doze"} {
		wantCode(t, c.Remove(ctx, own, true, ""), guest.CodeNotPermitted, "")
	}
	if mustRead(t, dir+"/.doze/run/guest") != "x" || mustRead(t, dir+"/full/file") != "x" {
		t.Error("a refused removal removed something")
	}
	for _, path := range []string{"/full", "/still-dangling", "/made/by/move"} {
		if err := c.Remove(ctx, path, path == "/full", ""); err != nil {
			t.Errorf("removing %s: %v", path, err)
		}
	}
	onlyEntries(t, dir, ".doze", "made", "new", "src")
}

func TestMoveBetweenFileSystems(t *testing.T) {
	other, err := os.MkdirTemp("/dev/shm", "doze-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(other) })
	dir := t.TempDir()
	mustWrite(t, other+"/src/bin/tool", "#!", 0o755)
	mustWrite(t, other+"/src/data", "data", 0o640)
	os.Symlink("/etc/hosts", other+"/src/absolute")
	os.Link(other+"/src/data", other+"/src/data2")
	c := start(t, nil)
	if _, err := c.Move(t.Context(), other+"/src", dir+"/dst", ""); err != nil {
		t.Fatal(err)
	}
	onlyEntries(t, other)
	onlyEntries(t, dir, "dst")
	onlyEntries(t, dir+"/dst", "absolute", "bin", "data", "data2")
	if info, _ := os.Stat(dir + "/dst/bin/tool"); info.Mode().Perm() != 0o755 {
		t.Errorf("mode %v", info.Mode())
	}
	if target, _ := os.Readlink(dir + "/dst/absolute"); target != "/etc/hosts" {
		t.Errorf("link to %q", target)
	}
	if mustRead(t, dir+"/dst/data2") != "data" {
		t.Error("a hard link lost its content")
	}
	mustWrite(t, other+"/pipes/file", "x", 0o644)
	if err := syscall.Mkfifo(other+"/pipes/fifo", 0o644); err != nil {
		t.Fatal(err)
	}
	_, err = c.Move(t.Context(), other+"/pipes", dir+"/pipes", "")
	wantCode(t, err, guest.CodeInvalid, "neither")
	onlyEntries(t, other+"/pipes", "fifo", "file")
	onlyEntries(t, dir, "dst")
}

func BenchmarkWriteFile(b *testing.B) {
	for _, size := range []int{1 << 10, 1 << 20, 64 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			c := start(b, nil)
			path := filepath.Join(b.TempDir(), "file")
			content := make([]byte, size)
			b.SetBytes(int64(size))
			for b.Loop() {
				if _, err := c.WriteFile(b.Context(), path, 0, bytes.NewReader(content)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
