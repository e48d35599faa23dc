package wakeproxy

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"testing"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// echo is a WebSocket server like a dev server's: it takes only its own origin.
func echo(w http.ResponseWriter, r *http.Request) {
	if r.Host != "localhost:3000" {
		http.Error(w, "unknown host "+r.Host, http.StatusForbidden)
		return
	}
	c, err := websocket.Accept(w, r, nil)
	if err != nil {
		return
	}
	defer c.CloseNow()
	for {
		kind, message, err := c.Read(r.Context())
		if err != nil {
			return
		}
		if string(message) == "die" {
			return
		}
		if err := c.Write(r.Context(), kind, message); err != nil {
			return
		}
	}
}

// dial opens a WebSocket as a page of the preview would.
func (f *front) dial() (*websocket.Conn, *http.Response) {
	f.t.Helper()
	c, res, err := websocket.Dial(f.t.Context(), f.URL+"/hmr", &websocket.DialOptions{
		Host:       previewHost(),
		HTTPHeader: http.Header{"Origin": {"http://" + previewHost()}},
	})
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { c.CloseNow() })
	return c, res
}

func say(t *testing.T, c *websocket.Conn, text string) {
	t.Helper()
	if err := c.Write(t.Context(), websocket.MessageText, []byte(text)); err != nil {
		t.Fatal(err)
	}
	if _, got, err := c.Read(t.Context()); err != nil || string(got) != text {
		t.Fatalf("got %q, %v", got, err)
	}
}

// a WebSocket passes the dev server's checks of Host and Origin,
// and is not sent to a login.
func TestWebSocketSeesTheSameHostAsHTTP(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, echo), sandbox.Port{}), Options{})
	c, _ := f.dial()
	say(t, c, "hello")
}

func TestSilentWebSocketHoldsNoLeaseAndSurvivesSleep(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, echo), sandbox.Port{}), Options{})
	f.node.sleep(sandbox.WakeWarm, nil)
	c, res := f.dial()
	if got := res.Header.Get("Doze-Wake"); got != "warm" {
		t.Errorf("Doze-Wake %q", got)
	}
	say(t, c, "one")
	testkit.Eventually(t, "the lease is released", func() bool { return f.node.leases.Load() == 0 })
	if f.node.touches.Load() == 0 {
		t.Error("bytes from the sandbox did not count as activity")
	}
	wakes := f.node.wakes.Load()
	f.node.sleep(sandbox.WakeWarm, nil)
	say(t, c, "two")
	if n := f.node.wakes.Load() - wakes; n != 1 {
		t.Errorf("a byte from the visitor woke it %d times", n)
	}
	testkit.Eventually(t, "the lease is released", func() bool { return f.node.leases.Load() == 0 })
}

func TestModeHoldKeepsTheLeaseOfAWebSocket(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, echo), sandbox.Port{WebSocket: sandbox.WebSocketKeepAwake}), Options{})
	c, _ := f.dial()
	say(t, c, "hello")
	if f.node.first.Load().back.Load() {
		t.Error("the request's lease was released while it is open")
	}
	c.Close(websocket.StatusNormalClosure, "")
	testkit.Eventually(t, "the lease is released", func() bool { return f.node.leases.Load() == 0 })
}

// A page that is closed in the background does not wake its sandbox.
func TestClosingAWebSocketDoesNotWake(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, echo), sandbox.Port{}), Options{})
	c, _ := f.dial()
	say(t, c, "hello")
	f.node.sleep(sandbox.WakeWarm, nil)
	c.Close(websocket.StatusGoingAway, "")
	testkit.Eventually(t, "the connection is gone", func() bool { return f.proxy.inFlight() == 0 })
	if n := f.node.wakes.Load(); n != 0 {
		t.Errorf("%d wakes", n)
	}
}

func TestStoppedSandboxEndsItsWebSocketsAndIsNotWokenByThem(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*fakeNode)
	}{
		{"stopped", func(n *fakeNode) { n.sb.State = sandbox.StateStopped }},
		{"started again", func(n *fakeNode) { n.sb.StartedAt = n.sb.StartedAt.Add(1) }},
		{"no longer exposed", func(n *fakeNode) { n.sb.Ports = nil }},
		{"destroyed", func(n *fakeNode) { n.sb.ID = "another00000" }},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFront(t, newFakeNode(t, app(t, echo), sandbox.Port{}), Options{})
			c, _ := f.dial()
			say(t, c, "hello")
			f.node.set(test.change)
			if err := c.Write(t.Context(), websocket.MessageText, []byte("anybody?")); err == nil {
				if _, _, err := c.Read(t.Context()); err == nil {
					t.Error("got a response")
				}
			}
			testkit.Eventually(t, "the connection is gone", func() bool { return f.proxy.inFlight() == 0 })
			if n := f.node.wakes.Load(); n != 0 {
				t.Errorf("%d wakes", n)
			}
		})
	}
}

