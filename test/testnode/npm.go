package testnode

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// Modules returns a folder with the node_modules of the package in the folder
// project, as npm installs them here. They are kept outside of the tree, in $DOZE_CACHE or ~/.cache/doze,
// under a name that the lock file decides.
func Modules(t testing.TB, project string) string {
	t.Helper()
	lockFile := "package-lock.json"
	lock, err := os.ReadFile(filepath.Join(project, lockFile))
	if errors.Is(err, fs.ErrNotExist) {
		lockFile = "npm-shrinkwrap.json" // as published packages name it
		lock, err = os.ReadFile(filepath.Join(project, lockFile))
	}
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
	for _, name := range []string{"package.json", lockFile} {
		text, err := os.ReadFile(filepath.Join(project, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(fresh, name), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	// Not ci, which insists on what a lock file has for other platforms only.
	npm := exec.CommandContext(ctx, "npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier")
	npm.Dir = fresh
	npm.Env = append(os.Environ(), "npm_config_cache="+filepath.Join(cache, "npm"))
	if out, err := npm.CombinedOutput(); err != nil {
		t.Fatalf("npm install: %v: %s", err, out)
	}
	if err := os.Rename(fresh, dir); err != nil && !errors.Is(err, fs.ErrExist) {
		t.Fatal(err)
	}
	return dir
}
