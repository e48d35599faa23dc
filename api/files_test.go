package api

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
)

func at(path string) string { return "path=" + url.QueryEscape(path) }

func TestFileIsReadAsItWasWritten(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	dir := t.TempDir()
	for _, tc := range []struct{ name, content, kind string }{
		{"plain.txt", "hello", "text/plain; charset=utf-8"},
		{"empty", "", octetStream},
		{"new dir/ünï côde.json", `{"a":1}`, "application/json"},
		{"page.html", "<script>", "text/html; charset=utf-8"},
		{"binary.bin", "\x00\xff\xfe", octetStream},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(dir, tc.name)
			info := must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?mode=0640&"+at(path), strings.NewReader(tc.content))
			if info.Path != path || info.Size != int64(len(tc.content)) || info.Mode != "0640" || info.Type != "file" {
				t.Errorf("got %+v", info)
			}
			got := s.do("GET", "/sandbox/box/files/read?"+at(path), nil)
			if got.status != http.StatusOK || string(got.body) != tc.content {
				t.Fatalf("status %d: %q", got.status, got.body)
			}
			h := got.header
			if !strings.HasPrefix(h.Get("Content-Type"), strings.Split(tc.kind, ";")[0]) && tc.kind != octetStream || h.Get("X-Content-Type-Options") != "nosniff" ||
				!strings.Contains(h.Get("Content-Security-Policy"), "sandbox") || h.Get("ETag") == "" || h.Get("Last-Modified") == "" {
				t.Errorf("header is %v", h)
			}
			if head := s.do("HEAD", "/sandbox/box/files/read?"+at(path), nil); head.status != http.StatusOK || len(head.body) > 0 || head.header.Get("Content-Length") != itoa(len(tc.content)) {
				t.Errorf("HEAD: status %d, header %v", head.status, head.header)
			}
			if same := s.do("GET", "/sandbox/box/files/read?"+at(path), nil, "If-None-Match", h.Get("ETag")); same.status != http.StatusNotModified || len(same.body) > 0 {
				t.Errorf("with its ETag: status %d: %q", same.status, same.body)
			}
			if other := s.do("GET", "/sandbox/box/files/read?"+at(path), nil, "If-None-Match", `"other"`); other.status != http.StatusOK {
				t.Errorf("with another ETag: status %d", other.status)
			}
		})
	}
}

func TestRawBodyIsTheFileWhateverItsType(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	path := filepath.Join(t.TempDir(), "package.json")
	must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?"+at(path), `{"name":"x"}`, "Content-Type", "application/json")
	if b, _ := os.ReadFile(path); string(b) != `{"name":"x"}` {
		t.Errorf("the file is %q", b)
	}
}

func TestJSONFormWritesAFile(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	path := filepath.Join(t.TempDir(), "f")
	write := "/sandbox/box/files/write"
	must[types.File](s, http.StatusOK, "PUT", write, map[string]any{"path": path, "content": "héllo", "mode": "0600"})
	if b, _ := os.ReadFile(path); string(b) != "héllo" {
		t.Errorf("the file is %q", b)
	}
	must[types.File](s, http.StatusOK, "PUT", write, map[string]any{"path": path, "content": "/wA=", "encoding": "base64"})
	if b, _ := os.ReadFile(path); string(b) != "\xff\x00" {
		t.Errorf("the file is %q", b)
	}
	if info, _ := os.Stat(path); info.Mode().Perm() != 0o600 {
		t.Errorf("its mode is %s", info.Mode())
	}
	for body, code := range map[string]problem.Code{
		`{"path":"` + path + `"}`:                                   problem.RequestInvalid,
		`{"content":"x"}`:                                           problem.RequestInvalid,
		`{"path":"relative","content":"x"}`:                         problem.RequestInvalid,
		`{"path":"` + path + `","content":"x","encoding":"rot13"}`:  problem.RequestInvalid,
		`{"path":"` + path + `","content":"%","encoding":"base64"}`: problem.RequestInvalid,
		`{"path":"` + path + `","content":"x","mode":"rwx"}`:        problem.RequestInvalid,
		`{"path":"` + path + `","content":"x","mode":"7777"}`:       problem.RequestInvalid,
		`{"path":"` + path + `","contents":"x"}`:                    problem.RequestInvalid,
		`{"path":`:                                                  problem.JSONInvalid,
		``:                                                          problem.JSONInvalid,
		`[]`:                                                        problem.RequestInvalid,
		`{"path":"/f","content":"` + strings.Repeat("x", maxFileJSON) + `"}`: problem.BodyTooLarge,
	} {
		s.refused(code, "PUT", write, body)
	}
	s.refused(problem.RequestInvalid, "PUT", write, strings.NewReader("raw without a path"))
	if b, _ := os.ReadFile(path); string(b) != "\xff\x00" {
		t.Errorf("refusals made the file %q", b)
	}
}

