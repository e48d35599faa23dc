package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/testkit"
)

func TestLots(t *testing.T) {
	for path, want := range map[string]string{
		"runtime/sandbox/box.go": "runtime-sandbox", "runtime/store/badger.go": "runtime", "node/node.go": "runtime", "api/client/client.go": "api",
		"egress/egress.go": "egress", "egress/http/intercept/a.go": "egress-carry", "egress/policy/pool.go": "policy", "policies/bearer/main.go": "policy",
		"README.md": "docs", "docs/reference/api.md": "docs", "test/up/run": "tests", "Makefile": "shared", "quota/quota.go": "shared",
	} {
		if got := lot(path); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
}

func TestCompare(t *testing.T) {
	base := counts{"api": {"nobody": 2, "told": 3}, "cmd": {"nobody": 1}}
	for name, c := range map[string]struct {
		found counts
		over  []excess
		note  string
	}{
		"the same":          {counts{"api": {"nobody": 2, "told": 3}, "cmd": {"nobody": 1}}, nil, ""},
		"one more":          {counts{"api": {"nobody": 2, "told": 4}, "cmd": {"nobody": 1}}, []excess{{"api", "told", 3, 4}}, ""},
		"a new rule":        {counts{"api": {"nobody": 2, "told": 3, "who": 1}, "cmd": {"nobody": 1}}, []excess{{"api", "who", 0, 1}}, ""},
		"fewer":             {counts{"api": {"nobody": 1, "told": 1}, "cmd": {"nobody": 1}}, nil, "3 findings are gone"},
		"one moved":         {counts{"api": {"nobody": 1, "told": 3}, "cmd": {"nobody": 2}}, nil, "1 are in another"},
		"moved and another": {counts{"api": {"nobody": 1, "told": 3}, "cmd": {"nobody": 3}}, []excess{{"cmd", "nobody", 1, 3}}, "1 findings are gone"},
	} {
		t.Run(name, func(t *testing.T) {
			got := compare(base, c.found)
			testkit.Diff(t, "excess", got.Over, c.over)
			if notes := strings.Join(got.Notes, "\n"); c.note == "" && notes != "" || !strings.Contains(notes, c.note) {
				t.Errorf("notes %q, want %q", notes, c.note)
			} else if notes != "" && !strings.Contains(notes, "go run ./internal/prose -baseline") {
				t.Errorf("the note has no command: %q", notes)
			}
		})
	}
}

func TestBaselineIsReadAsWritten(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "baseline")
	if c, err := readBaseline(dir); err != nil || len(c) != 0 {
		t.Errorf("without a folder: %v, %v", c, err)
	}
	want := counts{"api": {"nobody": 2, "told": 3}, "cmd": {"nobody": 1}}
	for _, c := range []counts{{"api": {"who": 1}, "docs": {"told": 1}}, want} { // the second replaces the first
		if err := writeBaseline(dir, c); err != nil {
			t.Fatal(err)
		}
	}
	got, err := readBaseline(dir)
	if err != nil {
		t.Fatal(err)
	}
	testkit.Diff(t, "baseline", got, want)
	for _, bad := range []string{"nobody", "nobody x", "nobody 0", "unknown 1", "<<<<<<< HEAD"} {
		if err := os.WriteFile(filepath.Join(dir, "api.txt"), []byte(bad+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := readBaseline(dir); err == nil || !strings.Contains(err.Error(), "api.txt:1") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// repository makes a repository in a folder that becomes the current one.
func repository(t *testing.T, files map[string]string) {
	t.Helper()
	t.Chdir(t.TempDir())
	git(t, "init", "-q", ".")
	for name, text := range files {
		write(t, name, text)
	}
}

func git(t *testing.T, args ...string) {
	t.Helper()
	args = append([]string{"-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"}, args...)
	if out, err := exec.CommandContext(testkit.Context(t), "git", args...).CombinedOutput(); err != nil {
		t.Fatalf("git %q: %v\n%s", args, err, out)
	}
}

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestRunFailsBeyondTheBaselineOnly(t *testing.T) {
	repository(t, map[string]string{"api/a.go": "package api\n\n// It ends at once.\nvar x int\n"})
	want := func(what string, want, strict bool) {
		t.Helper()
		if ok, err := run(nil, false, strict, false); err != nil || ok != want {
			t.Errorf("%s: %v, %v", what, ok, err)
		}
	}
	want("without a baseline", false, false)
	if ok, err := run(nil, true, false, false); err != nil || !ok {
		t.Fatalf("write the baseline: %v, %v", ok, err)
	}
	want("with its baseline", true, true)
	write(t, "api/b.go", "package api\n\n// It begins at once.\nvar y int\n")
	want("one more", false, false)
	write(t, "api/a.go", "package api\n\n// It ends.\nvar x int\n")
	want("one less, one more", true, true)
	write(t, "api/b.go", "package api\n\n// It begins.\nvar y int\n")
	want("one less", true, false)
	want("one less, strictly", false, true)
	if ok, err := run([]string{"api"}, false, false, false); err != nil || !ok {
		t.Errorf("paths without findings: %v, %v", ok, err)
	}
	write(t, "cmd/c.go", "package cmd\n\n// It ends at once.\nvar x int\n")
	want("one in another lot", true, false)
	if ok, err := run([]string{"cmd/..."}, false, false, false); err != nil || ok {
		t.Errorf("a path with a finding: %v, %v", ok, err)
	}
}

func TestBranchDoesNotFailForFindingsOfMain(t *testing.T) {
	repository(t, map[string]string{"api/a.go": "package api\n\n// It ends at once.\nvar x int\n"})
	git(t, "checkout", "-q", "-b", "main")
	git(t, "add", "-A")
	git(t, "commit", "-qm", "one")
	want := func(what string, want, strict bool) {
		t.Helper()
		if ok, err := run(nil, false, strict, false); err != nil || ok != want {
			t.Errorf("%s: %v, %v", what, ok, err)
		}
	}
	want("on main", false, false)
	git(t, "checkout", "-q", "-b", "branch")
	want("on a branch", true, false)
	want("on a branch, strictly", false, true)
	write(t, "cmd/b.go", "package cmd\n\n// It begins at once.\nvar y int\n")
	want("on a branch with another", false, false)
}

func TestChangedLinesAreThoseSinceMainOrTheBaseline(t *testing.T) {
	repository(t, map[string]string{"a.go": "1\n2\n3\n4\n", "base/x.txt": "told 1\n"})
	git(t, "checkout", "-q", "-b", "main")
	branch := false
	want := func(what, want string) {
		t.Helper()
		got, onBranch := changedLines("base")
		if onBranch != branch {
			t.Errorf("%s: on a branch: %v", what, onBranch)
		}
		var lines []string
		for n := range 8 {
			if got.has("a.go", n) {
				lines = append(lines, fmt.Sprint(n))
			}
		}
		testkit.Diff(t, "changed lines "+what, strings.Join(lines, " "), want)
		if got.has("c.go", 1) {
			t.Errorf("%s: a file that does not exist has changed: %v", what, got)
		}
	}
	commit := func() {
		t.Helper()
		git(t, "add", "-A")
		git(t, "commit", "-qm", "one")
	}
	want("without a commit", "")
	commit()
	write(t, "a.go", "1\nnew\nnew\n2\n3\nchanged\n")
	want("not committed", "2 3 6")
	commit()
	want("committed on main after the baseline", "2 3 6")
	git(t, "checkout", "-q", "-b", "branch")
	branch = true
	want("of main, on a branch", "")
	write(t, "a.go", "1\nnew\nnew\n2\nbranch\nchanged\n")
	commit()
	want("committed on a branch", "5")
	write(t, "b.go", "untracked\n")
	if got, _ := changedLines("base"); !got.has("b.go", 7) {
		t.Errorf("an untracked file has not changed: %v", got)
	}
}
