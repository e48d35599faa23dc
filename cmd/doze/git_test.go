package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
)

func TestGitCommands(t *testing.T) {
	folder := t.TempDir()
	git := func(args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), "git", args...).CombinedOutput(); err != nil {
			t.Fatalf("git %q: %v\n%s", args, err, out)
		}
	}
	origin, dir := filepath.Join(folder, "origin.git"), filepath.Join(folder, "shop")
	git("init", "-q", "--bare", "-b", "main", origin)
	r := newRig(t)
	r.ok("create", "shop")
	if out := r.ok("git", "clone", "shop", "file://"+origin, dir); !strings.Contains(out, dir+"  main, no commit yet") {
		t.Errorf("clone printed %q", out)
	}
	if err := os.WriteFile(filepath.Join(dir, "app.js"), []byte("one\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out := r.ok("git", "status", "shop", dir); !regexp.MustCompile(`^main, no commit yet.*\n  untracked +app\.js\n$`).MatchString(out) {
		t.Errorf("status printed %q", out)
	}
	commit := r.ok("git", "commit", "shop", dir, "app.js", "-m", "Add the cart", "--name", "Shop agent", "--email", "agent@example.com")
	if !regexp.MustCompile(`  main, [0-9a-f]{12}\n$`).MatchString(commit) {
		t.Errorf("commit printed %q", commit)
	}
	if out := r.ok("git", "push", "shop", dir, "-u"); !regexp.MustCompile(`^origin +refs/heads/main +created`).MatchString(out) {
		t.Errorf("push printed %q", out)
	}
	if out := r.ok("git", "pull", "shop", dir); out != commit {
		t.Errorf("pull printed %q", out)
	}
	if out := r.ok("git", "log", "shop", dir); !regexp.MustCompile(`(?m)^[0-9a-f]{12} .*Shop agent +Add the cart$`).MatchString(out) {
		t.Errorf("log printed %q", out)
	}
	if out := r.ok("git", "checkout", "--create", "shop", dir, "cart", "main"); !strings.Contains(out, "  cart, ") {
		t.Errorf("checkout printed %q", out)
	}
	if out := r.ok("git", "branches", "shop", dir); !regexp.MustCompile(`(?m)^cart .*yes$`).MatchString(out) || !strings.Contains(out, "origin/main") {
		t.Errorf("branches printed %q", out)
	}
	if err := os.WriteFile(filepath.Join(dir, "app.js"), []byte("\x1b[31mtwo\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out := r.ok("git", "diff", "shop", dir, "app.js"); !strings.Contains(out, "\n-one\n+\x1b[31mtwo\n") {
		t.Errorf("diff printed %q", out) // raw, because it is not a terminal
	}
	status := decodeJSON[types.GitStatus](t, r.ok("git", "status", "shop", dir, "--json"))
	if status.Branch != "cart" || len(status.Files) != 1 || status.Files[0].Worktree != types.GitChangeModified {
		t.Errorf("got %+v", status)
	}
	r.misused("URL is missing", "git", "clone", "shop")
	r.misused("exclude each other", "git", "clone", "--branch", "a", "--tag", "b", "shop", "file://"+origin)
	r.misused("message", "git", "commit", "shop", dir)
	r.misused("--email", "git", "commit", "shop", dir, "-m", "x", "--name", "a")
	r.misused("add --create", "git", "checkout", "shop", dir, "a", "b")
	r.refused("policy basic", "git", "clone", "shop", "https://user:password@example.com/shop.git")
}

func TestGitProgressLine(t *testing.T) {
	for want, p := range map[string]types.GitProgress{
		"receiving objects: 45% (450/1000), 1.2 MiB": {Phase: types.GitPhaseReceiving, Done: 450, Total: 1000, Bytes: 1258291},
		"lib: enumerating objects: 5":                {Phase: types.GitPhaseEnumerating, Done: 5, Submodule: "lib"},
	} {
		if got := gitProgress(p); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
