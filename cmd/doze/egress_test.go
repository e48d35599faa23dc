package main

import (
	"bufio"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/egresstest"
	"github.com/doze-run/doze/policies/builtin"
)

const canary = "canary-5f1d0c7e9a"

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (r *rig) id(name string) string {
	r.t.Helper()
	return decodeJSON[types.Sandbox](r.t, r.ok("show", name, "--json")).ID
}

func TestSecretsAreReadFromInputOrAFile(t *testing.T) {
	r := newRig(t)
	for name, c := range map[string]struct {
		stdin, file string
		args        []string
		want        string
	}{
		"input":                {stdin: canary, want: canary},
		"a newline at the end": {stdin: canary + "\n", want: canary},
		"of two, one":          {stdin: canary + "\n\n", want: canary + "\n"},
		"as Windows writes it": {stdin: canary + "\r\n", want: canary},
		"file":                 {stdin: "not this one", file: "-----BEGIN KEY-----\nMIIB\n-----END KEY-----\n", want: "-----BEGIN KEY-----\nMIIB\n-----END KEY-----"},
		"not UTF-8":            {stdin: "\x00\xffbinary!", want: "\x00\xffbinary!"},
	} {
		t.Run(name, func(t *testing.T) {
			args := []string{"secret", "set", "github", "--host", "api.github.com", "--host", "*.example.com"}
			if c.file != "" {
				args = append(args, "--from-file", writeFile(t, "key.pem", c.file))
			}
			got := r.dozeWith(c.stdin, args...)
			if got.code != 0 || !regexp.MustCompile(`^github  version \d+, for api\.github\.com \*\.example\.com\n$`).MatchString(got.out) {
				t.Fatalf("got %+v", got)
			}
			if value, err := r.egress.Secret(t, "tester", "github", "a.example.com"); err != nil || value != c.want {
				t.Errorf("it is %q, %v; want %q", value, err, c.want)
			}
		})
	}
	secrets := decodeJSON[struct{ Secrets []types.Secret }](t, r.ok("secret", "ls", "--json")).Secrets
	if len(secrets) != 1 || secrets[0].Version != 6 || len(secrets[0].Hosts) != 2 {
		t.Errorf("got %+v", secrets)
	}
	if out := r.ok("secret", "ls"); !regexp.MustCompile(`(?m)^github +6 +\d+s +api\.github\.com \*\.example\.com$`).MatchString(out) {
		t.Errorf("ls printed %q", out)
	}
	if out := r.ok("secret", "rm", "github"); out != "github  removed\n" {
		t.Errorf("rm printed %q", out)
	}
	r.refused("secret_not_found: ", "secret", "rm", "github")
}

func TestSecretsInArgumentsAreRefused(t *testing.T) {
	r := newRig(t)
	if got := r.doze("secret", "set", "github", canary, "--host", "a.example"); got.code != usage.ExitCode || !strings.Contains(got.err, "--from-file") || strings.Contains(got.err, "canary") {
		t.Errorf("got %+v", got)
	}
	r.misused("--host api.github.com", "secret", "set", "github")
	r.refused("no value;", "secret", "set", "github", "--host", "a.example")
	r.refused("no such file", "secret", "set", "github", "--host", "a.example", "--from-file", filepath.Join(t.TempDir(), "missing"))
	for _, c := range []struct{ stdin, words string }{
		{"canary", "at least 8"}, {strings.Repeat("canary", 20_000), "at most 65536"},
	} {
		got := r.dozeWith(c.stdin, "secret", "set", "github", "--host", "a.example")
		if got.code != exitFailed || !strings.Contains(got.err, c.words) || strings.Contains(got.err, "canary") {
			t.Errorf("got %.300v", got)
		}
	}
	r.misused("has no command", "secret", "get", "github")
}

