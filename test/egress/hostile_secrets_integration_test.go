//go:build integration

package egress

import (
	"bytes"
	_ "embed"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/testkit"
)

//go:embed testdata/say.py
var say string

// put writes a program into the sandbox.
func (b *box) put(path string, program io.Reader) {
	b.t.Helper()
	if _, err := b.node.API.WriteFile(testkit.Context(b.t), b.id, path, 0o755, program); err != nil {
		b.t.Fatal(err)
	}
}

// canSay writes say.py to /tmp/say.py of the sandbox.
func (b *box) canSay() *box {
	b.t.Helper()
	b.put("/tmp/say.py", strings.NewReader(say))
	return b
}

// bearer has a secret sent to a host of the common node.
func bearer(t *testing.T, name, host string) (*box, string) {
	t.Helper()
	n := commonNode(t)
	value := "tok-" + name + "-Jq7TzW2nHs5XcVb9"
	n.secret(t, name, value, host)
	b := n.newBox(t)
	b.rules(fmt.Sprintf(`[{"name":"api","hosts":[%q],"policies":[{"name":"bearer","secrets":{"token":%q}}]}]`, host, name))
	return b, value
}

// Whatever a server does with a secret, it is not in what the sandbox gets; the
// rest is.
func TestSecretEchoedByAServerIsScrubbed(t *testing.T) {
	for _, host := range []string{"mirror.look.test", "mirror.old.test"} { // HTTP/2, HTTP/1.1
		b, _ := bearer(t, "echoed-"+host[7:10], host)
		forms := slices.Concat(slices.Sorted(maps.Keys(reflections)), slices.Sorted(maps.Keys(compressions)),
			[]string{"split", "split-gzip", "trailer", "header", "early", "error", "redirect", "document"})
		for _, form := range forms {
			for _, client := range []string{"--http2", "--http1.1"} {
				for _, accept := range []string{"", " --compressed"} {
					r := b.try(fmt.Sprintf("curl -sSi %s%s --max-time 60 https://%s/mirror/%s", client, accept, host, form))
					if r.ExitCode != 0 || !strings.Contains(r.Stdout, control) {
						t.Errorf("%s of %s by %s%s: %+v", form, host, client, accept, r)
					}
				}
			}
		}
		// A response that the node cannot read, or not as a whole, is not forwarded.
		for _, form := range []string{"unknown-coding", "range"} {
			if r := b.try("curl -sS -w ' %{http_code}' https://" + host + "/mirror/" + form); !strings.HasSuffix(r.Stdout, " 502") || strings.Contains(r.Stdout, control) {
				t.Errorf("%s: %+v", form, r)
			}
		}
	}
}

func TestSecretEchoedByAWebSocketIsScrubbed(t *testing.T) {
	b, secret := bearer(t, "messages", "messages.look.test")
	r := b.canSay().try("python3 /tmp/say.py ws messages.look.test 443 /mirror/websocket")
	// Of what comes in single bytes, up to three get through: see package scrub.
	want := control + " " + strings.Repeat("*", len(secret)) + secret[:3] + strings.Repeat("*", len(secret)-3)
	if r.ExitCode != 0 || !strings.HasSuffix(string(plain(r.Stdout, r)), want) {
		t.Errorf("got %+v", r)
	}
}

// An invalid response has parts that errors tend to repeat.
func TestErrorsDoNotRepeatASecret(t *testing.T) {
	b, _ := bearer(t, "broken", "broken.old.test")
	for _, form := range []string{
		"protocol", "version", "status", "reason", "line", "name", "length", "lengths", "transfer",
		"chunk", "cut", "coding", "gzip", "upgrade", "location", "abort",
	} {
		b.try("curl -sSi --max-time 60 https://broken.old.test/broken/" + form)
	}
	// They were asked, and the log has them: the canary looks through it.
	if flows := b.flows(client.FlowFilter{Host: "broken.old.test", Kind: "request"}); len(flows) != 16 {
		t.Errorf("the audit log has %d of 16 requests", len(flows))
	}
}

// A secret in the address of a request is in none of the errors about it.
func TestErrorsDoNotRepeatAnAddressWithASecret(t *testing.T) {
	const host = "query.old.test"
	n := commonNode(t)
	n.secret(t, "queried", "tok-queried-Jq7TzW2nHs5XcVb9", host)
	b := n.newBox(t)
	b.rules(`[{"name":"api","hosts":["query.old.test"],"policies":[{"name":"query","config":{"name":"key"},"secrets":{"value":"queried"}}]}]`)
	for _, form := range []string{"abort", "status", "cut", "location"} {
		b.try("curl -sSi --max-time 60 https://" + host + "/broken/" + form)
	}
	if r := b.try("curl -sSi https://" + host + "/mirror/none"); !strings.Contains(r.Stdout, "404") {
		t.Errorf("got %+v", r)
	}
	if flows := b.flows(client.FlowFilter{Host: host, Kind: "request"}); len(flows) != 5 || !slices.Contains(flows[4].Secrets, "queried") {
		t.Errorf("the audit log has %+v", flows)
	}
}

func TestSecretCannotInjectALine(t *testing.T) {
	n := commonNode(t)
	const host = "lines.look.test"
	value := []byte("tok-lines-Jq7TzW2nHs5X\r\nX-Evil: 1")
	if _, err := n.API.PutSecret(testkit.Context(t), "lines", value, []string{host}); err != nil {
		t.Fatal(err)
	}
	n.canary.watch(string(value))
	b := n.newBox(t)
	b.rules(`[{"name":"api","hosts":["lines.look.test"],"policies":[{"name":"bearer","secrets":{"token":"lines"}}]}]`)
	if r := b.try("curl -sS -w ' %{http_code}' https://" + host + "/"); !strings.HasSuffix(r.Stdout, " 403") {
		t.Errorf("got %+v", r)
	}
	if got := n.servers.requests(host); len(got) != 0 {
		t.Errorf("it arrived: %+v", got)
	}
}

// retain holds the response of a request in its memory.
const retain = `
import time, urllib.request
response = urllib.request.urlopen("https://memory.look.test/mirror/document").read()
print("ready", flush=True)
time.sleep(1000)
`

// A sandbox that had a request authenticated has the secret nowhere: not in the
// memory of its programs, the guest among them, nor in environment or files.
func TestSandboxStateHasNoSecrets(t *testing.T) {
	const host = "memory.look.test"
	b, _ := bearer(t, "memory", host)
	b.rules(`[{"name":"api","hosts":["memory.look.test"],"policies":[{"name":"bearer","secrets":{"token":"memory"}}],"placeholders":{"API_TOKEN":"memory"}}]`)
	b.put("/tmp/keeps.py", strings.NewReader(retain))
	b.exec("curl -sS -o /var/tmp/response https://" + host + "/mirror/header -D /var/tmp/header")
	b.exec("setsid python3 /tmp/keeps.py >/var/tmp/ready 2>&1 & until [ -s /var/tmp/ready ]; do sleep 0.01; done; grep ready /var/tmp/ready")
	all := b.read()
	for _, there := range []string{
		"API_TOKEN=doze-placeholder-memory", // the environment
		`{"control":"` + control + `"`,      // the memory of the program
		"x-secret: ***",                     // the file
	} {
		if !bytes.Contains(all, []byte(there)) {
			t.Errorf("there is not even %s", there)
		}
	}
	if err := b.node.canary.search("the readable state of a sandbox", bytes.NewReader(all)); err != nil {
		t.Error(err)
	}
}
