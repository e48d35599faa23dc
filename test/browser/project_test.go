//go:build integration

package browser_test

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// modules returns a folder with the node_modules of the project, as npm installs
// them here. They are kept outside of the tree, in $DOZE_CACHE or ~/.cache/doze,
// under a name that the lock file decides.
func modules(t *testing.T) string {
	t.Helper()
	lock, err := os.ReadFile("project/package-lock.json")
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(lock)
	cache := os.Getenv("DOZE_CACHE")
	if cache == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			t.Fatal(err)
		}
		cache = filepath.Join(home, ".cache", "doze")
	}
	dir := filepath.Join(cache, "npm-"+hex.EncodeToString(sum[:8]))
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		t.Fatal(err)
	}
	fresh, err := os.MkdirTemp(cache, "npm-new-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(fresh)
	for _, name := range []string{"package.json", "package-lock.json"} {
		text, err := os.ReadFile(filepath.Join("project", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(fresh, name), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	npm := exec.CommandContext(ctx, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier")
	npm.Dir = fresh
	npm.Env = append(os.Environ(), "npm_config_cache="+filepath.Join(cache, "npm"))
	if out, err := npm.CombinedOutput(); err != nil {
		t.Fatalf("npm ci: %v: %s", err, out)
	}
	if err := os.Rename(fresh, dir); err != nil && !errors.Is(err, fs.ErrExist) {
		t.Fatal(err)
	}
	return dir
}

// pack returns folders as one tar stream, each with its symbolic links. What is
// in a later one replaces what is in an earlier one.
func pack(folders ...string) io.Reader {
	r, w := io.Pipe()
	go func() { // ends with the stream
		archive := tar.NewWriter(w)
		for _, folder := range folders {
			if err := archive.AddFS(os.DirFS(folder)); err != nil {
				w.CloseWithError(err)
				return
			}
		}
		w.CloseWithError(archive.Close())
	}()
	return r
}