func TestRulesGoToAFileAndBack(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	for _, scope := range [][]string{{"egress", "rules"}, {"egress", "rules", "shop"}} {
		list := writeFile(t, "rules.json", `[
			{"name":"no","hosts":["evil.example"],"ports":["443"],"action":"deny","reason":"for evil"},
			{"name":"gh","hosts":["api.github.com"],"methods":["GET"],"paths":["/user"],"headers":{"x-a":"*"},"policies":[{"name":"bearer","config":{"scheme":"token"}}]},
			{"name":"all","action":"allow"}]`)
		if out := r.ok(append(scope, "--set", list)...); out != "revision 1\n" {
			t.Errorf("set printed %q", out)
		}
		golden(t, "rules", r.ok(scope...))
		saved := writeFile(t, "saved.json", r.ok(append(scope, "--json")...))
		if out := r.ok(append(scope, "--set", saved)...); out != "revision 2\n" {
			t.Errorf("setting what was printed, it printed %q", out)
		}
		r.refused("revision_conflict: ", append(scope, "--set", saved)...)
		if got := r.dozeWith("[]", append(scope, "--set", "-", "--json")...); !strings.Contains(got.out, `"rules": []`) || !strings.Contains(got.out, `"revision": 3`) {
			t.Errorf("got %+v", got)
		}
	}
	got := r.dozeWith(`[{"name":"npm","hosts":["npm.example"],"action":"allow"},{"name":"rest","action":"deny"}]`, "egress", "rules", "shop", "--set", "-")
	if want := "doze: warning: rules[1]: \"rest\" denies what \"npm\" allows: a rule that denies wins wherever it stands; remove \"rest\" and set \"default\": \"deny\"\n"; got.code != 0 || got.err != want {
		t.Errorf("got %+v, want the warning %s", got, want)
	}
	r.ok("egress", "rules", "shop", "--default", "deny")
	if out := r.ok("egress", "rules", "shop"); !strings.Contains(out, "npm") || !strings.HasSuffix(out, "default: deny\n") {
		t.Errorf("after --default deny the rules are\n%s", out)
	}
	r.dozeWith("[]", "egress", "rules", "shop", "--set", "-", "--default", "inherit")
	if out := r.ok("egress", "rules", "shop"); strings.Contains(out, "npm") || !strings.HasSuffix(out, "default: inherit\n") {
		t.Errorf("after --set and --default inherit the rules are\n%s", out)
	}
	r.refused("request_invalid: ", "egress", "rules", "--default", "allow")
	r.misused("give it alone", "egress", "rules", "--node", "--default", "deny")
	r.ok("egress", "rules", "shop", "--set", writeFile(t, "rules.json", `[{"name":"gh","hosts":["preset:github"],"action":"allow"}]`))
	if out := r.ok("egress", "explain", "shop", "GET", "https://codeload.github.com/"); !strings.Contains(out, "preset    github\n") {
		t.Errorf("explain printed\n%s", out)
	}
	if out := r.ok("egress", "presets"); !regexp.MustCompile(`(?m)^github +built_in +7 `).MatchString(out) || !regexp.MustCompile(`(?m)^registry +node +1 +The packages of this site$`).MatchString(out) {
		t.Errorf("the presets are\n%s", out)
	}
	if out := r.ok("egress", "presets", "anthropic"); out != "api.anthropic.com\n" {
		t.Errorf("the preset is %q", out)
	}
	if out := r.ok("egress", "presets", "preset:anthropic", "--json"); !strings.Contains(out, `"api.anthropic.com"`) {
		t.Errorf("the preset is %q", out)
	}
	r.refused("does not exist", "egress", "presets", "nmp")
	if out := r.ok("egress", "rules", "--node"); !strings.Contains(out, "no-metadata") || !strings.HasSuffix(out, "default: allow_public\n") {
		t.Errorf("got %q", out)
	}
}

func TestInvalidRulesAreRefusedWithPositions(t *testing.T) {
	r := newRig(t)
	got := r.dozeWith(`{"rules":[{"name":"a","hosts":["https://a.example"],"policies":[{"name":"A"}]}]}`, "egress", "rules", "--set", "-")
	for _, words := range []string{"rule 1 (a)", "rules_invalid: ", "body.rules[0].hosts[0]: ", "body.rules[0].policies[0].name: "} {
		if got.code != exitFailed || !strings.Contains(got.err, words) {
			t.Errorf("got %+v, want %q", got, words)
		}
	}
	for text, words := range map[string]string{
		"": "empty; write", " ": "empty; write", "[": "line 1, column 2: the JSON value is incomplete", "{": "write a list",
		"[\n  {\"name\": \"a\" \"action\": \"deny\"}\n]": "-: line 2, column 16: invalid JSON", "\n{\"rules\": [],\n]": "line 3, column 1: invalid JSON", "{\"rules\":[]} []": "line 1, column 14: unexpected text", `{"rule":[]}`: "unknown field", "{}": "no rules", `"x"`: "write a list", "[1]": "request_invalid: ",
	} {
		if got := r.dozeWith(text, "egress", "rules", "--set", "-"); got.code != exitFailed || !strings.Contains(got.err, words) {
			t.Errorf("%q: got %+v, want %q", text, got, words)
		}
	}
	r.misused("give it alone", "egress", "rules", "--node", "--set", "-")
	r.refused("sandbox_not_found: ", "egress", "rules", "nobody")
}