func TestRangesAreServed(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	path := filepath.Join(t.TempDir(), "f")
	must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?"+at(path), strings.NewReader("0123456789"))
	read := "/sandbox/box/files/read?" + at(path)
	for ranges, want := range map[string]string{"bytes=0-3": "0123", "bytes=5-": "56789", "bytes=-2": "89"} {
		got := s.do("GET", read, nil, "Range", ranges)
		if got.status != http.StatusPartialContent || string(got.body) != want || !strings.HasSuffix(got.header.Get("Content-Range"), "/10") {
			t.Errorf("%s: status %d, header %v: %q", ranges, got.status, got.header, got.body)
		}
	}
	if got := s.do("GET", read, nil, "Range", "bytes=0-3", "If-Range", `"old"`); got.status != http.StatusOK || string(got.body) != "0123456789" {
		t.Errorf("If-Range: status %d: %q", got.status, got.body)
	}
	got := s.do("GET", read, nil, "Range", "bytes=20-30")
	s.checkProblem(problem.RangeNotSatisfiable, "range beyond the end", got)
	if got.header.Get("Content-Range") != "bytes */10" {
		t.Errorf("Content-Range is %q", got.header.Get("Content-Range"))
	}
}

// pattern is a body of any size that is nowhere in memory.
type pattern struct{ left, at int64 }

func (p *pattern) Read(b []byte) (int, error) {
	if p.left == 0 {
		return 0, io.EOF
	}
	n := int(min(int64(len(b)), p.left))
	for i := range b[:n] {
		b[i] = byte((p.at + int64(i)) * 31 >> 3)
	}
	p.left -= int64(n)
	p.at += int64(n)
	return n, nil
}

func TestLargeFileGoesThroughBothWays(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	const size = 64 << 20
	path := filepath.Join(t.TempDir(), "large")
	info := must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?"+at(path), io.Reader(&pattern{left: size}))
	if info.Size != size {
		t.Fatalf("written were %d bytes", info.Size)
	}
	resp, err := s.http.Client().Do(s.request(t.Context(), "GET", "/sandbox/box/files/read?"+at(path), nil))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, want := sha256.New(), sha256.New()
	if n, err := io.Copy(got, resp.Body); err != nil || n != size {
		t.Fatalf("read were %d bytes, %v", n, err)
	}
	io.Copy(want, &pattern{left: size})
	if !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
		t.Error("the bytes differ")
	}
}

