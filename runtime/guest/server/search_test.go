package server_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/server"
	"github.com/doze-run/doze/testkit"
)

// searchTree makes a directory to search.
func searchTree(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	mustWrite(t, dir+"/a.go", "package a\n\nfunc Main() {}\r\n", 0o644)
	mustWrite(t, dir+"/sub/b.go", "// main and Main\nfunc main() {}", 0o644)
	mustWrite(t, dir+"/sub/c.txt", "main\n", 0o644)
	mustWrite(t, dir+"/.git/config", "main\n", 0o644)
	mustWrite(t, dir+"/.env", "main\n", 0o644)
	mustWrite(t, dir+"/node_modules/x/i.js", "main\n", 0o644)
	mustWrite(t, dir+"/binary", "\x00main\n", 0o644)
	mustWrite(t, dir+"/secret", "main\n", 0)
	mustWrite(t, dir+"/long", strings.Repeat("x", guest.MaxSearchLine+1)+"main\nmain\n", 0o644)
	mustWrite(t, dir+"/-rf", "é\xffmain\n", 0o644)
	if err := errors.Join(os.Symlink("..", dir+"/sub/loop"), os.Symlink("/etc/hostname", dir+"/sub/link"), syscall.Mkfifo(dir+"/pipe", 0o644)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func found(t *testing.T, dir string, r *guest.SearchResult) string {
	t.Helper()
	var all []string
	for _, f := range r.Files {
		rel, err := filepath.Rel(dir, f.Path)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, rel)
	}
	for _, m := range r.Matches {
		rel, err := filepath.Rel(dir, m.Path)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, fmt.Sprintf("%s:%d:%d", rel, m.Line, m.Column))
	}
	slices.Sort(all)
	return strings.Join(append(all, r.Stopped), " ")
}

