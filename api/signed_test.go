package api

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/doze-run/doze/api/signedurl"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// sign makes a signed URL for a file of sandbox box.
func (s *server) sign(request map[string]any) types.SignedURL {
	s.t.Helper()
	signed := must[types.SignedURL](s, http.StatusOK, "POST", "/sandbox/box/files/url", request)
	if !strings.HasPrefix(signed.URL, s.http.URL+Prefix+"/sandbox/") {
		s.t.Fatalf("the URL is %s", signed.URL)
	}
	return signed
}

// use makes a request without a token to a signed URL.
func (s *server) use(method, address, body string, headers ...string) response {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	req := s.request(ctx, method, strings.TrimPrefix(address, s.http.URL+Prefix), strings.NewReader(body), append(headers, "Authorization", "")...)
	if body == "" {
		req.Body, req.ContentLength = nil, 0
		req.Header.Del("Content-Type")
	}
	return s.send(req)
}

func TestSignedURLReadsAndWritesOneFile(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	path := filepath.Join(t.TempDir(), "ünï côde.html")
	write := s.sign(map[string]any{"path": path, "operation": "write", "mode": "0640"})
	if until := time.Until(write.ExpiresAt); write.Method != "PUT" || until > signedurl.DefaultLifetime+time.Second || until < signedurl.DefaultLifetime-testkit.Patience {
		t.Errorf("got %+v", write)
	}
	if got := s.use("PUT", write.URL, "<h1>hello"); got.status != http.StatusOK || got.header.Get("Access-Control-Allow-Origin") != "*" {
		t.Fatalf("PUT: status %d, header %v: %s", got.status, got.header, got.body)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("the file is %v, %v", info, err)
	}
	read := s.sign(map[string]any{"path": path})
	for _, method := range []string{"GET", "HEAD"} {
		got := s.use(method, read.URL, "", "Origin", "https://shop.example.com")
		h := got.header
		if got.status != http.StatusOK || (string(got.body) != "<h1>hello") == (method == "GET") || read.Method != "GET" {
			t.Errorf("%s: status %d: %s", method, got.status, got.body)
		}
		for name, want := range map[string]string{
			"Content-Disposition": "attachment; filename*=utf-8''%C3%BCn%C3%AF%20c%C3%B4de.html", "Access-Control-Allow-Origin": "*", "Referrer-Policy": "no-referrer",
			"Content-Security-Policy": "default-src 'none'; sandbox", "Cross-Origin-Resource-Policy": "cross-origin", "Cache-Control": "private, no-cache", "Content-Length": "9",
		} {
			if h.Get(name) != want {
				t.Errorf("%s: %s is %q, not %q", method, name, h.Get(name), want)
			}
		}
		if !strings.Contains(h.Get("Access-Control-Expose-Headers"), "ETag") || h.Get("Access-Control-Allow-Credentials") != "" {
			t.Errorf("%s: header %v", method, h)
		}
	}
	if got := s.use("GET", read.URL, "", "Range", "bytes=4-"); got.status != http.StatusPartialContent || string(got.body) != "hello" {
		t.Errorf("a range: status %d: %s", got.status, got.body)
	}
	inline := s.sign(map[string]any{"path": path, "disposition": "inline"})
	if got := s.use("GET", inline.URL, ""); !strings.HasPrefix(got.header.Get("Content-Disposition"), "inline;") {
		t.Errorf("inline: header %v", got.header)
	}
	if got := s.do("GET", "/sandbox/box/files/read?"+at(path), nil); got.header.Get("Content-Disposition") != "" || got.header.Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("with a token: header %v", got.header)
	}
}

