package main

import (
	"bytes"
	"context"
	"fmt"
	"strings"

	"github.com/coder/websocket"
)

// mib is more than any buffer on the way has.
const mib = 1 << 20

// message of a WebSocket, or how it ended.
type message struct {
	kind websocket.MessageType
	data []byte
	err  error
}

// webSocket talks to a server that echoes until it receives "bye". It prints the
// protocol and the extensions that were agreed on.
func webSocket(ctx context.Context, args []string) error {
	c, resp, err := websocket.Dial(ctx, strings.Replace(args[0], "https:", "wss:", 1), &websocket.DialOptions{
		Subprotocols: []string{"other", "echo"}, CompressionMode: websocket.CompressionContextTakeover,
	})
	if err != nil {
		return err
	}
	defer c.CloseNow()
	c.SetReadLimit(2 * mib)
	fmt.Println(c.Subprotocol(), resp.Header.Get("Sec-WebSocket-Extensions"))
	// A pong arrives while the client reads.
	messages := make(chan message, 1)
	go func() { // ends with the connection
		for m := (message{}); m.err == nil; messages <- m {
			m.kind, m.data, m.err = c.Read(ctx)
		}
	}()
	for _, m := range []message{
		{kind: websocket.MessageText, data: []byte("hello ö")},
		{kind: websocket.MessageText},
		{kind: websocket.MessageBinary, data: []byte{0, 255, 13, 10}},
		{kind: websocket.MessageBinary, data: bytes.Repeat([]byte("0123456789abcde\n"), mib/16)},
	} {
		if err := c.Write(ctx, m.kind, m.data); err != nil {
			return err
		}
		if back := <-messages; back.err != nil || back.kind != m.kind || !bytes.Equal(back.data, m.data) {
			return fmt.Errorf("%d bytes came back as %d of kind %s: %w", len(m.data), len(back.data), back.kind, back.err)
		}
	}
	if err := c.Ping(ctx); err != nil {
		return err
	}
	if err := c.Write(ctx, websocket.MessageText, []byte("bye")); err != nil {
		return err
	}
	if err := (<-messages).err; websocket.CloseStatus(err) != 4321 || !strings.Contains(err.Error(), "as you wish") {
		return fmt.Errorf("it was closed as %w", err)
	}
	return nil
}
