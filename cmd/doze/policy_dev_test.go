package main

import (
	"bufio"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

// devRig is a command line and a node, in a folder with a new policy.
func devRig(t *testing.T, name string) *rig {
	t.Helper()
	r := newRig(t)
	t.Chdir(t.TempDir())
	t.Setenv("GOFLAGS", "")
	r.ok("policy", "new", name, "--template", "readonly")
	return r
}

// pushed is the digest of a policy on the node, or empty.
func (r *rig) pushed(name string) string {
	r.t.Helper()
	list := decodeJSON[struct{ Policies []types.Policy }](r.t, r.ok("policy", "ls", "--json"))
	for _, p := range list.Policies {
		if p.Name == name {
			return p.Digest
		}
	}
	return ""
}

func replaceIn(t *testing.T, file, old, new string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), old) {
		t.Fatalf("%q is not in %s", old, file)
	}
	writeWhole(t, file, strings.Replace(string(text), old, new, 1))
}

// writeWhole writes a file in one step, as editors do, so that it is one change.
func writeWhole(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file+".tmp", []byte(text), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(file+".tmp", file); err != nil {
		t.Fatal(err)
	}
}

// steps are the lines of a round.
func steps(t *testing.T, out string) (all []devStep) {
	t.Helper()
	for line := range strings.Lines(out) {
		all = append(all, decodeJSON[devStep](t, line))
	}
	return all
}

func TestPolicyDevBuildsTestsAndPushes(t *testing.T) {
	r := devRig(t, "mine")
	out := r.ok("policy", "dev", "mine", "--once")
	for i, want := range []string{"build   mine.wasm, ", "test    2 of 2 tests passed  ", "push    mine, sha256:"} {
		if lines := strings.Split(out, "\n"); len(lines) != 4 || !strings.HasPrefix(lines[i], want) || !strings.HasSuffix(lines[i], "s") {
			t.Errorf("line %d is not %q… with a time:\n%s", i+1, want, out)
		}
	}
	first := r.pushed("mine")
	if first == "" {
		t.Fatal("it was not pushed")
	}

	// A policy that fails its tests or does not build is not pushed.
	main := filepath.Join("mine", "main.go")
	original, err := os.ReadFile(main)
	if err != nil {
		t.Fatal(err)
	}
	replaceIn(t, main, "func main() {", "func init() { println(1) }\n\nfunc main() {")
	replaceIn(t, "mine/tests.json", `"verdict": "`, `"verdict": "error", "notes": ["none"], "reason": "`)
	got := r.doze("policy", "dev", "mine", "--once", "--json")
	if all := steps(t, got.out); got.code != exitFailed || len(all) != 2 || all[1].Step != "test" || all[1].OK || !strings.Contains(all[1].Output, "want error") {
		t.Errorf("exit code %d, %s", got.code, got.out)
	}
	if err := os.WriteFile(main, append(original, "var _ = missing\n"...), 0o666); err != nil {
		t.Fatal(err)
	}
	got = r.doze("policy", "dev", "mine", "--once")
	if got.code != exitFailed || !strings.HasPrefix(got.out, "build   failed  ") || !strings.Contains(got.out, "undefined: missing") || strings.Contains(got.out, "test ") {
		t.Errorf("exit code %d, %s", got.code, got.out)
	}
	if now := r.pushed("mine"); now != first {
		t.Errorf("the node has %s, not %s", now, first)
	}
	if err := os.Remove("mine/tests.json"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(main, original, 0o666); err != nil {
		t.Fatal(err)
	}

	// A push that fails is a failure, and without a node the rest works.
	r.env["DOZE_TOKEN"] = "wrong"
	got = r.doze("policy", "dev", "mine", "--once", "--name", "other")
	if got.code != exitFailed || !strings.Contains(got.out, "push    failed  ") || !strings.Contains(got.out, "unauthorized: ") {
		t.Errorf("exit code %d, %s%s", got.code, got.out, got.err)
	}
	delete(r.env, "DOZE_TOKEN")
	if all := steps(t, r.ok("policy", "dev", "mine", "--once", "--no-push", "--json")); len(all) != 1 || all[0].Step != "build" || !all[0].OK {
		t.Errorf("got %+v", all)
	}
	r.refused("--no-push builds and tests without a node", "policy", "dev", "mine", "--once")
	if err := os.Rename("mine", "My policy"); err != nil {
		t.Fatal(err)
	}
	r.misused("give one of a-z, 0-9, - and _ with --name", "policy", "dev", "My policy", "--once")
}

func TestPolicyDevFollowsChanges(t *testing.T) {
	r := devRig(t, "mine")
	if err := os.Remove("mine/tests.json"); err != nil {
		t.Fatal(err)
	}
	dev := r.programWithin(10*testkit.Patience, "policy", "dev", "mine", "--json")
	lines := bufio.NewScanner(r.output(dev))
	next := func() (s devStep) {
		t.Helper()
		if !lines.Scan() {
			t.Fatalf("it has ended: %v", dev.Wait())
		}
		if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
			t.Fatalf("%v in %s", err, lines.Bytes())
		}
		return s
	}
	expect := func(steps ...string) {
		t.Helper()
		for _, want := range steps {
			name, failed := strings.CutSuffix(want, " failed")
			if got := next(); got.Step != name || got.OK == failed {
				t.Fatalf("got %+v, want %s", got, want)
			}
		}
	}
	// The change is what the test changed, and nothing that the build before it wrote.
	changed := func(name string) {
		t.Helper()
		if got := next(); got.Step != "change" || got.Message != name {
			t.Fatalf("got %+v, want the change of %s", got, name)
		}
	}
	expect("build", "push", "watch")
	first := r.pushed("mine")

	// A mistake ends nothing. Building writes into the folder, which is not a change.
	const function = "func main() {"
	replaceIn(t, "mine/main.go", function, "var _ = missing\n\n"+function)
	changed("main.go")
	expect("build failed")
	replaceIn(t, "mine/main.go", "var _ = missing\n\n", "func init() { println(1) }\n\n")
	changed("main.go")
	expect("build", "push")
	if now := r.pushed("mine"); now == first || now == "" {
		t.Errorf("the node has %q", now)
	}

	// New folders are followed.
	if err := os.Mkdir("mine/internal/extra", 0o777); err != nil {
		t.Fatal(err)
	}
	changed("internal/extra")
	expect("build", "push")
	writeWhole(t, "mine/internal/extra/extra.go", "package extra\n")
	changed("internal/extra/extra.go")
	expect("build", "push")

	if err := dev.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if lines.Scan() {
		t.Errorf("at the end it printed %s", lines.Bytes())
	}
	if err := dev.Wait(); err != nil {
		t.Errorf("Ctrl-C: %v", err)
	}
}
