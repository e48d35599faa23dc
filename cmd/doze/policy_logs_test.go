package main

import (
	"bufio"
	"os"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/egresstest"
	"github.com/doze-run/doze/egress/policy/policylog"
)

// wrote records lines of a policy.
func (r *rig) wrote(policy string, texts ...string) {
	for _, text := range texts {
		level := policylog.Info
		if strings.HasPrefix(text, "bad") {
			level = policylog.Error
		}
		r.egress.PolicyLogs.Add(policylog.Policy{Owner: "tester", Name: policy},
			policylog.Line{Level: level, Text: text, Flow: "f1", Sandbox: "k3f9x2m7q1az", SandboxName: "shop"})
	}
}

func TestLogsOfAPolicyArePrinted(t *testing.T) {
	r := newRig(t)
	r.wrote("bearer", "hello \x1b[2J", "bad token")
	out := r.ok("policy", "logs", "bearer")
	if strings.Count(out, "\n") != 2 || !strings.Contains(out, "info   f1          shop  hello") || strings.Contains(out, "\x1b") {
		t.Errorf("got %q", out)
	}
	for _, args := range [][]string{{"--level", "error"}, {"-n", "1"}} {
		out := r.ok(append([]string{"policy", "logs", "bearer"}, args...)...)
		if strings.Count(out, "\n") != 1 || !strings.Contains(out, "error  f1          shop  bad token") {
			t.Errorf("%v: got %q", args, out)
		}
	}
	lines := decodeJSON[struct{ Lines []types.PolicyLine }](t, r.ok("policy", "logs", "bearer", "--json")).Lines
	if len(lines) != 2 || lines[1].Text != "bad token" || lines[1].Flow != "f1" || lines[1].Sandbox != "k3f9x2m7q1az" {
		t.Errorf("got %+v", lines)
	}
	r.refused("request_invalid: ", "policy", "logs", "bearer", "--level", "loud")
	r.refused("policy_not_found: ", "policy", "logs", "unknown")
}

func TestLogsOfAPolicyAreFollowedUntilItIsDeleted(t *testing.T) {
	r := newRig(t)
	module := t.TempDir() + "/p.wasm"
	if err := os.WriteFile(module, egresstest.Module(1), 0o600); err != nil {
		t.Fatal(err)
	}
	r.ok("policy", "push", "mine", module)
	r.wrote("mine", "one", "two")
	follower := r.program("policy", "logs", "-f", "-n", "1", "mine")
	lines := bufio.NewScanner(r.output(follower))
	if lines.Scan(); !strings.HasSuffix(lines.Text(), "two") {
		t.Errorf("it begins with %q", lines.Text())
	}
	r.wrote("mine", "three")
	if lines.Scan(); !strings.HasSuffix(lines.Text(), "three") {
		t.Errorf("got %q", lines.Text())
	}
	r.ok("policy", "rm", "mine")
	if lines.Scan() {
		t.Errorf("got %q after the end", lines.Text())
	}
	if err := follower.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
}
