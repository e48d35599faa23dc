package api

import (
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
)

func TestFilesAreSearched(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	dir := t.TempDir()
	for name, content := range map[string]string{"a.go": "func main() {}\n", "b.txt": "Main (1)\n", ".hidden": "main\n", "node_modules/c.go": "main\n"} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	search := "/sandbox/box/files/search?" + at(dir)
	s.sleep(id)
	for query, want := range map[string]string{
		"&name=*.go":             "a.go",
		"&name=*.go&exclude=a.*": "node_modules/c.go",
		"&content=main":          "a.go:1:6",
		"&content=main&ignore_case=true&name=*.txt":         "b.txt:1:1",
		"&literal=true&content=" + url.QueryEscape("n (1)"): "b.txt:1:4",
		"&content=main&hidden=true&exclude=*.go":            ".hidden:1:1",
		"&name=none":                                        "",
	} {
		found := must[types.FileSearch](s, http.StatusOK, "GET", search+query, nil)
		var got []string
		for _, f := range found.Files {
			got = append(got, strings.TrimPrefix(f.Path, dir+"/"))
		}
		for _, m := range found.Matches {
			got = append(got, strings.TrimPrefix(m.Path, dir+"/")+":"+itoa(m.Line)+":"+itoa(m.Column))
		}
		if strings.Join(got, " ") != want || found.Stopped != "" {
			t.Errorf("%s: got %v, %s", query, got, found.Stopped)
		}
	}
	if found := must[types.FileSearch](s, http.StatusOK, "GET", search+"&max_results=1", nil); len(found.Files) != 1 || found.Stopped != types.SearchStopLimit {
		t.Errorf("limited: %+v", found)
	}
	for query, code := range map[string]problem.Code{
		"&name=a/b": problem.RequestInvalid, "&name=[": problem.RequestInvalid, "&name=!a": problem.RequestInvalid, "&name={a,b}": problem.RequestInvalid,
		"&content=(": problem.RequestInvalid, "&content=" + strings.Repeat("x%7B1000%7D", 100): problem.RequestInvalid, "&literal=true": problem.RequestInvalid, "&max_results=0": problem.RequestInvalid, "&max_results=1001": problem.RequestInvalid,
		"&content=" + strings.Repeat("x", 1001): problem.RequestInvalid,
	} {
		s.refused(code, "GET", search+query, nil)
	}
	s.refused(problem.PathNotFound, "GET", "/sandbox/box/files/search?content=x&path=/none", nil)
}
