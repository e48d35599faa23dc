package main

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
)

func TestSignedURLOfAFileNeedsNoToken(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	path := filepath.Join(t.TempDir(), "photo.jpg")
	send := func(method, address, body string) (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, address, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		got, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(got) + resp.Header.Get("Content-Disposition")
	}
	write := strings.TrimSpace(r.ok("files", "url", "--write", "--mode", "0600", "--max-bytes", "10", "--expires-in", "5m", "shop:"+path))
	if status, body := send("PUT", write, "more than ten bytes"); status != http.StatusRequestEntityTooLarge {
		t.Errorf("too large: status %d: %s", status, body)
	}
	if status, body := send("PUT", write, "pixels"); status != http.StatusOK {
		t.Errorf("PUT: status %d: %s", status, body)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file is %v, %v", info, err)
	}
	if status, body := send("GET", strings.TrimSpace(r.ok("files", "url", "shop:"+path)), ""); status != http.StatusOK || body != "pixelsattachment; filename=photo.jpg" {
		t.Errorf("GET: status %d: %s", status, body)
	}
	var signed types.SignedURL
	if err := json.Unmarshal([]byte(r.ok("--json", "files", "url", "--inline", "shop:"+path)), &signed); err != nil || signed.Method != "GET" || signed.ExpiresAt.IsZero() {
		t.Errorf("%+v, %v", signed, err)
	}
	if status, body := send("GET", signed.URL, ""); status != http.StatusOK || body != "pixelsinline; filename=photo.jpg" {
		t.Errorf("inline: status %d: %s", status, body)
	}
	if status, body := send("GET", signed.URL+"&path=/etc/passwd", ""); status != http.StatusForbidden {
		t.Errorf("changed: status %d: %s", status, body)
	}
	if relative := r.ok("files", "url", "shop:photo.jpg"); !strings.Contains(relative, "path=%2F") {
		t.Errorf("a relative path: %s", relative)
	}
}

func TestWrongSignedURLsAreRefused(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	r.refusedWith(2, "does not name a sandbox", "files", "url", "./photo.jpg")
	r.refusedWith(2, "--write", "files", "url", "--mode", "0600", "shop:/f")
	r.refusedWith(2, "--inline", "files", "url", "--write", "--inline", "shop:/f")
	r.refused("168h", "files", "url", "--expires-in", "1000h", "shop:/f")
	r.refused("octal", "files", "url", "--write", "--mode", "rwx", "shop:/f")
	r.refused("sandbox_not_found", "files", "url", "none:/f")
}

func TestFileIsDescribed(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	dir := t.TempDir()
	tree{"app.js": "content", "link": "-> app.js"}.write(t, dir)
	for command, want := range map[string]string{
		"files stat shop:" + dir + "/app.js":          "path " + dir + "/app.js type file size 7 mode 0644",
		"files stat --digest shop:" + dir + "/app.js": "sha256 ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73",
		"files stat shop:" + dir + "/link":            "type symlink target app.js",
		"files stat --follow shop:" + dir + "/link":   "type file size 7",
	} {
		if got := strings.Join(strings.Fields(r.ok(strings.Fields(command)...)), " "); !strings.Contains(got, want) {
			t.Errorf("doze %s: %q lacks %q", command, got, want)
		}
	}
	var file types.File
	if err := json.Unmarshal([]byte(r.ok("--json", "files", "stat", "shop:"+dir+"/app.js")), &file); err != nil || file.ETag == "" || file.Size != 7 {
		t.Errorf("%+v, %v", file, err)
	}
	r.refused("path_not_found", "files", "stat", "shop:"+dir+"/none")
	r.refused("regular", "files", "stat", "--digest", "shop:"+dir)
}

func TestFilesAreFound(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	dir := t.TempDir()
	tree{"a.go": "package a\n\nfunc Get() {}\n", "sub/b.go": "func get() {}\n", "sub/c.txt": "get.\n", "node_modules/x.go": "func Get() {}", ".env": "get"}.write(t, dir)
	for command, want := range map[string]string{
		"files find --name *.go shop:" + dir:                        dir + "/a.go\n" + dir + "/sub/b.go\n",
		"files find --name *.go --exclude sub --hidden shop:" + dir: dir + "/a.go\n" + dir + "/node_modules/x.go\n",
		"files grep --name *.go shop:" + dir + " ^func.Get":         dir + "/a.go:3:func Get() {}\n",
		"files grep -i --name *.go shop:" + dir + "/sub FUNC.Get":   dir + "/sub/b.go:1:func get() {}\n",
		"files grep -F shop:" + dir + " get.":                       dir + "/sub/c.txt:1:get.\n",
		"files grep shop:" + dir + " nothing":                       "",
	} {
		if got := r.ok(strings.Fields(command)...); got != want {
			t.Errorf("doze %s: %q, want %q", command, got, want)
		}
	}
	if got := r.doze("files", "find", "--limit", "1", "shop:"+dir); got.code != 0 || !strings.Contains(got.err, "more than 1 results") || strings.Count(got.out, "\n") != 1 {
		t.Errorf("got %+v", got)
	}
	var found types.FileSearch
	if err := json.Unmarshal([]byte(r.ok("--json", "files", "grep", "shop:"+dir, "Get")), &found); err != nil || len(found.Matches) != 1 || found.Matches[0].Column != 6 {
		t.Errorf("%+v, %v", found, err)
	}
	r.refusedWith(2, "empty", "files", "grep", "shop:"+dir, "")
	r.refused("regular expression", "files", "grep", "shop:"+dir, "(")
	r.refused("*.go", "files", "find", "--name", "a/b", "shop:"+dir)
	r.refused("path_not_found", "files", "find", "shop:"+dir+"/none")
}