func TestUploadThatBreaksOffChangesNothing(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?"+at(path), strings.NewReader("before"))
	for _, route := range []string{"files/write?" + at(path), "files/archive?" + at(dir)} {
		started := make(chan struct{})
		pr, pw := io.Pipe()
		go func() {
			pw.Write(make([]byte, 256<<10))
			close(started)
			pw.CloseWithError(errors.New("the client fell over"))
		}()
		resp, err := s.http.Client().Do(s.request(t.Context(), "PUT", "/sandbox/box/"+route, io.Reader(pr)))
		if err == nil {
			resp.Body.Close()
		}
		<-started
	}
	// API and guest may begin with an upload only after its client has gone. Once
	// they have ended, they have cleared up.
	s.http.Close()
	if _, err := s.node.Manager.Stop(t.Context(), sandboxID(id)); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(path); string(b) != "before" {
		t.Errorf("the file is %.20q, %v", b, err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("left over: %v, %v", entries, err)
	}
}

func TestClientThatLeavesADownloadLeaksNothing(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	path := filepath.Join(t.TempDir(), "large")
	must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?"+at(path), io.Reader(&pattern{left: 32 << 20}))
	for _, route := range []string{"files/read?" + at(path), "files/archive?" + at(filepath.Dir(path))} {
		ctx, cancel := context.WithCancel(t.Context())
		resp, err := s.http.Client().Do(s.request(ctx, "GET", "/sandbox/box/"+route, nil))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(resp.Body, make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
		cancel()
		resp.Body.Close()
		s.sleep(id)
	}
}

func TestDownloadThatBreaksIsNotTakenForWhole(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	dir := t.TempDir()
	path := filepath.Join(dir, "large")
	must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?"+at(path), io.Reader(&pattern{left: 64 << 20}))
	// A tar has no length, so only the end of the connection shows that it is incomplete.
	resp, err := s.http.Client().Do(s.request(t.Context(), "GET", "/sandbox/box/files/archive?"+at(dir), nil))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.ReadFull(resp.Body, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	s.node.Engine.Kill(t, sandboxID(id))
	if _, err := io.Copy(io.Discard, resp.Body); err == nil {
		t.Error("the client got a complete response")
	}
}

func TestDirectoriesAreMadeListedMovedAndDeleted(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	dir := t.TempDir()
	in := func(parts ...string) string { return filepath.Join(append([]string{dir}, parts...)...) }
	if d := must[types.File](s, http.StatusOK, "POST", "/sandbox/box/files/mkdir", map[string]any{"path": in("a/b"), "mode": "0700"}); d.Type != "directory" {
		t.Errorf("got %+v", d)
	}
	must[types.File](s, http.StatusOK, "POST", "/sandbox/box/files/mkdir", map[string]any{"path": in("a/b")})
	for _, name := range []string{"a/x", "a/.hidden", "a/b/y"} {
		must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?"+at(in(name)), strings.NewReader(name))
	}
	for query, want := range map[string][]string{
		"":                            {"b", "x"},
		"&hidden=true":                {".hidden", "b", "x"},
		"&recursive=true":             {"b", "x", "y"},
		"&recursive=true&hidden=true": {".hidden", "b", "x", "y"},
	} {
		list := must[types.FileList](s, http.StatusOK, "GET", "/sandbox/box/files?"+at(in("a"))+query, nil)
		var names []string
		for _, f := range list.Files {
			names = append(names, f.Name)
		}
		slices.Sort(names)
		if !slices.Equal(names, want) || list.Truncated {
			t.Errorf("%s: got %v", query, names)
		}
	}
	if f := must[types.File](s, http.StatusOK, "POST", "/sandbox/box/files/move", map[string]any{"from": in("a/x"), "to": in("c/z")}); f.Path != in("c/z") {
		t.Errorf("got %+v", f)
	}
	s.refused(problem.PathNotFound, "GET", "/sandbox/box/files/read?"+at(in("a/x")), nil)
	s.refused(problem.DirectoryNotEmpty, "DELETE", "/sandbox/box/files?"+at(in("a")), nil)
	must[struct{}](s, http.StatusNoContent, "DELETE", "/sandbox/box/files?recursive=true&"+at(in("a")), nil)
	must[struct{}](s, http.StatusNoContent, "DELETE", "/sandbox/box/files?"+at(in("c/z")), nil)
	if list := must[types.FileList](s, http.StatusOK, "GET", "/sandbox/box/files?"+at(in("c")), nil); list.Files == nil || len(list.Files) != 0 {
		t.Errorf("got %+v", list)
	}
}

func TestArchiveGoesInAndOut(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	dir := t.TempDir()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for name, content := range map[string]string{"app/index.js": "hello()", "app/lib/é.txt": "ü"} {
		if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))}); err != nil {
			t.Fatal(err)
		}
		io.WriteString(w, content)
	}
	w.Close()
	res := must[types.ArchiveResult](s, http.StatusOK, "PUT", "/sandbox/box/files/archive?"+at(dir+"/in"), io.Reader(&buf))
	if res.Files != 2 {
		t.Errorf("got %+v", res)
	}
	got := s.do("GET", "/sandbox/box/files/archive?"+at(dir+"/in"), nil)
	if got.status != http.StatusOK || got.header.Get("Content-Type") != tarType {
		t.Fatalf("status %d, header %v", got.status, got.header)
	}
	files := map[string]string{}
	for r := tar.NewReader(bytes.NewReader(got.body)); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			b, _ := io.ReadAll(r)
			files[strings.TrimPrefix(h.Name, "./")] = string(b)
		}
	}
	if len(files) != 2 || files["app/index.js"] != "hello()" || files["app/lib/é.txt"] != "ü" {
		t.Errorf("got %v", files)
	}

	buf.Reset()
	w = tar.NewWriter(&buf)
	w.WriteHeader(&tar.Header{Name: "../evil", Typeflag: tar.TypeReg, Size: 1})
	w.Write([]byte("x"))
	w.Close()
	s.refused(problem.ArchiveUnsafe, "PUT", "/sandbox/box/files/archive?"+at(dir+"/in"), io.Reader(&buf))
	if _, err := os.Stat(dir + "/evil"); err == nil {
		t.Error("it was unpacked")
	}
	s.refused(problem.RequestInvalid, "PUT", "/sandbox/box/files/archive?"+at(dir+"/in"), strings.NewReader(strings.Repeat("no tar at all ", 100)))
}