// sent records three flows of a sandbox.
func (r *rig) sent(id string) {
	for _, e := range []audit.Entry{
		{Kind: audit.DNS, Host: "evil.example", Verdict: audit.Deny, Rule: "node/no", Reason: "for \x1b[2Jevil"},
		{Kind: audit.Connection, Host: "db.example", Port: 5432, Verdict: audit.Allow, Rule: "default", BytesOut: 412, BytesIn: 163000, Duration: 1500},
		{Kind: audit.Request, Host: "api.github.com", Port: 443, Method: "GET", Path: "/user", Verdict: audit.Allow, Rule: "owner/gh",
			Policies: []audit.Policy{{Name: "bearer", Digest: "sha256:1"}}, Secrets: []string{"github"}, Notes: []string{"a note"}, Status: 200, Duration: 48.2},
	} {
		e.Sandbox = id
		r.egress.Flows.Record(e)
	}
}

func TestFlowsPrintsWhatWasSent(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	r.ok("sleep", "shop")
	r.sent(r.id("shop"))
	golden(t, "flows", regexp.MustCompile(`\.\d{3}  `).ReplaceAllString(r.ok("egress", "flows", "shop"), ".mmm  "))
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--verdict", "deny"}, "evil.example"},
		{[]string{"--host", "*.example", "--tail", "1"}, "db.example"},
		{[]string{"--kind", "request"}, "api.github.com"},
		{[]string{"-n", "1"}, "api.github.com"},
	} {
		out := r.ok(append([]string{"egress", "flows", "shop"}, c.args...)...)
		if strings.Count(out, "\n") != 1 || !strings.Contains(out, c.want) {
			t.Errorf("%v: got %q, want %s", c.args, out, c.want)
		}
	}
	flows := decodeJSON[struct{ Flows []types.Flow }](t, r.ok("egress", "flows", "shop", "--json")).Flows
	if len(flows) != 3 || flows[2].Policies[0].Name != "bearer" {
		t.Errorf("got %+v", flows)
	}
	if sb := decodeJSON[types.Sandbox](t, r.ok("show", "shop", "--json")); sb.State != types.StateAsleep {
		t.Errorf("reading woke it: %s", sb.State)
	}
	r.refused("request_invalid: ", "egress", "flows", "shop", "--verdict", "maybe")
	r.refused("sandbox_not_found: ", "egress", "flows", "nobody")
}

func TestTailFollowsUntilTheSandboxIsDestroyed(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	id := r.id("shop")
	r.sent(id)
	follower := r.program("egress", "flows", "-f", "-n", "1", "shop")
	lines := bufio.NewScanner(r.output(follower))
	next := func() string { lines.Scan(); return lines.Text() }
	if line := next(); !strings.Contains(line, "api.github.com") {
		t.Errorf("it begins with %q", line)
	}
	r.sent(id)
	for _, host := range []string{"evil.example", "db.example", "api.github.com"} {
		if line := next(); !strings.Contains(line, host) {
			t.Errorf("got %q, want %s", line, host)
		}
	}
	r.ok("rm", "shop")
	r.egress.Flows.Forget(id)
	if lines.Scan() {
		t.Errorf("got %q after the end", lines.Text())
	}
	if err := follower.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
}

func TestFlowsPrintsAndFollowsWhatProgramsOutsideSent(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	r.sent(r.id("shop"))
	if out := r.ok("egress", "flows", "--proxy"); out != "" {
		t.Errorf("it contains flows of a sandbox: %q", out)
	}
	r.sent("proxy/tester")
	r.sent("proxy/another")
	if out := r.ok("egress", "flows", "--proxy", "--verdict", "deny"); strings.Count(out, "\n") != 1 || !strings.Contains(out, "evil.example") {
		t.Errorf("got %q", out)
	}
	if flows := decodeJSON[struct{ Flows []types.Flow }](t, r.ok("egress", "flows", "--proxy", "--json")).Flows; len(flows) != 3 || flows[0].Sandbox != "" {
		t.Errorf("got %+v", flows)
	}
	follower := r.program("egress", "flows", "--proxy", "-f", "-n", "1")
	lines := bufio.NewScanner(r.output(follower))
	for _, host := range []string{"api.github.com", "evil.example"} {
		if !lines.Scan() || !strings.Contains(lines.Text(), host) {
			t.Errorf("got %q, want %s", lines.Text(), host)
		}
		r.sent("proxy/tester")
	}
	if err := follower.Process.Signal(os.Interrupt); err != nil { // there is no other end
		t.Fatal(err)
	}
	for lines.Scan() {
	}
	_ = follower.Wait()
	if code := follower.ProcessState.ExitCode(); code != exitInterrupted {
		t.Errorf("it ended with %d", code)
	}
	r.misused("SANDBOX|--proxy is missing", "egress", "flows")
	r.misused(`unexpected argument "shop"`, "egress", "flows", "--proxy", "shop")
}

