//go:build integration

package egress

import (
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

// documented returns the block of code of a page that begins with a fence and a line.
func documented(t *testing.T, page, first string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../docs", page))
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?ms)^" + regexp.QuoteMeta(first) + ".*?^```$").FindString(string(text))
	if block == "" {
		t.Fatalf("%s has no block that begins with %q", page, first)
	}
	_, block, _ = strings.Cut(strings.TrimSuffix(block, "\n```"), "\n")
	return block
}

// mirrors are the hosts of the operator's presets in docs/egress.md.
var mirrors = []string{"npm.mirror.example.com", "pypi.mirror.example.com", "files.mirror.example.com"}

// npm, PyPI and GitHub with a token, nothing else, and a model's budget: the lines of
// docs/egress.md, as they are printed.
func TestRulesOfTheDocumentation(t *testing.T) {
	operator := regexp.MustCompile(`(?m)^\s*preset .*`).FindAllString(documented(t, "egress.md", "```caddyfile node\n{\n\tdoze {\n\t\tegress {\n\t\t\tpreset"), -1)
	for _, host := range mirrors {
		if !strings.Contains(strings.Join(operator, " "), " "+host) {
			t.Fatalf("the operator's presets are %q, without %s", operator, host)
		}
	}
	n := ownNode(t, operator...)
	b := n.newBox(t)
	lines := documented(t, "egress.md", "```sh run\nprintf %s \"$GITHUB_TOKEN\" | doze secret set github --host api.github.com --host github.com\nprintf")
	if count := strings.Count(lines, "\n") + 1; count > 10 {
		t.Errorf("they are %d lines", count)
	}
	script := exec.Command("bash", "-ec", lines)
	script.Env = append(n.Command().Env, "GITHUB_TOKEN="+token, "ANTHROPIC_API_KEY="+token,
		"PATH="+filepath.Dir(n.Program("doze"))+":"+os.Getenv("PATH"))
	if out, err := script.CombinedOutput(); err != nil || strings.Contains(string(out), "warning") {
		t.Fatalf("%v\n%s", err, out)
	}

	u := &user{box: b, env: map[string]string{}}
	u.trustServers() // their connections pass through
	if got := parseSeen(t, b.exec("curl -sSf https://api.github.com/user")).Header.Get("Authorization"); !masks(got, "Bearer ") {
		t.Errorf("the API of GitHub got %q", got)
	}
	b.exec("curl -sSf 'https://github.com/a/b.git/info/refs?service=git-upload-pack'")
	basic := "Basic " + base64.StdEncoding.EncodeToString([]byte("x-access-token:"+token))
	if got := n.servers.requests("github.com"); len(got) != 1 || got[0].Header.Get("Authorization") != basic {
		t.Errorf("GitHub got %+v", got)
	}
	b.exec("curl -sSfk https://raw.githubusercontent.com/a/b/main/c")
	for _, host := range mirrors {
		b.exec("curl -sSfk https://" + host + "/package")
		if got := n.servers.requests(host); len(got) != 1 {
			t.Errorf("%s got %+v", host, got)
		}
	}
	for _, url := range []string{"https://other.pass.test/", "http://other.plain.test/", "https://mirror.example.com/", "https://" + presetHost("openai") + "/"} {
		if r := b.try("curl -sSk " + url); r.ExitCode != 6 {
			t.Errorf("%s: %+v", url, r)
		}
	}
	// As many requests as the budget has, on one connection, and one more.
	budget := regexp.MustCompile(`"requests":(\d+)`).FindStringSubmatch(lines)[1]
	out := b.exec(`curl -sS -o /dev/null -w '%{http_code}\n' -d x "https://api.anthropic.com/v1/messages?[1-` + budget + `]" | sort | uniq -c`)
	if out != budget+" 200" {
		t.Errorf("within the budget: %s", out)
	}
	if got := n.servers.requests("api.anthropic.com"); got[0].Header.Get("X-Api-Key") != token {
		t.Errorf("the model got %+v", got[0])
	}
	if r := b.try("curl -sS -w ' %{http_code}' -d x https://api.anthropic.com/v1/messages"); !strings.HasSuffix(r.Stdout, " 403") || !strings.Contains(r.Stdout, "owner/models") {
		t.Errorf("beyond the budget: %+v", r)
	}
	for url, want := range map[string]string{
		"https://raw.githubusercontent.com/a": "allow owner/github github", "https://files.mirror.example.com/": "allow owner/packages pypi", "https://other.pass.test/": "deny default ",
	} {
		e, err := n.API.Explain(testkit.Context(t), b.id, types.ExplainRequest{Method: "GET", URL: url})
		if got := string(e.Verdict) + " " + e.Rule + " " + e.Preset; err != nil || got != want {
			t.Errorf("%s: explained as %q, %v, want %q", url, got, err, want)
		}
	}
}

