//go:build integration

package egress

import (
	"strings"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

// speak sends requests as they are, each on a connection of its own: over TLS to hosts of
// *.look.test and without elsewhere. It returns the responses by the names of the requests.
func (b *box) speak(host string, requests map[string]string) map[string]string {
	b.t.Helper()
	argv := []string{"python3", "/tmp/say.py", "tcp", host, "80"}
	if strings.HasSuffix(host, ".look.test") {
		argv = []string{"python3", "/tmp/say.py", "tls", host, "443", host}
	}
	ctx := testkit.Context(b.t)
	var speaking errgroup.Group
	speaking.SetLimit(8) // each waits most of the time, for more of the response
	var mu sync.Mutex
	responses := map[string]string{}
	for name, request := range requests {
		speaking.Go(func() error {
			r, err := b.node.API.Exec(ctx, b.id, client.ExecRequest{Command: types.Command{Argv: argv}, Stdin: []byte(request)})
			mu.Lock()
			defer mu.Unlock()
			b.checked(strings.Join(argv, " "), r)
			responses[name] = r.Stdout + r.Stderr
			return err
		})
	}
	if err := speaking.Wait(); err != nil {
		b.t.Fatal(err)
	}
	return responses
}

// Requests that servers understand in several ways: a rule that denies a path
// holds in all of them.
func TestRequestsAreNotSmuggledPastARule(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t).canSay()
	b.rules(`[{"name":"paths","hosts":["smuggle.look.test","smuggle.plain.test"],"paths":["/forbidden","/forbidden/**"],"action":"deny","reason":"not there"}]`)
	for _, host := range []string{"smuggle.look.test", "smuggle.plain.test"} {
		head := func(lines ...string) string {
			return "POST / HTTP/1.1\r\nHost: " + host + "\r\n" + strings.Join(lines, "\r\n") + "\r\n\r\n"
		}
		second := "GET /forbidden HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n"
		for name, got := range b.speak(host, map[string]string{
			"CL and TE":              head("Content-Length: 4", "Transfer-Encoding: chunked") + "0\r\n\r\n" + second,
			"TE and CL":              head("Transfer-Encoding: chunked", "Content-Length: 6") + "0\r\n\r\n" + second,
			"TE that is none":        head("Content-Length: 5", "Transfer-Encoding: xchunked") + "0\r\n\r\n" + second,
			"TE that is none alone":  head("Transfer-Encoding: xchunked") + "0\r\n\r\n" + second,
			"TE with a tab":          head("Content-Length: 5", "Transfer-Encoding:\tchunked") + "0\r\n\r\n" + second,
			"TE with a space before": head("Content-Length: 5", "Transfer-Encoding : chunked") + "0\r\n\r\n" + second,
			"TE on a second line":    head("Content-Length: 5", "X: y\r\n Transfer-Encoding: chunked") + "0\r\n\r\n" + second,
			"two TEs":                head("Transfer-Encoding: chunked", "Transfer-Encoding: identity", "Content-Length: 5") + "0\r\n\r\n" + second,
			"two CLs":                head("Content-Length: 0", "Content-Length: 5") + second,
			"CL with a sign":         head("Content-Length: +0") + second,
			"CL in words":            head("Content-Length: 0, 5") + second,
			"line feeds":             strings.ReplaceAll(head("Content-Length: 0"), "\r\n", "\n") + second,
			"a chunk's extension":    head("Transfer-Encoding: chunked") + "5;\n" + "xxxxx\r\n0\r\n\r\n" + second,
			"a trailer":              head("Transfer-Encoding: chunked", "Trailer: Content-Length") + "0\r\nContent-Length: 5\r\n\r\n" + second,
			"a header in a header":   "GET / HTTP/1.1\r\nHost: " + host + "\r\nX: a\nGET /forbidden HTTP/1.1\r\n\r\n",
			"an obsolete line":       "GET / HTTP/1.1\r\nHost: " + host + "\rX: y\r\n\r\n" + second,
			"a Host too many":        "GET / HTTP/1.1\r\nHost: " + host + "\r\nHost: hidden.look.test\r\nConnection: close\r\n\r\n",
			"HTTP/0.9":               "GET /forbidden\r\n\r\n",
			"HTTP/1.0":               "GET /forbidden HTTP/1.0\r\nHost: " + host + "\r\n\r\n",
			"a path in a path":       "GET /x/../forbidden HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n",
			"an encoded path":        "GET /%66orbidden HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n",
			"two slashes":            "GET //forbidden HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n",
			"a method of its own":    "get /forbidden HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n",
			"overridden":             "POST / HTTP/1.1\r\nHost: " + host + "\r\nX-HTTP-Method-Override: GET\r\nX-Original-URL: /forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
		}) {
			if strings.Contains(got, "TimeoutError") {
				t.Errorf("%s to %s: %s", name, host, got)
			}
		}
		for _, got := range n.servers.requests(host) {
			if strings.Contains(got.URI, "orbidden") || strings.Contains(got.Body, "orbidden") {
				t.Errorf("%s got %+v", host, got)
			}
		}
		for _, reason := range []string{"not there", "ambiguous framing", "Unsupported transfer encoding", "malformed header", "malformed Content-Length"} {
			b.audited(client.FlowFilter{Host: host, Kind: "request"}, reason)
		}
	}
	if got := n.servers.requests("hidden.look.test"); len(got) != 0 {
		t.Errorf("the hidden host got %+v", got)
	}
}

