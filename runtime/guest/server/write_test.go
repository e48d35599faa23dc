package server_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/server"
	"github.com/doze-run/doze/testkit"
)

// contentTag is the entity tag that names a content.
func contentTag(content string) string {
	return fmt.Sprintf(`"sha256-%x"`, sha256.Sum256([]byte(content)))
}

func TestWritesHaveConditions(t *testing.T) {
	for _, tt := range []struct {
		name    string
		present string // "-": no file
		options func(tag string) guest.WriteOptions
		code    string // empty: the file is written
	}{
		{"the ETag", "old", func(tag string) guest.WriteOptions { return guest.WriteOptions{IfMatch: tag} }, ""},
		{"one of several", "old", func(tag string) guest.WriteOptions {
			return guest.WriteOptions{IfMatch: `W/"x", "a,b",` + tag + ` , "y"`}
		}, ""},
		{"another ETag", "old", func(string) guest.WriteOptions { return guest.WriteOptions{IfMatch: `"other"`} }, guest.CodeChanged},
		{"a weak ETag", "old", func(tag string) guest.WriteOptions { return guest.WriteOptions{IfMatch: "W/" + tag} }, guest.CodeChanged},
		{"any file", "old", func(string) guest.WriteOptions { return guest.WriteOptions{IfMatch: "*"} }, ""},
		{"any file, of none", "-", func(string) guest.WriteOptions { return guest.WriteOptions{IfMatch: "*"} }, guest.CodeChanged},
		{"an ETag of no file", "-", func(string) guest.WriteOptions { return guest.WriteOptions{IfMatch: `"x"`} }, guest.CodeChanged},
		{"the content", "old", func(string) guest.WriteOptions { return guest.WriteOptions{IfMatch: contentTag("old")} }, ""},
		{"another content", "old", func(string) guest.WriteOptions { return guest.WriteOptions{IfMatch: contentTag("older")} }, guest.CodeChanged},
		{"no file", "-", func(string) guest.WriteOptions { return guest.WriteOptions{IfNoneMatch: "*"} }, ""},
		{"no file, of one", "old", func(string) guest.WriteOptions { return guest.WriteOptions{IfNoneMatch: "*"} }, guest.CodeChanged},
		{"none but this", "old", func(tag string) guest.WriteOptions { return guest.WriteOptions{IfNoneMatch: tag} }, guest.CodeChanged},
		{"none of others", "old", func(string) guest.WriteOptions { return guest.WriteOptions{IfNoneMatch: `"x"`} }, ""},
		{"new", "-", func(string) guest.WriteOptions { return guest.WriteOptions{CreateNew: true} }, ""},
		{"new, of one", "old", func(string) guest.WriteOptions { return guest.WriteOptions{CreateNew: true} }, guest.CodeExists},
		{"both hold", "old", func(tag string) guest.WriteOptions { return guest.WriteOptions{IfMatch: tag, IfNoneMatch: `"x"`} }, ""},
		{"not a tag", "old", func(string) guest.WriteOptions { return guest.WriteOptions{IfMatch: "x"} }, guest.CodeInvalid},
		{"an open tag", "old", func(string) guest.WriteOptions { return guest.WriteOptions{IfMatch: `"a", "b`} }, guest.CodeInvalid},
		{"the digest", "old", func(string) guest.WriteOptions { return guest.WriteOptions{SHA256: digest("new")} }, ""},
		{"another digest", "old", func(string) guest.WriteOptions { return guest.WriteOptions{SHA256: digest("old")} }, guest.CodeDigest},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			path := dir + "/deep/file"
			c := start(t, nil)
			tag := ""
			if tt.present != "-" {
				mustWrite(t, path, tt.present, 0o640)
				info, err := c.Stat(t.Context(), path, guest.StatOptions{})
				if err != nil || !strings.HasPrefix(info.ETag, `"`) {
					t.Fatalf("%+v, %v", info, err)
				}
				tag = info.ETag
			}
			info, err := c.Write(t.Context(), path, tt.options(tag), strings.NewReader("new"))
			want := tt.present
			if tt.code == "" {
				if err != nil {
					t.Fatal(err)
				}
				want = "new"
				if now, err := c.Stat(t.Context(), path, guest.StatOptions{}); err != nil || now.ETag != info.ETag || info.ETag == tag || info.ETag == "" {
					t.Errorf("the ETag was %s, %s after the write, and is %s, %v", tag, info.ETag, now.ETag, err)
				}
			} else {
				wantCode(t, err, tt.code, "")
			}
			if want == "-" {
				if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("the file exists: %v", err)
				}
				return
			}
			if got := mustRead(t, path); got != want {
				t.Errorf("the file has %q, want %q", got, want)
			}
			onlyEntries(t, dir+"/deep", "file")
			var refused *guest.Error
			if errors.As(err, &refused) && refused.Code == guest.CodeChanged && refused.ETag != tag {
				t.Errorf("the refusal has the ETag %s, not %s", refused.ETag, tag)
			}
		})
	}
}

