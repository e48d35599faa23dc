//go:build integration

package egress

import (
	"encoding/json"
	"strings"
	"testing"
)

// parseSeen decodes a test server's description of a request.
func parseSeen(t *testing.T, text string) seen {
	t.Helper()
	var got seen
	if err := json.Unmarshal([]byte(text), &got); err != nil {
		t.Fatalf("%v: %.300s", err, text)
	}
	return got
}

func TestSandboxReachesServersByName(t *testing.T) {
	b := commonNode(t).newBox(t)
	// Passed through: the client sees the server's own certificate, which it does
	// not know.
	r := b.try("curl -sS https://a.pass.test/")
	if r.ExitCode != 60 {
		t.Errorf("passed through, the server's certificate was trusted: %+v", r)
	}
	if got := parseSeen(t, b.exec("curl -sSk https://a.pass.test/x?y=1")); got.Host != "a.pass.test" || got.URI != "/x?y=1" {
		t.Errorf("got %+v", got)
	}
	// Intercepted: the client trusts the node's.
	if got := parseSeen(t, b.exec("curl -sS https://a.look.test/x?y=1")); got.Host != "a.look.test" || got.URI != "/x?y=1" || got.Proto != "HTTP/2.0" {
		t.Errorf("got %+v", got)
	}
	if got := parseSeen(t, b.exec("curl -sS http://a.plain.test/x")); got.Host != "a.plain.test" {
		t.Errorf("got %+v", got)
	}
	if got := b.exec("bash -c 'exec 3<>/dev/tcp/a.echo.test/7; read -r line <&3; echo $line; echo ping >&3; read -r line <&3; echo $line'"); !strings.Contains(got, "220 hello\nping") {
		t.Errorf("got %q", got)
	}
}

func TestNodeRespondsToPing(t *testing.T) {
	b := commonNode(t).newBox(t).canSay()
	for _, host := range []string{"198.18.0.1", "a.pass.test"} {
		if got := b.exec("echo hello | python3 /tmp/say.py ping " + host); got != "hello" {
			t.Errorf("%s answers %q", host, got)
		}
	}
}
