//go:build integration

package egress

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

// logHas waits until the node's log contains a text.
func (n *node) logHas(t *testing.T, text string) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprintf("the node's log contains %q", text), func() bool {
		all, err := io.ReadAll(n.Output())
		return err == nil && strings.Contains(string(all), text)
	}, n.Log)
}

// Libraries may log what broken responses contain; the node's log shows none of it, which
// the search of the node's log when it ends verifies too.
func TestLogOmitsBrokenResponsesThatEchoASecret(t *testing.T) {
	b, secret := bearer(t, "logged", "logged.old.test")
	for _, form := range []string{"204", "304", "between", "trailer", "trailers", "chunk", "line", "protocol", "cut"} {
		b.try("curl -sS https://logged.old.test/broken/" + form)
	}
	for _, reason := range []string{"is not valid HTTP", "closed the connection before"} {
		b.audited(client.FlowFilter{Host: "logged.old.test", Kind: "request", Verdict: "error"}, reason)
	}
	if err := b.node.canary.search("the node's log", b.node.Output()); err != nil {
		t.Error(err)
	}
	all, err := io.ReadAll(b.node.Output())
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(all), secret) {
		t.Error("the log shows the secret")
	}
}

// brokenServer breaks off every response in the middle of a chunk.
const brokenServer = `
import socket
s = socket.create_server(('', 3000))
while True:
    c, _ = s.accept()
    c.recv(65536)
    c.sendall(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\ncanary-of-the-server\r\n')
    c.close()
`

func TestAbortedPreviewsAreNotLogged(t *testing.T) {
	b := commonNode(t).newBox(t)
	b.put("/tmp/server.py", strings.NewReader(brokenServer))
	ctx := testkit.Context(t)
	if _, err := b.node.API.StartProcess(ctx, b.id, types.StartProcessRequest{Command: types.Command{Command: "python3 /tmp/server.py"}}); err != nil {
		t.Fatal(err)
	}
	port, err := b.node.API.Expose(ctx, b.id, types.ExposePortRequest{Port: 3000})
	if err != nil {
		t.Fatal(err)
	}
	for _, proto := range []string{"h1", "h2"} {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, port.URL+"page?key=canary-of-the-query", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Referer", "https://example.test/canary-of-the-referer")
		visitor := b.node.Client(proto)
		testkit.Eventually(t, "the preview breaks off", func() bool {
			res, err := visitor.Do(req)
			if err != nil {
				return true
			}
			defer res.Body.Close()
			_, err = io.ReadAll(res.Body)
			return err != nil
		})
		visitor.CloseIdleConnections()
	}
	b.node.logHas(t, "aborting with incomplete response")
	all, err := io.ReadAll(b.node.Output())
	if err != nil {
		t.Fatal(err)
	}
	label, _, _ := strings.Cut(strings.TrimPrefix(port.URL, "https://"), ".")
	token := label[strings.LastIndexByte(label, '-')+1:]
	for _, canary := range []string{token, "canary-of-the-query", "canary-of-the-referer", "canary-of-the-server"} {
		if strings.Contains(string(all), canary) {
			t.Errorf("the log shows %s", canary)
		}
	}
}
