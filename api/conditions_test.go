package api

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
)

// digestHeader is the value of a Content-Digest.
func digestHeader(content string) string {
	sum := sha256.Sum256([]byte(content))
	return "sha-256=:" + base64.StdEncoding.EncodeToString(sum[:]) + ":"
}

func TestFileIsDescribed(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	stat := "/sandbox/box/files/stat?"
	written := must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?mode=0640&"+at(path), strings.NewReader("content"))
	if err := os.Symlink("file", dir+"/link"); err != nil {
		t.Fatal(err)
	}
	got := must[types.File](s, http.StatusOK, "GET", stat+"digest=sha256&"+at(path), nil)
	if got.ETag == "" || got.ETag != written.ETag || got.SHA256 != fmt.Sprintf("%x", sha256.Sum256([]byte("content"))) || got.Mode != "0640" || got.Size != 7 ||
		got.Type != types.FileTypeFile || int(got.UID) != os.Getuid() || int(got.GID) != os.Getgid() || got.ModifiedAt.IsZero() {
		t.Errorf("got %+v, written %+v", got, written)
	}
	if read := s.do("GET", "/sandbox/box/files/read?"+at(path), nil); read.header.Get("ETag") != got.ETag {
		t.Errorf("files/read has the ETag %s, not %s", read.header.Get("ETag"), got.ETag)
	}
	if link := must[types.File](s, http.StatusOK, "GET", stat+at(dir+"/link"), nil); link.Type != types.FileTypeSymlink || link.Target != "file" || link.ETag != "" {
		t.Errorf("the link: %+v", link)
	}
	if followed := must[types.File](s, http.StatusOK, "GET", stat+"follow=true&"+at(dir+"/link"), nil); followed.ETag != got.ETag {
		t.Errorf("the file behind the link: %+v", followed)
	}
	s.refused(problem.PathNotFound, "GET", stat+at(dir+"/none"), nil)
	s.refused(problem.RequestInvalid, "GET", stat+"digest=sha256&"+at(dir), nil)
	s.refused(problem.RequestInvalid, "GET", stat+"digest=md5&"+at(path), nil)
	s.refused(problem.RequestInvalid, "GET", stat+"path=relative", nil)
}

