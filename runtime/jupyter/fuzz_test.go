package jupyter_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/runtime/jupyter"
	"github.com/doze-run/doze/runtime/jupyter/zmtp"
	"github.com/doze-run/doze/testkit"
)

// hostileKernel responds to each request to execute code with messages, and then ends the code.
type hostileKernel struct {
	key      jupyter.Signer
	messages func(shell, iopub *zmtp.Conn, request jupyter.Message)
	iopub    chan *zmtp.Conn // has one element once the client has connected
	serving  sync.WaitGroup
}

// dial connects to port 1, the shell, or port 2. The servers end with the connections.
func (h *hostileKernel) dial(ctx context.Context, port uint16) (net.Conn, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer l.Close()
	client, err := new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		return nil, err
	}
	server, err := l.Accept()
	if err != nil {
		client.Close()
		return nil, err
	}
	h.serving.Go(func() {
		socket := zmtp.Router
		if port == 2 {
			socket = zmtp.Publish
		}
		c, err := zmtp.Open(context.Background(), server, socket, zmtp.Limits{})
		if err != nil {
			return
		}
		defer c.Close()
		if port == 2 {
			if _, err := c.Read(); err == nil { // the subscription
				h.iopub <- c
			}
			_, _ = c.Read() // fails when the client leaves
			return
		}
		h.serveShell(c)
	})
	return client, nil
}

func (h *hostileKernel) serveShell(shell *zmtp.Conn) {
	var iopub *zmtp.Conn
	for {
		frames, err := shell.Read()
		if err != nil {
			return
		}
		request, _, err := h.key.Decode(frames)
		if err != nil {
			return
		}
		if iopub == nil {
			iopub = <-h.iopub
		}
		reply := "kernel_info_reply"
		if request.Header.Type == "execute_request" {
			reply = "execute_reply"
			h.messages(shell, iopub, request)
		}
		h.send(shell, reply, request.Header, []byte(`{"status":"ok"}`))
		h.send(iopub, "status", request.Header, []byte(`{"execution_state":"idle"}`))
	}
}

func (h *hostileKernel) send(to *zmtp.Conn, kind string, parent jupyter.Header, content []byte) {
	frames, err := h.key.Encode(jupyter.Message{Header: jupyter.NewHeader("m", "kernel", kind), Parent: parent, Content: content})
	if err == nil {
		_ = to.Write(context.Background(), frames...) // fails when the client has left
	}
}

var messageTypes = []string{"kernel_info_reply", "execute_reply", "status", "stream", "display_data", "update_display_data", "execute_result", "error", "clear_output", "other"}

// No sequence of signed messages breaks the client or outlasts it, and each execution ends. A
// message begins with three bytes: its type and socket, its parent, and the length of its content;
// spaces may follow, so that it counts in the budget.
func FuzzKernel(f *testing.F) {
	message := func(kind, socket, parent byte, content string) string {
		return string([]byte{kind | socket<<7, parent, byte(len(content))}) + content
	}
	for _, seed := range []string{
		message(3, 0, 0, `{"name":"stdout","text":"x"}`) + message(3, 0, 1, `{"name":"stderr","text":"y"}`) + message(4, 0, 0, `{"data":{"text/plain":"z"}}`),
		message(2, 0, 0, `{"execution_state":"idle"}`) + message(1, 1, 0, `{"status":"error","execution_count":-1}`) + message(3, 0, 0, `{"text":"late"}`),
		message(1, 0, 0, `{}`) + message(2, 1, 0, `{"execution_state":"idle"}`) + message(0, 1, 2, `{}`) + message(0, 0, 3, `[]`),
		message(7, 0, 0, `{"ename":"E","traceback":["a"]}`) + message(8, 0, 0, `{"wait":true}`) + message(6, 0, 0, `{"data":null}`) + message(9, 1, 0, ``),
		message(3, 0, 0x80, `{"text":"x"}`) + message(1, 1, 0x80, `{`), message(2, 0, 0x80, `[]`), message(3, 0, 0, "\xff"), message(5, 0, 4, `{}`),
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		c := jupyter.NewConnection(jupyter.Ports{Shell: 1, IOPub: 2})
		h := &hostileKernel{key: jupyter.Signer(c.Key), iopub: make(chan *zmtp.Conn, 1)}
		h.messages = func(shell, iopub *zmtp.Conn, request jupyter.Message) {
			for rest := input; len(rest) >= 3; {
				kind, parent, n := rest[0], rest[1], min(int(rest[2]), len(rest)-3)
				to := iopub
				if kind >= 1<<7 {
					to = shell
				}
				parents := []jupyter.Header{request.Header, {}, {ID: "another"}, {ID: request.Header.ID, Type: "other"}, {Session: request.Header.Session}}
				content := rest[3 : 3+n]
				if parent >= 1<<7 {
					content = append(bytes.Clone(content), bytes.Repeat([]byte(" "), 100<<10)...)
				}
				h.send(to, messageTypes[int(kind&0x7f)%len(messageTypes)], parents[int(parent&0x7f)%len(parents)], content)
				rest = rest[3+n:]
			}
		}
		budget := quota.New(1 << 20)
		k, err := jupyter.Connect(testkit.Context(t), c, h.dial, zmtp.Limits{Memory: budget})
		testkit.NoError(t, "Connect", err)
		for i := range 2 { // messages also arrive after the end of the first
			x, err := k.Execute(testkit.Context(t), fmt.Sprint(i), jupyter.Options{Limit: 4 << 10})
			for err == nil {
				var ev jupyter.Event
				if ev, err = x.Next(testkit.Context(t)); ev.Kind == jupyter.Complete {
					break
				}
				if _, err := json.Marshal(ev); err != nil {
					t.Errorf("%+v: %v", ev, err)
				}
			}
			if err != nil && !errors.Is(err, jupyter.ErrLost) {
				t.Fatalf("execution %d: %v", i, err)
			}
		}
		k.Close()
		h.serving.Wait()
		if used := budget.Used(); used != 0 {
			t.Errorf("%d bytes are still in use", used)
		}
	})
}
