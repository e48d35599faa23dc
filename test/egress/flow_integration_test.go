//go:build integration

package egress

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// author writes policies and uses the command line.
type author struct {
	t      *testing.T
	node   *node
	folder string
}

// doze runs a command with an input, and returns what it prints.
func (a author) doze(input string, args ...string) string {
	a.t.Helper()
	cmd := a.node.Command(args...)
	cmd.Dir, cmd.Stdin = a.folder, strings.NewReader(input)
	// All that a new policy needs is in its folder.
	cmd.Env = append(cmd.Env, "GOPROXY=off", "GOFLAGS=")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		a.t.Fatalf("doze %s: %v\n%s%s", strings.Join(args, " "), err, out, stderr.String())
	}
	if strings.Contains(string(out)+stderr.String(), token) {
		a.t.Errorf("doze %s prints the secret: %s%s", strings.Join(args, " "), out, stderr.String())
	}
	return string(out)
}

// From nothing to a request that arrives authenticated, as docs/policies.md has it.
func TestCustomPolicyAuthenticatesRequests(t *testing.T) {
	if _, err := exec.LookPath("go"); err != nil {
		t.Fatal(err)
	}
	n := commonNode(t)
	b := n.newBox(t)
	a := author{t, n, t.TempDir()}
	const host = "flow.look.test"

	a.doze("", "policy", "new", "mine", "--template", "bearer")
	// The header that makes it the author's own.
	file := filepath.Join(a.folder, "mine", "main.go")
	program, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	changed := strings.Replace(string(program), `r.Header.Set("Authorization"`, `r.Header.Set("X-Mine", "yes"); r.Header.Set("Authorization"`, 1)
	if err := os.WriteFile(file, []byte(changed), 0o600); err != nil {
		t.Fatal(err)
	}
	a.doze("", "policy", "build", "mine")
	if out := a.doze("", "policy", "test", "mine/mine.wasm", "mine/request.json", "--secret", "token=example"); !strings.Contains(out, "Bearer example") || !strings.Contains(out, "X-Mine: yes") {
		t.Errorf("the trial prints %s", out)
	}
	a.doze("", "policy", "push", "mine", "mine/mine.wasm")
	a.doze(token+"\n", "secret", "set", "flow-token", "--host", host)
	a.doze(`[{"name":"mine","hosts":["`+host+`"],"policies":[{"name":"mine","secrets":{"token":"flow-token"}}]}]`,
		"egress", "rules", b.id, "--set", "-")

	if out := a.doze("", "egress", "explain", b.id, "GET", "https://"+host+"/user"); !strings.Contains(out, "sandbox/mine") {
		t.Errorf("explain prints %s", out)
	}
	if echoed := parseSeen(t, a.doze("", "exec", b.id, "--", "curl", "-sSf", "https://"+host+"/user")); echoed.URI != "/user" {
		t.Errorf("the sandbox got %+v", echoed)
	}
	got := n.servers.requests(host)
	if len(got) != 1 || got[0].Header.Get("Authorization") != "Bearer "+token || got[0].Header.Get("X-Mine") != "yes" {
		t.Errorf("the server got %+v", got)
	}
	if out := a.doze("", "policy", "ls"); !strings.Contains(out, "mine") {
		t.Errorf("ls prints %s", out)
	}
	a.doze("[]", "egress", "rules", b.id, "--set", "-")
	a.doze("", "policy", "rm", "mine")
	a.doze("", "secret", "rm", "flow-token")
}