func TestWritesHaveConditions(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	path := filepath.Join(t.TempDir(), "file")
	write := "/sandbox/box/files/write?" + at(path)
	put := func(body string, headers ...string) response {
		t.Helper()
		return s.do("PUT", write, strings.NewReader(body), headers...)
	}
	first := put("1", "If-None-Match", "*")
	tag := first.header.Get("ETag")
	if first.status != http.StatusOK || !isETag(tag) {
		t.Fatalf("status %d, ETag %q: %s", first.status, tag, first.body)
	}
	for name, tc := range map[string]struct {
		code    problem.Code
		query   string
		headers []string
	}{
		"exists":                {problem.FileConflict, "", []string{"If-None-Match", "*"}},
		"other ETag":            {problem.FileConflict, "", []string{"If-Match", `"x"`}},
		"weak ETag":             {problem.FileConflict, "", []string{"If-Match", "W/" + tag}},
		"other content":         {problem.FileConflict, "", []string{"If-Match", fmt.Sprintf(`"sha256-%x"`, sha256.Sum256([]byte("2")))}},
		"create_new":            {problem.PathExists, "&create_new=true", nil},
		"other digest":          {problem.DigestMismatch, "", []string{"Content-Digest", digestHeader("other")}},
		"other whole digest":    {problem.DigestMismatch, "", []string{"Repr-Digest", digestHeader("other")}},
		"no ETag":               {problem.RequestInvalid, "", []string{"If-Match", "x"}},
		"other algorithm":       {problem.RequestInvalid, "", []string{"Content-Digest", "md5=:AAAA:"}},
		"short digest":          {problem.RequestInvalid, "", []string{"Content-Digest", "sha-256=:AAAA:"}},
		"digest without colons": {problem.RequestInvalid, "", []string{"Content-Digest", strings.Trim(digestHeader("new"), ":")}},
		"two digests":           {problem.RequestInvalid, "", []string{"Content-Digest", digestHeader("new"), "Repr-Digest", digestHeader("x")}},
	} {
		got := s.do("PUT", write+tc.query, strings.NewReader("new"), tc.headers...)
		s.checkProblem(tc.code, name, got)
		if tc.code == problem.FileConflict && got.header.Get("ETag") != tag {
			t.Errorf("%s: the ETag is %q, not %s", name, got.header.Get("ETag"), tag)
		}
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "1" {
		t.Fatalf("the file has %q, %v", b, err)
	}
	for _, headers := range [][]string{
		{"If-Match", tag}, {"If-Match", "*", "Content-Digest", "md5=:AAAA:, " + digestHeader("new")}, {"Content-Digest", digestHeader("new"), "Repr-Digest", digestHeader("new")},
	} {
		if got := put("new", headers...); got.status != http.StatusOK || got.header.Get("ETag") == tag {
			t.Errorf("%v: status %d, ETag %s: %s", headers, got.status, got.header.Get("ETag"), got.body)
		}
	}
	s.checkProblem(problem.FileConflict, "the ETag of before", put("2", "If-Match", tag))

	form := map[string]any{"path": path, "content": "form", "create_new": true}
	s.refused(problem.PathExists, "PUT", "/sandbox/box/files/write", form)
	delete(form, "create_new")
	s.refused(problem.FileConflict, "PUT", "/sandbox/box/files/write", form, "If-Match", tag)
	s.refused(problem.RequestInvalid, "PUT", "/sandbox/box/files/write", form, "Content-Digest", digestHeader("form"))
	s.refused(problem.RequestInvalid, "PUT", "/sandbox/box/files/write", form, "Content-Range", "bytes 0-3/*")
	form["path"] = path + "-new"
	must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write", form, "If-None-Match", "*")
}

func TestDeletionsAndMovesHaveConditions(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	dir := t.TempDir()
	path, moved := filepath.Join(dir, "file"), filepath.Join(dir, "moved")
	if err := os.Symlink("file", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	first := must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?"+at(path), strings.NewReader("1")).ETag
	tag := must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?"+at(path), strings.NewReader("2")).ETag
	for name, do := range map[string]func(from, ifMatch string) response{
		"delete": func(from, ifMatch string) response {
			return s.do("DELETE", "/sandbox/box/files?recursive=true&"+at(from), nil, "If-Match", ifMatch)
		},
		"move": func(from, ifMatch string) response {
			return s.do("POST", "/sandbox/box/files/move", types.MoveFileRequest{From: from, To: moved}, "If-Match", ifMatch)
		},
	} {
		conflict := do(path, first)
		s.checkProblem(problem.FileConflict, name+" with the ETag of before", conflict)
		if conflict.header.Get("ETag") != tag {
			t.Errorf("%s: the ETag is %q, not %s", name, conflict.header.Get("ETag"), tag)
		}
		s.checkProblem(problem.FileConflict, name+" of a missing file", do(moved, "*"))
		s.checkProblem(problem.PathNotFound, name+" in a missing directory", do(dir+"/none/file", "*"))
		s.checkProblem(problem.PathIsDirectory, name+" of a directory", do(dir, "*"))
		s.checkProblem(problem.RequestInvalid, name+" of a link", do(filepath.Join(dir, "link"), tag))
		s.checkProblem(problem.RequestInvalid, name+" without quotes", do(path, "x"))
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "2" {
		t.Fatalf("the file has %q, %v", b, err)
	}
	must[types.File](s, http.StatusOK, "POST", "/sandbox/box/files/move", types.MoveFileRequest{From: path, To: moved}, "If-Match", tag)
	byContent := fmt.Sprintf(`"sha256-%x"`, sha256.Sum256([]byte("2")))
	if got := s.do("DELETE", "/sandbox/box/files?"+at(moved), nil, "If-Match", byContent); got.status != http.StatusNoContent {
		t.Errorf("status %d: %s", got.status, got.body)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("%v, %v", left, err)
	}
}

// Of writes, deletions and moves with one condition exactly one succeeds.
func TestOneChangeOfAFileWins(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	path := filepath.Join(t.TempDir(), "file")
	for range 20 {
		tag := must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?"+at(path), strings.NewReader("content")).ETag
		var wins atomic.Int32
		var changes sync.WaitGroup
		for _, change := range []func() response{
			func() response { return s.do("DELETE", "/sandbox/box/files?"+at(path), nil, "If-Match", tag) },
			func() response {
				return s.do("POST", "/sandbox/box/files/move", types.MoveFileRequest{From: path, To: path + "-moved"}, "If-Match", tag)
			},
			func() response {
				return s.do("PUT", "/sandbox/box/files/write?"+at(path), strings.NewReader("new"), "If-Match", tag)
			},
		} {
			changes.Go(func() {
				switch got := change(); got.status {
				case http.StatusOK, http.StatusNoContent:
					wins.Add(1)
				case http.StatusPreconditionFailed:
				default:
					t.Errorf("status %d: %s", got.status, got.body)
				}
			})
		}
		changes.Wait()
		if wins.Load() != 1 {
			t.Fatalf("%d changes won", wins.Load())
		}
	}
}

func TestReadsHaveConditions(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	path := filepath.Join(t.TempDir(), "file")
	tag := must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?"+at(path), strings.NewReader("0123456789")).ETag
	read := "/sandbox/box/files/read?" + at(path)
	for name, tc := range map[string]struct {
		headers []string
		status  int
		body    string
	}{
		"range of this file":    {[]string{"Range", "bytes=2-3", "If-Range", tag}, 206, "23"},
		"range of another file": {[]string{"Range", "bytes=2-3", "If-Range", `"x"`}, 200, "0123456789"},
		"this file":             {[]string{"If-Match", tag}, 200, "0123456789"},
		"not modified":          {[]string{"If-None-Match", `"x", ` + tag}, 304, ""},
		"not modified, weakly":  {[]string{"If-None-Match", "W/" + tag}, 304, ""},
	} {
		if got := s.do("GET", read, nil, tc.headers...); got.status != tc.status || string(got.body) != tc.body || got.header.Get("ETag") != tag {
			t.Errorf("%s: status %d, header %v: %s", name, got.status, got.header, got.body)
		}
	}
	got := s.do("GET", read, nil, "If-Match", `"x"`)
	s.checkProblem(problem.FileConflict, "another file", got)
	if got.header.Get("ETag") != tag {
		t.Errorf("the ETag is %q", got.header.Get("ETag"))
	}
}

func TestRangesAreWritten(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	path := filepath.Join(t.TempDir(), "file")
	write := "/sandbox/box/files/write?" + at(path)
	put := func(body, contentRange string, headers ...string) response {
		t.Helper()
		return s.do("PUT", write, strings.NewReader(body), append(headers, "Content-Range", contentRange)...)
	}
	for _, tc := range []struct{ body, contentRange, want string }{
		{"world", "bytes 6-10/11", "\x00\x00\x00\x00\x00\x00world"},
		{"hello ", "bytes 0-5/11", "hello world"},
		{"!", "bytes 11-11/*", "hello world!"},
		{"H", "bytes 0-0/5", "Hello"},
	} {
		if got := put(tc.body, tc.contentRange, "Content-Digest", digestHeader(tc.body)); got.status != http.StatusOK {
			t.Fatalf("%s: status %d: %s", tc.contentRange, got.status, got.body)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != tc.want {
			t.Fatalf("%s: the file has %q, %v", tc.contentRange, b, err)
		}
	}
	for name, got := range map[string]response{
		"no range":        put("x", "0-0"),
		"other unit":      put("x", "lines 0-0/*"),
		"backwards":       put("x", "bytes 5-4/*"),
		"outside":         put("x", "bytes 5-5/5"),
		"too large":       put("x", "bytes 1099511627776-1099511627776/*"),
		"too many digits": put("x", "bytes 99999999999999-99999999999999/*"),
		"other length":    put("xy", "bytes 0-0/*"),
		"unsatisfied":     put("x", "bytes */5"),
		"whole digest":    put("x", "bytes 0-0/*", "Repr-Digest", digestHeader("x")),
		"unknown length":  s.do("PUT", write, &pattern{left: 2}, "Content-Range", "bytes 0-0/*"),
	} {
		s.checkProblem(problem.RequestInvalid, name, got)
	}
	s.checkProblem(problem.FileConflict, "condition", put("x", "bytes 0-0/*", "If-Match", `"x"`))
	s.checkProblem(problem.DigestMismatch, "digest", put("x", "bytes 0-0/*", "Content-Digest", digestHeader("y")))
	if b, err := os.ReadFile(path); err != nil || string(b) != "Hello" {
		t.Errorf("the file has %q, %v", b, err)
	}
	signed := s.sign(map[string]any{"path": path, "operation": "write", "max_bytes": 10}).URL
	s.checkProblem(problem.BodyTooLarge, "beyond the limit of a URL", s.use("PUT", signed, "x", "Content-Range", "bytes 10-10/*"))
	if got := s.use("PUT", signed, "x", "Content-Range", "bytes 9-9/*"); got.status != http.StatusOK {
		t.Errorf("within the limit of a URL: status %d: %s", got.status, got.body)
	}
}

func TestOneOfConcurrentConditionalWritesWins(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	path := filepath.Join(t.TempDir(), "file")
	write := "/sandbox/box/files/write?" + at(path)
	condition := []string{"If-None-Match", "*"}
	for round := range 10 {
		var wins atomic.Int32
		var tag atomic.Value
		var writers sync.WaitGroup
		for i := range 8 {
			writers.Go(func() {
				switch got := s.do("PUT", write, strings.NewReader(fmt.Sprint(round, i)), condition...); got.status {
				case http.StatusOK:
					wins.Add(1)
					tag.Store(got.header.Get("ETag"))
				case http.StatusPreconditionFailed:
				default:
					t.Errorf("status %d: %s", got.status, got.body)
				}
			})
		}
		writers.Wait()
		if wins.Load() != 1 {
			t.Fatalf("round %d: %d writers won", round, wins.Load())
		}
		condition = []string{"If-Match", tag.Load().(string)}
	}
}
