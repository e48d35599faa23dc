package main

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/api/types"
)

func TestUpdate(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a", "--ttl", "24h")
	if sb := decodeJSON[types.Sandbox](t, r.ok("show", "a", "--json")); time.Duration(sb.TTL) != 24*time.Hour || sb.ExpiresAt.IsZero() {
		t.Errorf("created with ttl %s, expires at %s", time.Duration(sb.TTL), sb.ExpiresAt)
	}
	r.ok("update", "a", "--name", "b", "--label", "team=web", "--ttl", "0s")
	sb := decodeJSON[types.Sandbox](t, r.ok("show", "b", "--json"))
	if sb.Labels["team"] != "web" || sb.TTL != 0 || !sb.ExpiresAt.IsZero() {
		t.Errorf("got labels %v, ttl %s, expires at %s", sb.Labels, time.Duration(sb.TTL), sb.ExpiresAt)
	}
	r.misused("nothing to change", "update", "b")
	r.refused("ttl", "update", "b", "--ttl", "1ms")
}

func TestPersistIsSet(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a", "--persist", "none")
	r.ok("update", "a", "--persist", "disk")
	if out := r.ok("show", "a"); !regexp.MustCompile(`(?m)^persists +disk$`).MatchString(out) {
		t.Errorf("show printed %q", out)
	}
	if out := r.ok("sleep", "a"); out != "a  stopped\n" {
		t.Errorf("sleep printed %q", out)
	}
	r.refused("persist", "update", "a", "--persist", "ram")
}

func TestUpdateChangesTheEnvironment(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a", "-e", "A=1", "-e", "B=1")
	r.ok("update", "a", "-e", "A=2", "--env", "C=x=y", "--unset", "B")
	if out := r.ok("exec", "a", "-c", `echo "[$A][$B][$C]"`); out != "[2][][x=y]\n" {
		t.Errorf("got %q", out)
	}
	r.ok("update", "a", "--unset", "C", "--ttl", "1h")
	if sb := decodeJSON[types.Sandbox](t, r.ok("show", "a", "--json")); len(sb.Env) != 1 || sb.Env["A"] != "2" || sb.ExpiresAt.IsZero() {
		t.Errorf("got %+v", sb)
	}
	r.ok("create", "taken")
	r.refused("sandbox_conflict", "update", "a", "-e", "A=3", "--name", "taken")
	if out := r.ok("exec", "a", "-c", `echo "[$A]"`); out != "[2]\n" {
		t.Errorf("a refused update changed the environment: %q", out)
	}
	r.refused("only the environment was not changed: request_invalid", "update", "a", "--env", "A="+strings.Repeat("x", 65<<10), "--name", "b")
	r.ok("update", "b", "--name", "a", "-e", "A=4")
	if out := r.ok("exec", "a", "-c", `echo "[$A]"`); out != "[4]\n" {
		t.Errorf("got %q", out)
	}
	if got := r.doze("update", "a", "-e", "A=3", "--unset", "A"); got.code == 0 || !strings.Contains(got.err, "both name A") {
		t.Errorf("exit code %d, error %q", got.code, got.err)
	}
}