// listening opens a WebSocket on which only the server speaks: what is sent to
// the channel.
func listening(t *testing.T) (*front, *websocket.Conn, chan<- string) {
	t.Helper()
	words := make(chan string, 1)
	f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
		if err != nil {
			return
		}
		defer c.CloseNow()
		for word := range words {
			if word == "end" {
				return
			}
			if c.Write(r.Context(), websocket.MessageText, []byte(word)) != nil {
				return
			}
		}
	}), sandbox.Port{}), Options{})
	t.Cleanup(func() { close(words) })
	c, _ := f.dial()
	words <- "one"
	if _, got, err := c.Read(t.Context()); err != nil || string(got) != "one" {
		t.Fatalf("got %q, %v", got, err)
	}
	return f, c, words
}

func TestListeningVisitorReceivesNothingFromAnUnexposedPort(t *testing.T) {
	f, c, words := listening(t)
	touches := f.node.touches.Load()
	f.node.set(func(n *fakeNode) { n.sb.Ports = nil })
	words <- "two"
	if _, got, err := c.Read(t.Context()); err == nil {
		t.Errorf("got %q", got)
	}
	testkit.Eventually(t, "the connection is gone", func() bool { return f.proxy.inFlight() == 0 })
	if n := f.node.touches.Load() - touches; n != 0 {
		t.Errorf("the bytes that were not forwarded counted as activity %d times", n)
	}
}

// Bytes that a server sends while it terminates are read after its end.
func TestVisitorReceivesTheLastBytesOfAStoppedSandbox(t *testing.T) {
	f, c, words := listening(t)
	f.node.set(func(n *fakeNode) { n.sb.State = sandbox.StateStopped })
	words <- "bye"
	if _, got, err := c.Read(t.Context()); err != nil || string(got) != "bye" {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestServersEndOfAWebSocketReachesTheVisitor(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, echo), sandbox.Port{}), Options{})
	c, _ := f.dial()
	if err := c.Write(t.Context(), websocket.MessageText, []byte("die")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Read(t.Context()); err == nil || t.Context().Err() != nil || websocket.CloseStatus(err) != -1 {
		t.Errorf("read gave %v; the server sent no close frame, and the sandbox runs", err)
	}
	c.CloseNow()
	testkit.Eventually(t, "the connection is gone", func() bool { return f.proxy.inFlight() == 0 })
}

func TestWebSocketIsClosedAsGoingAwayWhenItsNodeOrSandboxEnds(t *testing.T) {
	for name, end := range map[string]func(f *front, words chan<- string){
		"the node closes": func(f *front, _ chan<- string) { f.proxy.Close() },
		"the sandbox stops": func(f *front, words chan<- string) {
			f.node.set(func(n *fakeNode) { n.sb.State = sandbox.StateStopped })
			words <- "end"
		},
		"the sandbox is about to stop": func(f *front, words chan<- string) {
			f.node.set(func(n *fakeNode) { n.closing = true })
			words <- "end"
		},
		"the sandbox was thawed to be stopped": func(f *front, words chan<- string) {
			f.node.set(func(n *fakeNode) { n.sb.State = sandbox.StateAsleep })
			words <- "end"
		},
		"the sandbox is destroyed": func(f *front, words chan<- string) {
			f.node.set(func(n *fakeNode) { n.sb.ID = "another00000" })
			words <- "end"
		},
	} {
		t.Run(name, func(t *testing.T) {
			f, c, words := listening(t)
			end(f, words)
			if _, got, err := c.Read(t.Context()); websocket.CloseStatus(err) != websocket.StatusGoingAway {
				t.Errorf("read %q, %v", got, err)
			}
			testkit.Eventually(t, "the connection is gone", func() bool { return f.proxy.inFlight() == 0 })
		})
	}
}

