package node

import (
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"testing"
)

func TestPermissionsOfEarlierVersionsAreRestricted(t *testing.T) {
	home := filepath.Join(t.TempDir(), "home")
	outside := filepath.Join(t.TempDir(), "outside")
	modes := map[string]fs.FileMode{
		".": 0o711, "run": 0o755, "store": 0o755, "token": 0o644, "node.log": 0o644,
		"node-2026-11-22T10-00-00.000-size.log.gz": 0o640, "bin": 0o755, "Caddyfile": 0o644,
	}
	for name, mode := range modes {
		path := filepath.Join(home, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		make := func() error { return os.WriteFile(path, nil, mode) }
		if mode&0o100 != 0 {
			make = func() error { return os.MkdirAll(path, mode) }
		}
		if err := make(); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(outside, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, filepath.Join(home, "node.err")); err != nil {
		t.Fatal(err)
	}
	restrict(home, slog.New(slog.NewTextHandler(t.Output(), nil)))
	got := map[string]fs.FileMode{}
	for name := range modes {
		got[name] = modeOf(t, filepath.Join(home, name))
	}
	want := map[string]fs.FileMode{
		".": 0o700, "run": 0o700, "store": 0o700, "token": 0o600, "node.log": 0o600,
		"node-2026-11-22T10-00-00.000-size.log.gz": 0o600, "bin": 0o755, "Caddyfile": 0o644,
	}
	if !maps.Equal(got, want) {
		t.Errorf("modes are %v, want %v", got, want)
	}
	if mode := modeOf(t, outside); mode != 0o644 {
		t.Errorf("the file behind a symbolic link has %#o", mode)
	}
}

func modeOf(t *testing.T, path string) fs.FileMode {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Mode().Perm()
}