// masks reports whether a text is a prefix and stars, which replace a secret.
func masks(text, prefix string) bool {
	stars, ok := strings.CutPrefix(text, prefix)
	return ok && stars != "" && strings.Trim(stars, "*") == ""
}

// A sandbox reaches servers by a preset of the operator. A reload changes which, and
// one that removes the preset closes them.
func TestOperatorsPresetsFollowReloads(t *testing.T) {
	const line = "preset site one.pass.test"
	n := ownNode(t, line, `
		rule uploads {
			hosts preset:github
			methods PUT
			deny
		}`)
	b := n.newBox(t)
	doze := func(args ...string) string {
		t.Helper()
		out, err := n.Command(args...).CombinedOutput()
		if err != nil {
			t.Fatalf("doze %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	if out := doze("egress", "presets"); !regexp.MustCompile(`(?m)^site +node +1`).MatchString(out) || !regexp.MustCompile(`(?m)^github +built_in `).MatchString(out) {
		t.Errorf("the presets are\n%s", out)
	}
	if _, err := n.API.SetRules(testkit.Context(t), "", client.RulesUpdate{Default: "deny", Rules: []byte(`[{"name":"site","hosts":["preset:site"],"action":"allow"}]`)}); err != nil {
		t.Fatal(err)
	}
	reaches := func(when string, want ...string) {
		t.Helper()
		for _, host := range []string{"one.pass.test", "two.pass.test"} {
			r := b.try("curl -sSk -o /dev/null https://" + host + "/")
			if reached := r.ExitCode == 0; reached != slices.Contains(want, host) {
				t.Errorf("%s: %s: %+v", when, host, r)
			}
		}
	}
	reaches("at first", "one.pass.test")
	config, err := os.ReadFile(n.Caddyfile())
	if err != nil {
		t.Fatal(err)
	}
	with := func(lines string) string { return strings.Replace(string(config), line, lines, 1) }
	n.reload(t, with("preset site two.pass.test {\n\tdescription \"Ours\"\n}"))
	reaches("after a reload", "two.pass.test")

	// An invalid preset is refused with its place, and nothing changes.
	if err := n.Configure(with("preset site https://one.pass.test/")); err != nil {
		t.Fatal(err)
	}
	place := fmt.Sprintf("%s:%d", n.Caddyfile(), 1+strings.Count(with("\x00")[:strings.Index(with("\x00"), "\x00")], "\n"))
	for _, command := range []string{"validate", "reload"} {
		if out, err := n.Command(command, "--config", n.Caddyfile()).CombinedOutput(); err == nil || !strings.Contains(string(out), "invalid host name") || !strings.Contains(string(out), place) {
			t.Errorf("%s: %v, %s; want an error at %s", command, err, out, place)
		}
	}
	reaches("after a reload that is refused", "two.pass.test")

	n.reload(t, with(""))
	reaches("without the preset")
	if out := doze("egress", "rules"); !strings.Contains(out, `doze: warning: rules[0].hosts: "site" names preset:site, which is not defined on this node`) {
		t.Errorf("the rules are\n%s", out)
	}
	if out := doze("egress", "explain", b.id, "GET", "https://two.pass.test/"); !strings.Contains(out, "owner/site names preset:site") {
		t.Errorf("explained as\n%s", out)
	}
	if !strings.Contains(n.Log(), "rules name a preset that is not defined") {
		t.Error("the log does not report it")
	}
	n.reload(t, with("preset site one.pass.test two.pass.test"))
	reaches("defined again", "one.pass.test", "two.pass.test")
}