func TestSearch(t *testing.T) {
	dir := searchTree(t)
	skip := []string{".git", "node_modules"}
	secret := " secret:1:1" // root reads everything
	if os.Geteuid() != 0 {
		secret = ""
	}
	for _, tt := range []struct {
		name, path string
		o          guest.SearchOptions
		want       string
	}{
		{"names", "", guest.SearchOptions{Name: "*.go", Exclude: skip}, "a.go sub/b.go "},
		{"directories too", "", guest.SearchOptions{Name: "sub", Exclude: skip}, "sub "},
		{"links are results, and not followed", "", guest.SearchOptions{Name: "l*", Exclude: skip}, "long sub/link sub/loop "},
		{"hidden", "", guest.SearchOptions{Name: "*n*i*", Hidden: true}, ".git/config "},
		{"class", "", guest.SearchOptions{Name: "[ab].??", Exclude: skip}, "a.go sub/b.go "},
		{"none", "", guest.SearchOptions{Name: "none"}, ""},
		{"limit", "", guest.SearchOptions{Name: "*.go", Limit: 1}, "a.go limit"},
		{"exactly the limit", "", guest.SearchOptions{Name: "*.go", Limit: 2}, "a.go sub/b.go "},
		{"content", "", guest.SearchOptions{Content: "main", Exclude: skip}, "-rf:1:4 long:2:1" + secret + " sub/b.go:1:4 sub/b.go:2:6 sub/c.txt:1:1 "},
		{"content in some", "", guest.SearchOptions{Content: "^func (?i)main", Name: "*.go"}, "a.go:3:1 sub/b.go:2:1 "},
		{"end of line", "", guest.SearchOptions{Content: `\{\}$`}, "a.go:3:13 sub/b.go:2:13 "},
		{"hidden content", "", guest.SearchOptions{Content: "^main$", Hidden: true, Exclude: []string{"*.txt", "long", "secret"}}, ".env:1:1 .git/config:1:1 node_modules/x/i.js:1:1 "},
		{"limit of lines", "/sub", guest.SearchOptions{Content: "main", Name: "b.go", Limit: 1}, "b.go:1:4 limit"},
		{"one file", "/sub/b.go", guest.SearchOptions{Content: "func"}, ".:2:1 "},
		{"a directory by a link", "/sub/loop", guest.SearchOptions{Name: "a.go"}, "a.go "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.o.Limit == 0 {
				tt.o.Limit = 100
			}
			r, err := start(t, withoutRipgrep).Search(t.Context(), dir+tt.path, tt.o)
			if err != nil {
				t.Fatal(err)
			}
			if got := found(t, dir+tt.path, r); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func withoutRipgrep(c *server.Config) { c.Env = []string{"PATH=/none"} }

func TestSearchRefusals(t *testing.T) {
	dir := searchTree(t)
	c := start(t, withoutRipgrep)
	for _, tt := range []struct {
		path string
		o    guest.SearchOptions
		code string
	}{
		{dir + "/none", guest.SearchOptions{Limit: 1}, guest.CodeNotFound},
		{dir + "/none", guest.SearchOptions{Content: "x", Limit: 1}, guest.CodeNotFound},
		{dir, guest.SearchOptions{}, guest.CodeInvalid},
		{dir, guest.SearchOptions{Limit: guest.MaxMatches + 1}, guest.CodeInvalid},
		{dir, guest.SearchOptions{Limit: 1, Name: "["}, guest.CodeInvalid},
		{dir, guest.SearchOptions{Limit: 1, Exclude: []string{"["}}, guest.CodeInvalid},
		{dir, guest.SearchOptions{Limit: 1, Content: "("}, guest.CodeInvalid},
	} {
		_, err := c.Search(t.Context(), tt.path, tt.o)
		wantCode(t, err, tt.code, "")
	}
}

// A listing of it would be truncated.
func TestSearchOfALargeDirectoryIsComplete(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "doze-test-") // in memory
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	matching := 0
	for i := range guest.MaxEntries + 3000 {
		name := fmt.Sprint(i)
		if i%200 == 0 {
			name, matching = name+".go", matching+1
		}
		if err := os.Symlink("x", dir+"/"+name); err != nil {
			t.Fatal(err)
		}
	}
	r, err := start(t, withoutRipgrep).Search(t.Context(), dir, guest.SearchOptions{Name: "*.go", Limit: guest.MaxMatches})
	if err != nil || len(r.Files) != matching || r.Stopped != "" {
		t.Errorf("%d of %d files, stopped by %q, %v", len(r.Files), matching, r.Stopped, err)
	}
}

func TestTextOfAMatchIsBounded(t *testing.T) {
	dir := t.TempDir()
	mustWrite(t, dir+"/f", strings.Repeat("é", 1000)+"needle"+strings.Repeat("é", 1000)+"\n", 0o644)
	r, err := start(t, withoutRipgrep).Search(t.Context(), dir, guest.SearchOptions{Content: "needle", Limit: 1})
	if err != nil || len(r.Matches) != 1 {
		t.Fatalf("%+v, %v", r, err)
	}
	if m := r.Matches[0]; m.Column != 2001 || len(m.Text) > guest.MaxMatchText+2 || !strings.Contains(m.Text, "needle") || !strings.HasPrefix(m.Text, "é") {
		t.Errorf("%+v", m)
	}
}

// fakeRipgrep makes a program rg that writes some output.
func fakeRipgrep(t *testing.T, script string) func(*server.Config) {
	t.Helper()
	bin := t.TempDir()
	mustWrite(t, bin+"/rg", "#!/bin/sh\necho() { printf '%s\\n' \"$1\"; }\n"+script, 0o755)
	return func(c *server.Config) { c.Env = []string{"PATH=" + bin + ":" + os.Getenv("PATH")} }
}

func TestRipgrepIsUsedIfPresent(t *testing.T) {
	dir := t.TempDir()
	mustWrite(t, dir+"/own.txt", "x\n", 0o644)
	match := func(path string) string {
		return fmt.Sprintf(`{"type":"match","data":{"path":{"text":"./%s"},"lines":{"text":"an x\n"},"line_number":7,"absolute_offset":0,"submatches":[{"match":{"text":"x"},"start":3,"end":4}]}}`, path)
	}
	for _, tt := range []struct{ name, script, want string }{
		{"one", "echo '{\"type\":\"begin\"}'; echo '" + match("a/b") + "'; echo '{\"type\":\"end\"}'", "a/b:7:4 "},
		{"none", "exit 1", ""},
		{"failed", "echo broken pattern >&2; exit 2", "own.txt:1:1 "},
		{"failed in part", "echo '" + match("a") + "'; exit 2", "a:7:4 "},
		{"limit", "while :; do echo '" + match("a") + "'; done", "a:7:4 a:7:4 a:7:4 limit"},
		{"not ripgrep", "echo hello", "own.txt:1:1 "},
		{"endless line", "echo '" + match("a") + "'; head -c 9000000 /dev/zero | tr '\\0' x; echo; echo '" + match("b") + "'", "a:7:4 b:7:4 "},
		{"bytes", `echo '{"type":"match","data":{"path":{"bytes":"Li//YQ=="},"lines":{"bytes":"eP8="},"line_number":1,"submatches":[{"start":99,"end":3}]}}'`, "\uFFFDa:1:3 "},
		{"nothing in it", `echo '{"type":"match","data":{}}'`, "own.txt:1:1 "},
		{"its arguments", `for a; do case $a in --glob|-e|--regexp|-rf) ;; "x y"|'$(id)') echo '` + match("quoted") + `';; esac; done`, "quoted:7:4 "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			content := "x"
			if tt.name == "its arguments" {
				content = "$(id)"
			}
			r, err := start(t, fakeRipgrep(t, tt.script)).Search(t.Context(), dir, guest.SearchOptions{Content: content, Limit: 3})
			if err != nil {
				t.Fatal(err)
			}
			if got := found(t, dir, r); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestSearchEndsWithItsClient(t *testing.T) {
	dir := t.TempDir()
	c := start(t, fakeRipgrep(t, "touch begun; exec sleep 1000"))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { // ended by cancel
		_, err := c.Search(ctx, dir, guest.SearchOptions{Content: "x", Limit: 1})
		ended <- err
	}()
	testkit.Eventually(t, "ripgrep runs", func() bool { _, err := os.Stat(dir + "/begun"); return err == nil })
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the search ended with %v", err)
	}
	testkit.Eventually(t, "ripgrep has ended", func() bool { return server.AliveIn(dir) == 0 })
}