// The node does not act as a proxy: it is the host itself.
func TestHostIsNotAProxy(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t).canSay()
	for _, host := range []string{"proxy.look.test", "proxy.plain.test"} {
		cases := []struct{ name, request, status, reason string }{
			{"absolute", "GET http://hidden.plain.test/ HTTP/1.1\r\nHost: " + host, "421", "the connection is to " + host},
			{"absolute of another Host", "GET http://hidden.plain.test/ HTTP/1.1\r\nHost: hidden.plain.test", "421", "the connection is to " + host},
			{"another scheme", "GET gopher://" + host + "/ HTTP/1.1\r\nHost: " + host, "421", "the connection is to " + host},
			{"CONNECT", "CONNECT hidden.plain.test:443 HTTP/1.1\r\nHost: hidden.plain.test:443", "4", ""},
			{"CONNECT to itself", "CONNECT " + host + ":443 HTTP/1.1\r\nHost: " + host + ":443", "4", ""},
			{"upgrade", "GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: Upgrade\r\nUpgrade: tunnel", "403", "only WebSocket"},
			{"upgrade in addition to WebSocket", "GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: Upgrade\r\nUpgrade: websocket, tunnel", "403", "only WebSocket"},
			{"no Host", "GET / HTTP/1.1\r\nX: y", "400", "missing required Host header"},
			{"user in Host", "GET / HTTP/1.1\r\nHost: " + host + "@hidden.plain.test", "4", ""},
		}
		requests := map[string]string{}
		for _, c := range cases {
			requests[c.name] = c.request + "\r\n\r\n"
		}
		responses := b.speak(host, requests)
		for _, c := range cases {
			got := responses[c.name]
			if status, _ := strings.CutPrefix(got, "HTTP/1.1 "); !strings.HasPrefix(status, c.status) || !strings.Contains(got, c.reason) {
				t.Errorf("%s to %s: %s", c.name, host, got)
			}
			if c.reason != "" {
				b.audited(client.FlowFilter{Host: host, Kind: "request"}, c.reason)
			}
		}
		if got := n.servers.requests(host); len(got) != 0 {
			t.Errorf("%s got %+v", host, got)
		}
	}
	if got := n.servers.requests("hidden.plain.test"); len(got) != 0 {
		t.Errorf("the hidden host got %+v", got)
	}
}

// A redirect is decided again, and the secret does not go along.
func TestRedirectIsDecidedByTheRules(t *testing.T) {
	b, value := bearer(t, "redirected", "redirects.look.test")
	n := b.node
	b.rules(`[
		{"name":"api","hosts":["redirects.look.test"],"policies":[{"name":"bearer","secrets":{"token":"redirected"}}]},
		{"name":"no","hosts":["denied.look.test"],"action":"deny","reason":"not this one"}
	]`)
	r := b.try("curl -sS -L --location-trusted --max-time 20 'https://redirects.look.test/elsewhere?to=https://denied.look.test/'")
	if r.ExitCode != 6 {
		t.Errorf("got %+v", r)
	}
	b.audited(client.FlowFilter{Host: "denied.look.test", Kind: "dns"}, "not this one")
	b.exec("curl -sSf -L --location-trusted -H 'Authorization: Bearer mine' 'https://redirects.look.test/elsewhere?to=https://allowed.look.test/'")
	for _, got := range n.servers.requests("allowed.look.test") {
		if strings.Contains(got.Header.Get("Authorization"), value) {
			t.Errorf("the secret came along: %+v", got)
		}
	}
	if len(n.servers.requests("allowed.look.test")) != 1 || len(n.servers.requests("denied.look.test")) != 0 {
		t.Error("the redirects went elsewhere")
	}
}

// Offers of other ways to a host do not reach the client.
func TestAlternativeServicesAreNotOffered(t *testing.T) {
	b := commonNode(t).newBox(t)
	r := b.try("curl -sSi https://alternative.look.test/elsewhere?to=/x")
	if !strings.Contains(r.Stdout, "location: /x") || strings.Contains(strings.ToLower(r.Stdout), "alt-svc") {
		t.Errorf("got %+v", r)
	}
}
