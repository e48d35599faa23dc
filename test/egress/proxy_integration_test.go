//go:build integration

package egress

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// proxied is a node with a proxy, and curl outside of every sandbox.
type proxied struct {
	*node
	t    *testing.T
	port int
	ca   string // file with the node's own authority and the test servers'
}

func newProxied(t *testing.T) *proxied {
	t.Helper()
	n := ownNode(t, `
		rule look {
			hosts *.look.test
			policy bearer {
				secret token api
			}
		}
		rule no {
			hosts no.test
			deny "not there"
		}`)
	port, err := testnode.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	p := &proxied{node: n, t: t, port: port, ca: filepath.Join(t.TempDir(), "ca.pem")}
	config, err := os.ReadFile(n.Caddyfile())
	if err != nil {
		t.Fatal(err)
	}
	site := fmt.Sprintf("\n:%[1]d, proxy.doze.localhost:%[1]d {\n\tdoze_proxy\n}\n", port)
	n.reload(t, string(config)+site)
	if err := os.WriteFile(p.ca, append([]byte(p.api("GET", "/egress/ca", "")), n.servers.ca...), 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *proxied) api(method, path, body string) string {
	p.t.Helper()
	status, text, err := p.Do(testkit.Context(p.t), method, path, "application/json", strings.NewReader(body))
	if err != nil || status >= 300 {
		p.t.Fatalf("%s %s: %d %s, %v", method, path, status, text, err)
	}
	return text
}

// curl runs it through the proxy, and returns what it printed and its exit code.
func (p *proxied) curl(key string, args ...string) (out string, code int) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	args = append([]string{
		"-sS", "--proxy", fmt.Sprintf("https://proxy.doze.localhost:%d", p.port), "--proxy-user", "agent:" + key,
		"--resolve", fmt.Sprintf("proxy.doze.localhost:%d:127.0.0.1", p.port), "--proxy-cacert", p.CA, "--cacert", p.ca,
	}, args...)
	cmd := exec.CommandContext(ctx, "curl", args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + p.t.TempDir()}
	var both bytes.Buffer
	cmd.Stdout, cmd.Stderr = &both, &both
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		p.t.Fatal(err)
	}
	return both.String(), cmd.ProcessState.ExitCode()
}

func TestCurlOutsideOfSandboxesFollowsTheSameRules(t *testing.T) {
	p := newProxied(t)
	const value = "outside-secret-4f9a1c77"
	p.api("PUT", "/secrets/api", `{"value":"`+value+`","hosts":["*.look.test"]}`)
	testkit.Eventually(t, "the proxy has a certificate", func() bool {
		_, code := p.curl(p.Token, "https://up.pass.test/")
		return code == 0
	})

	out, code := p.curl(p.Token, "https://a.look.test/user?q=1")
	if code != 0 || strings.Contains(out, value) {
		t.Errorf("exit code %d: %s", code, out)
	}
	got := p.servers.requests("a.look.test")
	if len(got) != 1 || got[0].Header.Get("Authorization") != "Bearer "+value || got[0].URI != "/user?q=1" {
		t.Errorf("the server got %+v", got)
	}

	// Without TLS no secret goes out.
	if out, code := p.curl(p.Token, "http://b.look.test/"); code != 0 || !strings.Contains(out, "secret_not_allowed") {
		t.Errorf("exit code %d: %s", code, out)
	}
	if out, code := p.curl(p.Token, "http://c.plain.test/x"); code != 0 || !strings.Contains(out, `"uri":"/x"`) || strings.Contains(out, "Proxy") {
		t.Errorf("exit code %d: %s", code, out)
	}

	// 56: the proxy's response to CONNECT was not a 200.
	for url, want := range map[string]string{"https://no.test/": "response 403", "https://127.0.0.1:22/": "response 403", "https://[::1]/": "response 403"} {
		if out, code := p.curl(p.Token, url); code != 56 || !strings.Contains(out, want) {
			t.Errorf("%s: exit code %d: %s", url, code, out)
		}
	}
	for _, key := range []string{"", "wrong", p.Token + "x"} {
		if out, code := p.curl(key, "https://a.look.test/"); code != 56 || !strings.Contains(out, "response 407") {
			t.Errorf("with key %.5q: exit code %d: %s", key, code, out)
		}
	}

	var list struct{ Flows []map[string]any }
	if err := json.Unmarshal([]byte(p.api("GET", "/egress/proxy/flows", "")), &list); err != nil {
		t.Fatal(err)
	}
	var reported []string
	for _, f := range list.Flows {
		reported = append(reported, fmt.Sprint(f["kind"], " ", f["verdict"], " ", f["host"]))
		if sandbox, ok := f["sandbox"]; ok {
			t.Errorf("a flow of the proxy has the sandbox %v", sandbox)
		}
	}
	for _, want := range []string{"connection allow up.pass.test", "request allow a.look.test", "request deny b.look.test",
		"request allow c.plain.test", "connection deny no.test"} {
		if !slices.Contains(reported, want) {
			t.Errorf("no flow says %q: %q", want, reported)
		}
	}
	for _, secret := range []string{value, p.Token} {
		if strings.Contains(p.Log(), secret) {
			t.Error("the log has a secret")
		}
	}
}

// The node listens at 127.0.0.1 of its host and nowhere else here; a sandbox gets
// nowhere by any of its names and addresses.
func TestSandboxDoesNotReachTheProxy(t *testing.T) {
	p := newProxied(t)
	b := p.newBox(t)
	for _, host := range []string{"127.0.0.1", "198.18.0.1", "proxy.doze.localhost"} {
		r := b.try(fmt.Sprintf("curl -sS --connect-timeout 5 --proxy-insecure --proxy https://%s:%d --proxy-user agent:x https://a.look.test/", host, p.port))
		if r.ExitCode == 0 || strings.Contains(r.Stdout+r.Stderr, "response 407") {
			t.Errorf("by %s: %+v", host, r)
		}
	}
}