func TestExplainNamesTheRule(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	if got := r.dozeWith(`[{"name":"gh","hosts":["api.github.com"],"headers":{"x-a":"1"},"policies":[{"name":"bearer","secrets":{"token":"github"}}]}]`,
		"egress", "rules", "--set", "-"); got.code != 0 {
		t.Fatal(got.err)
	}
	if got := r.dozeWith(canary, "secret", "set", "github", "--host", "api.github.com"); got.code != 0 {
		t.Fatal(got.err)
	}
	golden(t, "explain", r.ok("egress", "explain", "shop", "GET", "https://api.github.com/user", "-H", "X-A: 1")+
		r.ok("egress", "explain", "shop", "GET", "https://metadata.internal/")+r.ok("egress", "explain", "shop", "CONNECT", "tcp://db.example:5432"))
	r.ok("create", "laptop")
	r.ok("egress", "rules", "laptop", "--set", writeFile(t, "place.json",
		`[{"name":"place","hosts":["api.github.com"],"action":"allow","placeholders":{"TOKEN":"github","OTHER":"none"}}]`))
	if out := r.ok("egress", "explain", "laptop", "GET", "https://api.github.com/"); !regexp.MustCompile(`(?m)^placeholder +github$`).MatchString(out) ||
		!regexp.MustCompile(`(?m)^placeholder +none; .`).MatchString(out) {
		t.Errorf("placeholders are explained as\n%s", out)
	}
	if e := decodeJSON[types.Explanation](t, r.ok("egress", "explain", "shop", "GET", "https://api.github.com/", "--json")); e.Rule != "default" {
		t.Errorf("got %+v", e)
	}
	r.misused("write --header", "egress", "explain", "shop", "GET", "https://a.example/", "-H", "x")
	r.refused("request_invalid: ", "egress", "explain", "shop", "GET", "a.example")
	r.misused("URL is missing", "egress", "explain", "shop", "GET")
	r.misused("URL is missing", "egress", "explain", "--proxy", "GET")
	r.misused(`unexpected argument "x"`, "egress", "explain", "--proxy", "GET", "https://a.example/", "x")
	r.ok("egress", "rules", "shop", "--set", writeFile(t, "rules.json", `[{"name":"no","hosts":["a.example"],"action":"deny"}]`))
	for of, want := range map[string]string{"shop": "sandbox/no", "--proxy": "default"} {
		if e := decodeJSON[types.Explanation](t, r.ok("egress", "explain", of, "GET", "https://a.example/", "--json")); e.Rule != want {
			t.Errorf("%s: got %+v, want %s", of, e, want)
		}
	}
	if out := r.ok("egress", "ca"); out != string(r.egress.Trust()) {
		t.Errorf("got %q", out)
	}
}

func TestPoliciesArePushed(t *testing.T) {
	r := newRig(t)
	file := writeFile(t, "sign.wasm", string(egresstest.Module(1)))
	if out := r.ok("policy", "push", "sign", file); !regexp.MustCompile(`^sign  sha256:[0-9a-f]{12}, 97 B\n$`).MatchString(out) {
		t.Errorf("push printed %q", out)
	}
	if got := r.dozeWith(`[{"name":"gh","hosts":["a.example"],"policies":[{"name":"sign"}]}]`, "egress", "rules", "--set", "-"); got.code != 0 {
		t.Fatal(got.err)
	}
	list := regexp.MustCompile(`\d+s `).ReplaceAllString(r.ok("policy", "ls"), "0s ")
	// Digests and sizes of the policies that are part of doze depend on the compiler.
	golden(t, "policies", regexp.MustCompile(`sha256:[0-9a-f]{12}   [\d.]+ MiB`).ReplaceAllString(list, "sha256:xxxxxxxxxxxx   N.N MiB"))
	r.refused("policy_in_use: ", "policy", "rm", "sign")
	r.dozeWith("[]", "egress", "rules", "--set", "-")
	if out := r.ok("policy", "rm", "sign", "--json"); !strings.Contains(out, `"state": "removed"`) {
		t.Errorf("rm printed %q", out)
	}
	r.refused("policy_not_found: ", "policy", "rm", "sign")
	r.refused("policy_invalid: ", "policy", "push", "sign", writeFile(t, "x.wasm", "#!/bin/sh"))
	r.refused("no such file", "policy", "push", "sign", file+".missing")
	r.refused("is not a file", "policy", "push", "sign", t.TempDir())
	large := writeFile(t, "large.wasm", "")
	if err := os.Truncate(large, client.MaxPolicy+1); err != nil {
		t.Fatal(err)
	}
	r.refused("at most 16.0 MiB", "policy", "push", "sign", large)
	if policies := decodeJSON[struct{ Policies []types.Policy }](t, r.ok("policy", "ls", "--json")).Policies; len(policies) != len(builtin.Names()) || !policies[0].BuiltIn {
		t.Errorf("got %+v", policies)
	}
}
