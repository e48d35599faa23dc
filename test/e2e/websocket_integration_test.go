//go:build integration

package e2e

import (
	"testing"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/testkit"
)

func TestWebSocketsAreClosedAsGoingAway(t *testing.T) {
	n := ownNode(t)
	b := n.newWebBox(t)
	c := n.browser(t, "h1")
	for _, end := range []struct {
		name string
		do   func()
	}{
		{"stopped while it runs", b.stop},
		{"stopped while it sleeps", func() { b.sleep(); b.stop() }},
		{"the node ends", func() { b.must(n.Stop()) }},
	} {
		conn := b.dialWebSocket(c)
		b.echo(conn, "hello")
		end.do()
		if _, text, err := conn.Read(testkit.Context(t)); websocket.CloseStatus(err) != websocket.StatusGoingAway {
			t.Errorf("%s: heard %q, %v", end.name, text, err)
		}
	}
	b.must(n.Start()) // it removes its sandbox
}
