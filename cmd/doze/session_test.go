package main

import (
	"regexp"
	"strings"
	"testing"

	"github.com/doze-run/doze/testkit/testterm"
)

func TestSessionsKeepTheirState(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	if out := r.ok("session", "create", "a", "dev", "--cwd", "/usr", "-e", "A=1"); out != "dev\n" {
		t.Errorf("created %q", out)
	}
	r.ok("exec", "--session", "dev", "a", "-c", "cd lib; A=2; set -- p q")
	if out := r.ok("exec", "--session", "dev", "a", "-c", `pwd; echo $A $2; echo err >&2`); out != "/usr/lib\n2 q\n" {
		t.Errorf("got %q", out)
	}
	if out := r.ok("session", "ls", "a"); !regexp.MustCompile(`(?m)^dev +(ba)?sh +\d+ +running +\d+s +/usr$`).MatchString(out) {
		t.Errorf("listed %q", out)
	}
	term := testterm.New(t, 80, 24)
	r.start(term, "shell", "--session", "dev", "a", "--", "pwd; echo from=$A; exit 4")
	term.Shows("/usr/lib\nfrom=2")
	term.ExpectExit(4)
	r.refusedWith(exitExecFailed, "--web excludes", "shell", "--web", "--session", "dev", "a")
	if got := r.doze("exec", "--session", "dev", "a", "-c", "exit 7"); got.code != 7 {
		t.Errorf("exit code %d", got.code)
	}
	if got := r.doze("exec", "--session", "dev", "a", "-c", "true"); got.code != 125 || !strings.Contains(got.err, "exited with code 7") {
		t.Errorf("exit code %d, error %q", got.code, got.err)
	}
	if got := r.doze("exec", "--session", "dev", "--cwd", "/", "a", "-c", "true"); got.code != 125 || !strings.Contains(got.err, "cd and export") {
		t.Errorf("exit code %d, error %q", got.code, got.err)
	}
	r.ok("session", "rm", "a", "dev")
}