func TestSignedURLPermitsNothingElse(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	other := s.create("other")
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	if err := os.WriteFile(path, []byte("content"), 0o644); err != nil {
		t.Fatal(err)
	}
	read := s.sign(map[string]any{"path": path}).URL
	write := s.sign(map[string]any{"path": path, "operation": "write", "max_bytes": 5}).URL
	replace := func(address, old, new string) string {
		t.Helper()
		if !strings.Contains(address, old) {
			t.Fatalf("%s has no %s", address, old)
		}
		return strings.Replace(address, old, new, 1)
	}
	for name, tc := range map[string]struct {
		code            problem.Code
		method, address string
	}{
		"other path":             {problem.SignatureInvalid, "GET", replace(read, "file&", "file2&")},
		"second path":            {problem.SignatureInvalid, "GET", read + "&path=/etc/passwd"},
		"other method":           {problem.SignatureInvalid, "PUT", replace(read, "/files/read", "/files/write")},
		"read by a URL to write": {problem.SignatureInvalid, "GET", replace(write, "/files/write", "/files/read")},
		"no limit":               {problem.SignatureInvalid, "PUT", replace(write, "max_bytes=5&", "")},
		"higher limit":           {problem.SignatureInvalid, "PUT", replace(write, "max_bytes=5&", "max_bytes=50&")},
		"display":                {problem.SignatureInvalid, "GET", replace(read, "attachment", "inline")},
		"later":                  {problem.SignatureInvalid, "GET", replace(read, "expires=1", "expires=2")},
		"other signature":        {problem.SignatureInvalid, "GET", replace(read, "signature=", "signature=A")},
		"other sandbox":          {problem.SignatureInvalid, "GET", replace(read, id, other)},
		"sandbox by name":        {problem.SandboxNotFound, "GET", replace(read, id, "box")},
		"escaped id":             {problem.SandboxNotFound, "GET", replace(read, id, fmt.Sprintf("%%%02x", id[0])+id[1:])},
		"other route":            {problem.Unauthorized, "GET", replace(read, "/files/read", "/files")},
		"other method of none":   {problem.Unauthorized, "DELETE", read},
		"delete":                 {problem.Unauthorized, "DELETE", replace(read, "/files/read", "/files")},
		"node":                   {problem.Unauthorized, "GET", s.http.URL + Prefix + "/node?" + read[strings.Index(read, "?")+1:]},
	} {
		got := s.use(tc.method, tc.address, "")
		s.checkProblem(tc.code, name, got)
		if got.header.Get("Access-Control-Allow-Origin") != "*" {
			t.Errorf("%s: header %v", name, got.header)
		}
		if strings.Contains(string(got.body), "signature=") {
			t.Errorf("%s repeats the signature: %s", name, got.body)
		}
	}
	s.checkProblem(problem.BodyTooLarge, "too large", s.use("PUT", write, "123456"))
	if b, err := os.ReadFile(path); err != nil || string(b) != "content" {
		t.Errorf("the file is %q, %v", b, err)
	}
	if got := s.use("PUT", write, "12345"); got.status != http.StatusOK {
		t.Errorf("as large as permitted: status %d: %s", got.status, got.body)
	}
	// A sandbox whose name is the id of the first.
	s.sleep(id)
	must[types.Sandbox](s, http.StatusOK, "PATCH", "/sandbox/"+other, map[string]any{"name": id})
	if got := s.use("GET", read, ""); got.status != http.StatusOK || s.state(id) != sandbox.StateRunning {
		t.Errorf("status %d, and the sandbox is %s", got.status, s.state(id))
	}
}

func TestSignedURLWithoutALengthIsLimitedToo(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	path := filepath.Join(t.TempDir(), "file")
	write := s.sign(map[string]any{"path": path, "operation": "write", "max_bytes": 1 << 20}).URL
	req := s.request(t.Context(), "PUT", strings.TrimPrefix(write, s.http.URL+Prefix), &pattern{left: 1<<20 + 1}, "Authorization", "")
	s.checkProblem(problem.BodyTooLarge, "too large", s.send(req))
	if _, err := os.Stat(path); err == nil {
		t.Error("the file exists")
	}
}

func TestOnlyUsingASignedURLWakesTheSandbox(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	path := filepath.Join(t.TempDir(), "file")
	must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?"+at(path), strings.NewReader("content"))
	s.sleep(id)
	read := s.sign(map[string]any{"path": path}).URL
	s.checkProblem(problem.SignatureInvalid, "changed", s.use("GET", read+"&x=y", ""))
	if got := s.preflight(read); got.status != http.StatusNoContent {
		t.Errorf("preflight: status %d", got.status)
	}
	if state := s.state(id); state != sandbox.StateAsleep {
		t.Fatalf("the sandbox is %s", state)
	}
	if got := s.use("GET", read, ""); got.status != http.StatusOK || string(got.body) != "content" {
		t.Errorf("status %d: %s", got.status, got.body)
	}
	if got := s.do("DELETE", "/sandbox/box", nil); got.status != http.StatusNoContent {
		t.Fatalf("status %d", got.status)
	}
	s.checkProblem(problem.SandboxNotFound, "destroyed", s.use("GET", read, ""))
}