// Frames are not mixed: a close frame within another one would be its payload.
func TestFramesFindsTheEndOfAFrame(t *testing.T) {
	long := append([]byte{0x82, 126, 1, 0}, make([]byte, 256)...)
	for name, test := range map[string]struct {
		sent    []byte
		between bool
	}{
		"nothing":              {nil, true},
		"text":                 {[]byte{0x81, 2, 'h', 'i'}, true},
		"two frames":           {[]byte{0x81, 2, 'h', 'i', 0x89, 0}, true},
		"half a header":        {[]byte{0x81}, false},
		"half a payload":       {[]byte{0x81, 2, 'h'}, false},
		"16 bits of length":    {long, true},
		"one byte less":        {long[:len(long)-1], false},
		"half a 16 bit length": {long[:3], false},
		"64 bits of length":    {[]byte{0x82, 127, 0, 0, 0, 0, 0, 0, 0, 1, 'x'}, true},
		"a length beyond all":  {[]byte{0x82, 127, 255, 255, 255, 255, 255, 255, 255, 255, 'x'}, false},
		"masked":               {[]byte{0x81, 0x81, 1, 2, 3, 4, 'x'}, true},
		"half a mask":          {[]byte{0x81, 0x81, 1, 2}, false},
		"a close frame":        {[]byte{0x88, 2, 3, 0xe8}, false},
		"more behind a close":  {[]byte{0x88, 0, 0x81, 0}, false},
	} {
		var whole, bytewise frames
		whole.scan(test.sent)
		for i := range test.sent {
			bytewise.scan(test.sent[i : i+1])
		}
		if whole.between() != test.between || bytewise.between() != test.between {
			t.Errorf("%s: whole %v, byte by byte %v, want %v", name, whole.between(), bytewise.between(), test.between)
		}
	}
}

// Even a visitor who neither speaks nor closes leaves nothing behind.
func TestServersEndOfAWebSocketDoesNotWaitForTheVisitor(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, echo), sandbox.Port{}), Options{})
	c, _ := f.dial()
	if err := c.Write(t.Context(), websocket.MessageText, []byte("die")); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the connection is gone", func() bool { return f.proxy.inFlight() == 0 })
}

// A frozen server never ends its side.
func TestTunnelOfALeftVisitorEndsAfterTheGrace(t *testing.T) {
	t.Parallel() // it waits for leaveGrace
	stays := make(chan struct{})
	f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		<-stays
	}), sandbox.Port{}), Options{})
	defer close(stays)
	conn, err := net.Dial("tcp", f.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	io.WriteString(conn, "GET / HTTP/1.1\r\nHost: "+previewHost()+"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	if status, err := bufio.NewReader(conn).ReadString('\n'); err != nil || status != "HTTP/1.1 101 Switching Protocols\r\n" {
		t.Fatalf("%q, %v", status, err)
	}
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the connection is gone", func() bool { return f.proxy.inFlight() == 0 })
}

func TestClosingATunnelEndsTheWakeItWaitsFor(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, echo), sandbox.Port{}), Options{})
	c, _ := f.dial()
	say(t, c, "hello")
	f.node.sleep(sandbox.WakeWarm, make(chan struct{})) // never ends
	if err := c.Write(t.Context(), websocket.MessageText, []byte("wake up")); err != nil {
		t.Fatal(err)
	}
	f.proxy.Close()
	testkit.Eventually(t, "the connection is gone", func() bool { return f.proxy.inFlight() == 0 })
}

func TestWebSocketToModeNeverDoesNotWake(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, echo), sandbox.Port{Wake: sandbox.WakeNever}), Options{})
	c, _ := f.dial()
	say(t, c, "hello")
	f.node.sleep(sandbox.WakeWarm, nil)
	c.Write(t.Context(), websocket.MessageText, []byte("anybody?"))
	testkit.Eventually(t, "the connection is gone", func() bool { return f.proxy.inFlight() == 0 })
	if n := f.node.wakes.Load(); n != 0 {
		t.Errorf("%d wakes", n)
	}
}

func TestIsCloseFrame(t *testing.T) {
	for name, test := range map[string]struct {
		frame []byte
		want  bool
	}{
		"going away":  {[]byte{0x88, 0x82, 1, 2, 3, 4, 5, 6}, true},
		"empty":       {[]byte{0x88, 0x80, 1, 2, 3, 4}, true},
		"text":        {[]byte{0x81, 0x82, 1, 2, 3, 4, 5, 6}, false},
		"not masked":  {[]byte{0x88, 0x02, 1, 2}, false},
		"more behind": {[]byte{0x88, 0x80, 1, 2, 3, 4, 0x81}, false},
		"nothing":     {nil, false},
	} {
		if got := isCloseFrame(test.frame); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
