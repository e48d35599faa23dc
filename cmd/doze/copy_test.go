package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
)

// tree is a folder: names to contents. A name that ends in / is an empty folder,
// contents that begin with "-> " are a link.
type tree map[string]string

func (tr tree) write(t *testing.T, folder string) {
	t.Helper()
	for name, content := range tr {
		file := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		target, isLink := strings.CutPrefix(content, "-> ")
		switch {
		case strings.HasSuffix(name, "/"):
			err = os.MkdirAll(file, 0o755)
		case isLink:
			err = os.Symlink(target, file)
		default:
			err = os.WriteFile(file, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// check compares a folder with the tree.
func (tr tree) check(t *testing.T, folder string) {
	t.Helper()
	got := tree{}
	err := filepath.WalkDir(folder, func(file string, entry fs.DirEntry, err error) error {
		if err != nil || file == folder {
			return err
		}
		name, _ := filepath.Rel(folder, file)
		switch {
		case entry.IsDir():
			if entries, err := os.ReadDir(file); err != nil || len(entries) > 0 {
				return err
			}
			got[name+"/"] = ""
		case entry.Type()&fs.ModeSymlink != 0:
			target, err := os.Readlink(file)
			got[name] = "-> " + target
			return err
		default:
			content, err := os.ReadFile(file)
			got[name] = string(content)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(tr) {
		t.Errorf("%s has %v, want %v", folder, got, tr)
		return
	}
	for name, want := range tr {
		if got[name] != want {
			t.Errorf("%s: %s is %q, want %q", folder, name, got[name], want)
		}
	}
}

func TestRelativePathsBeginAtTheWorkingDirectory(t *testing.T) {
	workdir := "/workspace\n"
	written := make(chan string, 1)
	r := fakeNode(t, func(w http.ResponseWriter, req *http.Request) {
		switch path.Base(req.URL.Path) {
		case "exec":
			json.NewEncoder(w).Encode(types.ExecResult{Stdout: workdir})
		case "write":
			written <- req.URL.Query().Get("path")
			io.WriteString(w, "{}")
		default: // the type of a path: a folder, or none
			if req.URL.Query().Get("path") == "/workspace" {
				json.NewEncoder(w).Encode(types.File{Type: types.FileTypeDirectory})
				return
			}
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusNotFound)
			json.NewEncoder(w).Encode(problem.New(problem.PathNotFound, ""))
		}
	})
	here := t.TempDir()
	tree{"f": "x"}.write(t, here)
	for to, want := range map[string]string{"a:": "/workspace/f", "a:other": "/workspace/other", "a:./x/y": "/workspace/x/y", "a:/etc/x": "/etc/x"} {
		r.ok("cp", filepath.Join(here, "f"), to)
		if got := <-written; got != want {
			t.Errorf("cp f %s wrote %s, want %s", to, got, want)
		}
	}
	workdir = ""
	r.refused("give an absolute path, like a:/x", "cp", filepath.Join(here, "f"), "a:x")
}

func TestCopyFilesBothWays(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	here, there := t.TempDir(), t.TempDir() // the rig's sandboxes have this machine's files
	tree{"file": "content", "empty": ""}.write(t, here)
	if err := os.Chmod(filepath.Join(here, "file"), 0o750); err != nil {
		t.Fatal(err)
	}
	r.ok("cp", filepath.Join(here, "file"), "a:"+there)
	r.ok("cp", filepath.Join(here, "file"), "a:"+there+"/new/name")
	r.ok("cp", filepath.Join(here, "empty"), "a:"+there+"/empty")
	r.ok("cp", filepath.Join(here, "empty"), "a:"+there+"/empty") // over itself
	tree{"file": "content", "new/name": "content", "empty": ""}.check(t, there)
	if info, err := os.Stat(filepath.Join(there, "file")); err != nil || info.Mode().Perm() != 0o750 {
		t.Errorf("the mode became %v, %v", info.Mode(), err)
	}

	back := t.TempDir()
	r.ok("cp", "a:"+there+"/new/name", back)
	r.ok("cp", "a:"+there+"/new/name", filepath.Join(back, "other"))
	r.ok("cp", "a:"+there+"/empty", filepath.Join(back, "other2"))
	r.ok("cp", "a:"+there+"/file", filepath.Join(back, "name")) // replaces
	tree{"name": "content", "other": "content", "other2": ""}.check(t, back)
	if info, err := os.Stat(filepath.Join(back, "name")); err != nil || info.Mode().Perm() != 0o750 {
		t.Errorf("the mode came back as %v, %v", info.Mode(), err)
	}
}

func TestCopyFoldersBothWays(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	site := tree{"index.html": "<html>", "css/a.css": "a{}", "empty/": "", "link": "-> css/a.css", "deep/up": "-> ../index.html", ".hidden": "x"}
	here, there := t.TempDir(), t.TempDir()
	site.write(t, filepath.Join(here, "site"))

	r.ok("cp", filepath.Join(here, "site"), "a:"+there+"/made")
	site.check(t, filepath.Join(there, "made"))
	r.ok("cp", filepath.Join(here, "site"), "a:"+there) // into the folder
	site.check(t, filepath.Join(there, "site"))
	r.ok("cp", filepath.Join(here, "site")+"/.", "a:"+there+"/made") // only what is in it, over itself
	site.check(t, filepath.Join(there, "made"))

	back := t.TempDir()
	r.ok("cp", "a:"+there+"/site", back)
	site.check(t, filepath.Join(back, "site"))
	r.ok("cp", "a:"+there+"/site", filepath.Join(back, "other"))
	site.check(t, filepath.Join(back, "other"))
	r.ok("cp", "a:"+there+"/site/.", filepath.Join(back, "other"))
	site.check(t, filepath.Join(back, "other"))
}

func TestCopyStreams(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	there := t.TempDir()
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	w.WriteHeader(&tar.Header{Name: "x/y", Mode: 0o644, Size: 3})
	io.WriteString(w, "abc")
	w.Close()
	if got := r.dozeWith(archive.String(), "cp", "-", "a:"+there); got.code != 0 {
		t.Fatalf("got %+v", got)
	}
	tree{"x/y": "abc"}.check(t, there)
	in := tar.NewReader(strings.NewReader(r.ok("cp", "a:"+there+"/x", "-")))
	names := ""
	for {
		h, err := in.Next()
		if err != nil {
			break
		}
		names += h.Name + " "
	}
	if !strings.Contains(names, "y") {
		t.Errorf("the stream has %q", names)
	}
}

func TestCopySkipsLinksThatLeadOut(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	here, there := t.TempDir(), t.TempDir()
	tree{"file": "x", "passwd": "-> /etc/passwd", "up": "-> ../../secret"}.write(t, here)
	got := r.doze("cp", here+"/.", "a:"+there)
	if got.code != 0 || strings.Count(got.err, "skipped") != 2 {
		t.Errorf("got %+v", got)
	}
	tree{"file": "x"}.check(t, there)
}

func TestCopyRefusals(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	here, there := t.TempDir(), t.TempDir()
	tree{"file": "x", "folder/": ""}.write(t, here)
	tree{"file": "x"}.write(t, there)
	file, folder := filepath.Join(here, "file"), filepath.Join(here, "folder")
	r.misused("must be in a sandbox", "cp", file, folder)
	r.misused("must be in a sandbox", "cp", "a:/x", "b:/y")
	r.refused("no such file", "cp", filepath.Join(here, "missing"), "a:/")
	r.refused(there+"/missing does not exist", "cp", "a:"+there+"/missing", here)
	r.refused("is a file; a folder", "cp", folder, "a:"+there+"/file")
	r.refused("is a file; a folder", "cp", "a:"+there, file)
	r.refused("omit the trailing /", "cp", file, "a:"+there+"/none/")
	r.refused("omit the trailing /", "cp", "a:"+there+"/file", here+"/none/")
	r.refused("sandbox_not_found: ", "cp", file, "missing:/x")
	r.misused("cannot have both", "cp", "--json", "a:"+there, "-")
}

func TestBrokenDownloadLeavesNoFile(t *testing.T) {
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/read") {
			return
		}
		out := tar.NewWriter(w)
		out.WriteHeader(&tar.Header{Name: "f", Mode: 0o644, Size: 1 << 20})
		io.WriteString(out, "only the beginning")
		http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}))
	defer node.Close()
	r := &rig{t: t, env: map[string]string{"DOZE_API": node.URL, "DOZE_TOKEN": "x", "DOZE_HOME": t.TempDir()}}
	here := t.TempDir()
	tree{"f": "before"}.write(t, here)
	r.refused("", "cp", "a:/f", filepath.Join(here, "f"))
	tree{"f": "before"}.check(t, here)
}