func (s *server) preflight(address string) response {
	s.t.Helper()
	req := s.request(s.t.Context(), "OPTIONS", strings.TrimPrefix(address, s.http.URL+Prefix), nil, "Authorization", "", "Origin", "https://shop.example.com", "Access-Control-Request-Method", "PUT")
	resp, err := s.http.Client().Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	resp.Body.Close()
	return response{resp.StatusCode, resp.Header, nil}
}

func TestPreflightIsForSignedURLsOnly(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	got := s.preflight(s.sign(map[string]any{"path": "/f", "operation": "write"}).URL)
	h := got.header
	if got.status != http.StatusNoContent || h.Get("Access-Control-Allow-Origin") != "*" || !strings.Contains(h.Get("Access-Control-Allow-Methods"), "PUT") ||
		!strings.Contains(h.Get("Access-Control-Allow-Headers"), "Content-Type") || strings.Contains(h.Get("Access-Control-Allow-Headers"), "Authorization") || h.Get("Access-Control-Allow-Credentials") != "" {
		t.Errorf("status %d, header %v", got.status, h)
	}
	got = s.preflight(s.http.URL + Prefix + "/sandbox/box/files/read?path=/f")
	if got.status != http.StatusUnauthorized || got.header.Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("without a signature: status %d, header %v", got.status, got.header)
	}
}

func TestSignedURLExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI(t, Config{})
		sb := sandbox.Sandbox{ID: "k3f9x2m7q2az", Owner: testOwner}
		query := url.Values{}
		permission := signedurl.Permission{Purpose: "read-file", Method: "GET", Sandbox: string(sb.ID), Owner: sb.Owner}
		signed, _, err := a.cfg.Signer.Sign(permission, query, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		if p := a.checkSignature(permission, signed); p != nil {
			t.Errorf("before: %v", p)
		}
		time.Sleep(time.Minute)
		if p := a.checkSignature(permission, signed); p == nil || p.Code != problem.SignatureExpired {
			t.Errorf("then: %v", p)
		}
	})
}

func TestInvalidSignedURLsAreNotMade(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	for name, tc := range map[string]struct {
		body map[string]any
		says string
	}{
		"relative":      {map[string]any{"path": "f"}, "absolute"},
		"NUL":           {map[string]any{"path": "/f\x00"}, "NUL"},
		"too long":      {map[string]any{"path": "/f", "expires_in": "169h"}, "168h"},
		"no time":       {map[string]any{"path": "/f", "expires_in": "0s"}, "1s"},
		"negative":      {map[string]any{"path": "/f", "expires_in": "-1s"}, "duration"},
		"delete":        {map[string]any{"path": "/f", "operation": "delete"}, "read"},
		"mode to read":  {map[string]any{"path": "/f", "mode": "0644"}, "write"},
		"limit to read": {map[string]any{"path": "/f", "max_bytes": 1}, "write"},
		"no limit":      {map[string]any{"path": "/f", "operation": "write", "max_bytes": 0}, "max_bytes"},
		"inline write":  {map[string]any{"path": "/f", "operation": "write", "disposition": "inline"}, "read"},
		"bad mode":      {map[string]any{"path": "/f", "operation": "write", "mode": "rwx"}, "octal"},
	} {
		p := s.refused(problem.RequestInvalid, "POST", "/sandbox/box/files/url", tc.body)
		if !strings.Contains(p.Detail, tc.says) {
			t.Errorf("%s: %s", name, p.Detail)
		}
	}
	s.refused(problem.SandboxNotFound, "POST", "/sandbox/none/files/url", map[string]any{"path": "/f"})
}

func TestSignatureIsNeverLogged(t *testing.T) {
	var log bytes.Buffer
	node := newServer(t, Limits{})
	node.create("box")
	a := newAPI(t, Config{Sandboxes: node.node.Manager, Log: slog.New(slog.NewTextHandler(&log, nil))})
	s := &server{t: t, node: node.node, api: a, http: httptest.NewServer(a)}
	t.Cleanup(s.http.Close)
	read := s.sign(map[string]any{"path": "/none"}).URL
	s.checkProblem(problem.PathNotFound, "missing file", s.use("GET", read, ""))
	s.checkProblem(problem.SignatureInvalid, "changed", s.use("GET", read+"&x=y", ""))
	_, signature, _ := strings.Cut(read, "signature=")
	if strings.Contains(log.String(), signature) || strings.Contains(log.String(), "signature=") || !strings.Contains(log.String(), "/files/read") {
		t.Errorf("the log is %s", &log)
	}
}