func digest(content string) []byte {
	sum := sha256.Sum256([]byte(content))
	return sum[:]
}

// A failed condition must not make directories, or read the body.
func TestFailedConditionReadsNoBody(t *testing.T) {
	dir := t.TempDir()
	mustWrite(t, dir+"/file", "old", 0o644)
	c := start(t, nil)
	body := &endlessBody{}
	_, err := c.Write(t.Context(), dir+"/file", guest.WriteOptions{CreateNew: true}, body)
	wantCode(t, err, guest.CodeExists, "create_new")
	_, err = c.Write(t.Context(), dir+"/none/file", guest.WriteOptions{IfMatch: "*"}, strings.NewReader("x"))
	wantCode(t, err, guest.CodeChanged, "does not exist")
	onlyEntries(t, dir, "file")
}

type endlessBody struct{}

func (endlessBody) Read(p []byte) (int, error) { return len(p), nil }

// Of clients that read a file and write it on condition that it is unchanged, exactly one
// wins each round, whichever path it uses.
func TestOneOfConcurrentConditionalWritesWins(t *testing.T) {
	dir := t.TempDir()
	path := dir + "/real/file"
	mustWrite(t, path, "0", 0o644)
	if err := os.Symlink("real", dir+"/link"); err != nil {
		t.Fatal(err)
	}
	c := start(t, nil)
	for round := range 20 {
		info, err := c.Stat(t.Context(), path, guest.StatOptions{Digest: true})
		if err != nil {
			t.Fatal(err)
		}
		options := guest.WriteOptions{IfMatch: info.ETag}
		if round%2 == 1 {
			options.IfMatch = contentTag(mustRead(t, path))
		}
		if round%5 == 4 {
			options = guest.WriteOptions{CreateNew: true}
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
		var wins atomic.Int32
		var winner atomic.Value
		var writers sync.WaitGroup
		for i := range 8 {
			writers.Go(func() {
				content := fmt.Sprintf("round %d, writer %d", round, i)
				o := options
				if i%3 == 2 && !o.CreateNew {
					o.Range = &guest.WriteRange{Length: int64(len(content)), Size: int64(len(content))}
				}
				_, err := c.Write(t.Context(), dir+[]string{"/real", "/link"}[i%2]+"/file", o, strings.NewReader(content))
				switch {
				case err == nil:
					wins.Add(1)
					winner.Store(content)
				case codeOf(err) != guest.CodeChanged && codeOf(err) != guest.CodeExists:
					t.Errorf("%s: %v", content, err)
				}
			})
		}
		writers.Wait()
		if got := mustRead(t, path); wins.Load() != 1 || got != winner.Load() {
			t.Fatalf("round %d: %d writers won, the last %v, and the file has %q", round, wins.Load(), winner.Load(), got)
		}
	}
	onlyEntries(t, dir+"/real", "file")
}

// Changes within one tick of the kernel's clock, of the same size, change the ETag.
func TestEachChangeChangesTheETag(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	c := start(t, nil)
	seen := map[string]int{}
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for i := range 100 {
		var tag string
		content := fmt.Sprintf("%03d", i)
		if i%3 == 0 {
			info, err := c.WriteFile(t.Context(), path, 0, strings.NewReader(content))
			if err != nil {
				t.Fatal(err)
			}
			tag = info.ETag
			f.Close()
			if f, err = os.OpenFile(path, os.O_RDWR, 0); err != nil {
				t.Fatal(err)
			}
		} else {
			if _, err := f.WriteAt([]byte(content), 0); err != nil {
				t.Fatal(err)
			}
			info, err := c.Stat(t.Context(), path, guest.StatOptions{})
			if err != nil {
				t.Fatal(err)
			}
			tag = info.ETag
		}
		if before, twice := seen[tag]; twice {
			t.Fatalf("versions %d and %d have the ETag %s", before, i, tag)
		}
		seen[tag] = i
	}
}

func TestRangesAreWritten(t *testing.T) {
	for _, tt := range []struct {
		name, present, body string
		part                guest.WriteRange
		mode                fs.FileMode
		want                string
		code                string
	}{
		{"middle", "0123456789", "abc", guest.WriteRange{Offset: 2, Length: 3, Size: -1}, 0, "01abc56789", ""},
		{"across the end", "0123", "abc", guest.WriteRange{Offset: 3, Length: 3, Size: -1}, 0, "012abc", ""},
		{"after the end", "01", "abc", guest.WriteRange{Offset: 4, Length: 3, Size: -1}, 0, "01\x00\x00abc", ""},
		{"shorter", "0123456789", "abc", guest.WriteRange{Offset: 0, Length: 3, Size: 5}, 0, "abc34", ""},
		{"longer", "01", "abc", guest.WriteRange{Offset: 0, Length: 3, Size: 5}, 0, "abc\x00\x00", ""},
		{"new file", "-", "abc", guest.WriteRange{Offset: 1, Length: 3, Size: -1}, 0o600, "\x00abc", ""},
		{"empty", "01", "", guest.WriteRange{Offset: 0, Length: 0, Size: -1}, 0, "01", ""},
		{"body too short", "0123", "ab", guest.WriteRange{Offset: 0, Length: 3, Size: -1}, 0, "0123", guest.CodeInvalid},
		{"body too long", "0123", "abcd", guest.WriteRange{Offset: 0, Length: 3, Size: -1}, 0, "0123", guest.CodeInvalid},
		{"beyond the limit", "0123", "a", guest.WriteRange{Offset: guest.MaxFileSize + 1, Length: 1, Size: -1}, 0, "0123", guest.CodeInvalid},
		{"negative", "0123", "a", guest.WriteRange{Offset: -1, Length: 1, Size: -1}, 0, "0123", guest.CodeInvalid},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			path := dir + "/file"
			if tt.present != "-" {
				mustWrite(t, path, tt.present, 0o640)
			}
			info, err := start(t, nil).Write(t.Context(), path, guest.WriteOptions{Range: &tt.part, Mode: tt.mode}, strings.NewReader(tt.body))
			if tt.code != "" {
				wantCode(t, err, tt.code, "")
			} else if err != nil || info.Size != int64(len(tt.want)) {
				t.Errorf("%+v, %v", info, err)
			}
			if got := mustRead(t, path); got != tt.want {
				t.Errorf("the file has %q, want %q", got, tt.want)
			}
			want := fs.FileMode(0o640)
			if tt.mode != 0 {
				want = tt.mode
			}
			if st, _ := os.Stat(path); st.Mode().Perm() != want {
				t.Errorf("its mode is %v", st.Mode())
			}
			onlyEntries(t, dir, "file")
		})
	}
}

func TestRangeFarAwayMakesASparseFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	const offset = 1 << 33
	info, err := start(t, nil).Write(t.Context(), path, guest.WriteOptions{Range: &guest.WriteRange{Offset: offset, Length: 1, Size: -1}}, strings.NewReader("x"))
	if err != nil || info.Size != offset+1 {
		t.Fatalf("%+v, %v", info, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil || st.Blocks*512 > 1<<20 {
		t.Errorf("it has %d blocks, %v", st.Blocks, err)
	}
}

func TestIncompleteRangeChangesNothing(t *testing.T) {
	dir := t.TempDir()
	mustWrite(t, dir+"/file", "0123", 0o644)
	body := io.MultiReader(bytes.NewReader(make([]byte, 1<<20)), &failing{errors.New("the client left")})
	_, err := start(t, nil).Write(t.Context(), dir+"/file", guest.WriteOptions{Range: &guest.WriteRange{Offset: 1, Length: 2 << 20, Size: -1}}, body)
	if err == nil {
		t.Error("no error")
	}
	if got := mustRead(t, dir+"/file"); got != "0123" {
		t.Errorf("the file has %.20q", got)
	}
	testkit.Eventually(t, "the temporary file is removed", func() bool { entries, _ := os.ReadDir(dir); return len(entries) == 1 })
}

type failing struct{ err error }

func (f *failing) Read([]byte) (int, error) { return 0, f.err }

func TestStatDescribesFiles(t *testing.T) {
	dir := t.TempDir()
	mustWrite(t, dir+"/file", "content", 0o604)
	if err := errors.Join(os.Symlink("file", dir+"/link"), os.Symlink("/", dir+"/root"), os.Mkdir(dir+"/dir", 0o750), syscall.Mkfifo(dir+"/fifo", 0o600)); err != nil {
		t.Fatal(err)
	}
	c := start(t, nil)
	sum := fmt.Sprintf("%x", digest("content"))
	for _, tt := range []struct {
		name   string
		o      guest.StatOptions
		kind   string
		mode   string
		tag    bool
		sha256 string
		target string
		code   string
	}{
		{"file", guest.StatOptions{}, "file", "0604", true, "", "", ""},
		{"file", guest.StatOptions{Digest: true}, "file", "0604", true, sum, "", ""},
		{"link", guest.StatOptions{}, "symlink", "0777", false, "", "file", ""},
		{"link", guest.StatOptions{Follow: true, Digest: true}, "file", "0604", true, sum, "", ""},
		{"link", guest.StatOptions{Digest: true}, "", "", false, "", "", guest.CodeInvalid},
		{"root", guest.StatOptions{}, "symlink", "0777", false, "", "/", ""},
		{"dir", guest.StatOptions{}, "directory", "0750", false, "", "", ""},
		{"dir", guest.StatOptions{Digest: true}, "", "", false, "", "", guest.CodeInvalid},
		{"fifo", guest.StatOptions{}, "other", "0600", false, "", "", ""},
		{"fifo", guest.StatOptions{Digest: true}, "", "", false, "", "", guest.CodeInvalid},
		{"none", guest.StatOptions{}, "", "", false, "", "", guest.CodeNotFound},
	} {
		info, err := c.Stat(t.Context(), dir+"/"+tt.name, tt.o)
		if tt.code != "" {
			wantCode(t, err, tt.code, "")
			continue
		}
		var st unix.Stat_t
		if err := unix.Lstat(dir+"/"+tt.name, &st); err != nil {
			t.Fatal(err)
		}
		if err != nil || info.Type != tt.kind || info.Mode != tt.mode || (info.ETag != "") != tt.tag || info.SHA256 != tt.sha256 || info.Target != tt.target || info.Name != tt.name ||
			int(info.UID) != os.Getuid() || int(info.GID) != os.Getgid() || !tt.o.Follow && info.ModifiedAt.UnixNano() != st.Mtim.Nano() {
			t.Errorf("%s %+v: %+v, %v", tt.name, tt.o, info, err)
		}
	}
	if info, err := c.Stat(t.Context(), "/proc/version", guest.StatOptions{}); err != nil || info.ETag != "" || info.Type != "file" {
		t.Errorf("a file of the kernel: %+v, %v", info, err)
	}
}

func TestReadsHaveConditions(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	mustWrite(t, path, "0123456789", 0o644)
	c := start(t, nil)
	info, err := c.Stat(t.Context(), path, guest.StatOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		header http.Header
		status int
		body   string
	}{
		{"the ETag", http.Header{"If-Match": {info.ETag}}, 200, "0123456789"},
		{"another ETag", http.Header{"If-Match": {`"x"`}}, 412, ""},
		{"not the ETag", http.Header{"If-None-Match": {info.ETag}}, 304, ""},
		{"a range of the same file", http.Header{"Range": {"bytes=2-3"}, "If-Range": {info.ETag}}, 206, "23"},
		{"a range of another file", http.Header{"Range": {"bytes=2-3"}, "If-Range": {`"x"`}}, 200, "0123456789"},
	} {
		f, err := c.ReadFile(t.Context(), path, tt.header)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(f.Body)
		f.Body.Close()
		if err != nil || f.Status != tt.status || string(b) != tt.body || f.ETag != info.ETag {
			t.Errorf("%s: status %d, %q, ETag %s, %v", tt.name, f.Status, b, f.ETag, err)
		}
	}
}

// A program that replaces directories by links while files are written leads no write into
// doze's own directory, and no call fails in a way that is not a refusal.
func TestLinksThatAppearLeadNoWriteElsewhere(t *testing.T) {
	root := t.TempDir()
	mustWrite(t, root+"/.doze/run/file", "own", 0o644)
	mustWrite(t, root+"/a/dir/file", "old", 0o644)
	mustWrite(t, root+"/b/file", "other", 0o644)
	c := start(t, func(cfg *server.Config) { cfg.Root = root })
	ctx, cancel := context.WithCancel(t.Context())
	var swapping sync.WaitGroup
	swapping.Go(func() { // ended by cancel
		for i := 0; ctx.Err() == nil; i++ {
			os.Rename(root+"/a/dir", root+"/a/aside")
			os.Symlink([]string{root + "/.doze/run", root + "/b", "dir"}[i%3], root+"/a/dir")
			os.Remove(root + "/a/dir")
			os.Rename(root+"/a/aside", root+"/a/dir")
			os.Remove(root + "/a/dir/file")
			os.Symlink([]string{root + "/.doze/run/file", "../../.doze/run/file", "file"}[i%3], root+"/a/dir/file")
			os.Remove(root + "/a/dir/file")
		}
	})
	for i := range 300 {
		options := guest.WriteOptions{}
		switch i % 4 {
		case 1:
			options.Range = &guest.WriteRange{Length: 3, Size: -1}
		case 2:
			options.IfMatch = "*"
		case 3:
			options.CreateNew = true
		}
		if _, err := c.Write(t.Context(), "/a/dir/file", options, strings.NewReader("new")); err != nil && (codeOf(err) == "" || codeOf(err) == guest.CodeInternal) {
			t.Errorf("write: %v", err)
		}
		if _, err := c.Stat(t.Context(), "/a/dir/file", guest.StatOptions{Digest: true}); err != nil && (codeOf(err) == "" || codeOf(err) == guest.CodeInternal) {
			t.Errorf("stat: %v", err)
		}
	}
	cancel()
	swapping.Wait()
	if got := mustRead(t, root+"/.doze/run/file"); got != "own" {
		t.Errorf("doze's own file has %q", got)
	}
	onlyEntries(t, root+"/.doze/run", "file")
	onlyEntries(t, root, ".doze", "a", "b")
}

func TestHostileNamesAreOrdinaryFiles(t *testing.T) {
	dir := t.TempDir()
	c := start(t, nil)
	for _, name := range []string{"-rf", "a\nb", "\xff\xfe", "$(id)", "a b'\"", "%2e%2e", "..a", " ", "\u202e", strings.Repeat("é", 127)} {
		path := dir + "/" + name
		info, err := c.Write(t.Context(), path, guest.WriteOptions{CreateNew: true}, strings.NewReader(name))
		if err != nil {
			t.Errorf("%q: %v", name, err)
			continue
		}
		if got := mustRead(t, path); got != name {
			t.Errorf("%q has %q", name, got)
		}
		if now, err := c.Stat(t.Context(), path, guest.StatOptions{}); err != nil || now.ETag != info.ETag {
			t.Errorf("%q: %+v, %v", name, now, err)
		}
	}
}
