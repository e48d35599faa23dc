//go:build integration

package egress

import (
	"encoding/base64"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
)

// documented returns the lines of a page that are printed as one block of code, from
// the one that begins with first to the one that is last.
func documented(t *testing.T, page, first, last string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../docs", page))
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile(`(?ms)^    ` + regexp.QuoteMeta(first) + `.*?^    ` + regexp.QuoteMeta(last) + `$`).FindString(string(text))
	if block == "" {
		t.Fatalf("%s has no block that begins with %q", page, first)
	}
	return regexp.MustCompile(`(?m)^    `).ReplaceAllString(block, "")
}

// GitHub with a token, nothing else, and a model's budget: the lines of
// docs/egress.md, as they are printed.
func TestTheRulesOfTheDocumentation(t *testing.T) {
	n := ownNode(t)
	b := n.newBox(t)
	lines := documented(t, "egress.md", `printf %s "$GITHUB_TOKEN"`, "RULES")
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
	u.trustServers() // what they send passes through
	if got := answer(t, b.exec("curl -sSf https://api.github.com/user")).Header.Get("Authorization"); !masks(got, "Bearer ") {
		t.Errorf("the API of GitHub got %q", got)
	}
	b.exec("curl -sSf 'https://github.com/a/b.git/info/refs?service=git-upload-pack'")
	basic := "Basic " + base64.StdEncoding.EncodeToString([]byte("x-access-token:"+token))
	if got := n.servers.requests("github.com"); len(got) != 1 || got[0].Header.Get("Authorization") != basic {
		t.Errorf("GitHub got %+v", got)
	}
	b.exec("curl -sSfk https://raw.githubusercontent.com/a/b/main/c")
	for _, url := range []string{"https://other.pass.test/", "http://other.plain.test/", "https://" + presetHost("openai") + "/"} {
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
		"https://raw.githubusercontent.com/a": "allow owner/github github", "https://other.pass.test/": "deny default ",
	} {
		e, err := n.API.Explain(within(t), b.id, client.ExplainRequest{Method: "GET", URL: url})
		if got := e.Verdict + " " + e.Rule + " " + e.Preset; err != nil || got != want {
			t.Errorf("%s: explained as %q, %v, want %q", url, got, err, want)
		}
	}
}

// masks says whether a text is a prefix and stars, which take the place of a secret.
func masks(text, prefix string) bool {
	stars, ok := strings.CutPrefix(text, prefix)
	return ok && stars != "" && strings.Trim(stars, "*") == ""
}