func TestBadFileRequestsAreRefused(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	dir := t.TempDir()
	file := filepath.Join(dir, "f")
	must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?"+at(file), strings.NewReader("x"))
	for _, tc := range []struct {
		code         problem.Code
		method, path string
		body         any
	}{
		{problem.PathNotFound, "GET", "/files/read?" + at(dir+"/none"), nil},
		{problem.PathIsDirectory, "GET", "/files/read?" + at(dir), nil},
		{problem.PathNotFound, "GET", "/files?" + at(dir+"/none"), nil},
		{problem.PathNotDirectory, "GET", "/files?" + at(file), nil},
		{problem.PathNotFound, "DELETE", "/files?" + at(dir+"/none"), nil},
		{problem.PathNotFound, "GET", "/files/archive?" + at(dir+"/none"), nil},
		{problem.PathIsDirectory, "PUT", "/files/write?" + at(dir), strings.NewReader("x")},
		{problem.PathNotDirectory, "PUT", "/files/write?" + at(file+"/below"), strings.NewReader("x")},
		{problem.PathNotFound, "POST", "/files/move", map[string]any{"from": dir + "/none", "to": dir + "/x"}},
		{problem.RequestInvalid, "POST", "/files/move", map[string]any{"from": dir}},
		{problem.RequestInvalid, "POST", "/files/move", map[string]any{"from": "x", "to": "/y"}},
		{problem.RequestInvalid, "POST", "/files/mkdir", map[string]any{"path": "x"}},
		{problem.RequestInvalid, "POST", "/files/mkdir", map[string]any{"path": "/x\x00y"}},
		{problem.RequestInvalid, "POST", "/files/mkdir", map[string]any{"path": "/" + strings.Repeat("ü", 2500)}},
		{problem.RequestInvalid, "GET", "/files", nil},
		{problem.RequestInvalid, "GET", "/files?path=", nil},
		{problem.RequestInvalid, "GET", "/files?path=relative", nil},
		{problem.RequestInvalid, "GET", "/files?path=/&recursive=maybe", nil},
		{problem.RequestInvalid, "GET", "/files?path=/&deep=true", nil},
		{problem.RequestInvalid, "GET", "/files/read", nil},
		{problem.RequestInvalid, "GET", "/files/read?path=%00", nil},
		{problem.RequestInvalid, "GET", "/files/archive", nil},
		{problem.RequestInvalid, "PUT", "/files/archive", nil},
		{problem.RequestInvalid, "PUT", "/files/write?mode=9&" + at(file), strings.NewReader("y")},
		{problem.RequestInvalid, "PUT", "/files/write?mode=04755&" + at(file), strings.NewReader("y")},
		{problem.RequestInvalid, "DELETE", "/files", nil},
	} {
		s.refused(tc.code, tc.method, "/sandbox/box"+tc.path, tc.body)
		if tc.code == problem.PathNotFound || tc.code == problem.RequestInvalid {
			continue
		}
		s.refused(problem.SandboxNotFound, tc.method, "/sandbox/absent"+tc.path, tc.body)
	}
	if b, _ := os.ReadFile(file); string(b) != "x" {
		t.Errorf("refusals made the file %q", b)
	}
	s.sleep(id)
	s.refused(problem.RequestInvalid, "GET", "/sandbox/box/files?path=relative", nil)
	if state := s.state(id); state != "asleep" {
		t.Errorf("a refusal woke it: %s", state)
	}
}

// A process in the sandbox that took the guest's place may send any type.
func TestUnknownTypesOfFilesAreOther(t *testing.T) {
	for name, want := range map[string]types.FileType{"symlink": types.FileTypeSymlink, "other": types.FileTypeOther, "socket": types.FileTypeOther, "": types.FileTypeOther} {
		if got := fileOf(guest.FileInfo{Name: "x", Type: name}).Type; got != want {
			t.Errorf("%q became %q, want %q", name, got, want)
		}
	}
}

// BenchmarkTransfer passes a file through the API over TLS and HTTP/2, as clients do.
func BenchmarkTransfer(b *testing.B) {
	const size = 256 << 20
	s := newServerHTTP2(b)
	s.create("box")
	path := "?" + at(filepath.Join(b.TempDir(), "file"))
	b.Run("Upload", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			resp, err := s.http.Client().Do(s.request(b.Context(), "PUT", "/sandbox/box/files/write"+path, io.LimitReader(zeroReader{}, size)))
			if err != nil || resp.StatusCode != http.StatusOK {
				b.Fatal(resp, err)
			}
			resp.Body.Close()
		}
	})
	b.Run("Download", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			resp, err := s.http.Client().Do(s.request(b.Context(), "GET", "/sandbox/box/files/read"+path, nil))
			if err != nil || resp.StatusCode != http.StatusOK {
				b.Fatal(resp, err)
			}
			if n, err := io.Copy(io.Discard, resp.Body); err != nil || n != size {
				b.Fatal(n, err)
			}
			resp.Body.Close()
		}
	})
}

type zeroReader struct{}

func (zeroReader) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}
