package zmtp_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"

	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/runtime/jupyter/zmtp"
	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// greeting is a peer's, of version 3.1, followed by its READY.
const greeting = "\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x01NULL\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00" +
	"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

const ready = "\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"

// peer is a connection whose peer sends a text and closes it. Conn may be nil.
type peer struct {
	net.Conn
	sent io.Reader
}

func (p *peer) Read(b []byte) (int, error)  { return p.sent.Read(b) }
func (p *peer) Write(b []byte) (int, error) { return len(b), nil }

// open opens a connection to a peer that sends text.
func open(t testing.TB, text string, budget *quota.Pool) (*zmtp.Conn, error) {
	t.Helper()
	local, remote := net.Pipe()
	t.Cleanup(func() { local.Close(); remote.Close() })
	return zmtp.Open(t.Context(), &peer{local, strings.NewReader(text)}, zmtp.Dealer, zmtp.Limits{Memory: budget})
}

func TestPeersExchangeMessages(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testkit.NoError(t, "Listen", err)
	defer l.Close()
	accepted := make(chan *zmtp.Conn, 1)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		c, _ := zmtp.Open(context.Background(), conn, zmtp.Router, zmtp.Limits{})
		accepted <- c
	}()
	conn, err := net.Dial("tcp", l.Addr().String())
	testkit.NoError(t, "Dial", err)
	dealer, err := zmtp.Open(testkit.Context(t), conn, zmtp.Dealer, zmtp.Limits{})
	testkit.NoError(t, "Open", err)
	defer dealer.Close()
	router := testkit.Receive(t, "the other end", accepted)
	defer router.Close()
	for _, frames := range [][][]byte{
		{[]byte("one")},
		{nil, []byte("two"), nil},
		{bytes.Repeat([]byte("x"), 255), bytes.Repeat([]byte("y"), 256), bytes.Repeat([]byte("z"), 1<<20)},
	} {
		sent := make(chan error, 1)
		go func() { sent <- dealer.Write(testkit.Context(t), frames...) }()
		got, err := router.Read()
		testkit.NoError(t, "Read", err)
		testkit.NoError(t, "Write", testkit.Receive(t, "the end of a write", sent))
		if len(got) != len(frames) {
			t.Fatalf("%d frames", len(got))
		}
		for i := range got {
			if !bytes.Equal(got[i], frames[i]) {
				t.Errorf("frame %d has %d bytes", i, len(got[i]))
			}
		}
	}
	dealer.Close()
	if _, err := router.Read(); err != io.EOF {
		t.Errorf("after the end: %v", err)
	}
}

func TestInvalidHandshakeIsRefused(t *testing.T) {
	for name, text := range map[string]string{
		"no ZMTP":          "HTTP/1.1 400 Bad Request\r\n" + strings.Repeat("x", 64),
		"version 2":        strings.Replace(greeting, "\x7f\x03", "\x7f\x01", 1) + ready,
		"other mechanism":  strings.Replace(greeting, "NULL\x00", "PLAIN", 1) + ready,
		"no READY":         greeting + "\x04\x06\x05ERROR",
		"no socket":        greeting + "\x04\x06\x05READY",
		"other socket":     greeting + strings.Replace(ready, "ROUTER", "DEALER", 1),
		"property cut off": greeting + "\x04\x08\x05READY\x0bS",
		"value cut off":    greeting + "\x04\x17\x05READY\x0bSocket-Type\xff\xff\xff\xffR",
		"READY too large":  greeting + "\x06\x00\x00\x00\x00\x00\x00\xff\xff" + strings.Repeat("x", 1<<16),
		"message":          greeting + "\x00\x01x",
		"end":              greeting[:20],
	} {
		if _, err := open(t, text, nil); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// The clock advances only while Read waits for the rate.
func TestPeerIsReadAtTheRate(t *testing.T) {
	const perSecond, burst = 1 << 20, 1 << 20
	for _, tt := range []struct {
		name     string
		messages int
		text     string // of one message
		delayed  bool
	}{
		{"within the burst", 400, "\x00\x04text", false},
		{"small messages", 10_000, "\x00\x04text", true},
		{"large messages", 4, "\x02\x00\x00\x00\x00\x00\x40\x00\x00" + strings.Repeat("x", 4<<20), true},
		{"a discarded message", 1, "\x02\x00\x00\x00\x00\x02\x00\x00\x00" + strings.Repeat("x", 32<<20), true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				conn := &peer{sent: strings.NewReader(greeting + ready + strings.Repeat(tt.text, tt.messages))}
				c, err := zmtp.Open(t.Context(), conn, zmtp.Dealer, zmtp.Limits{Rate: rate.NewLimiter(perSecond, burst)})
				testkit.NoError(t, "Open", err)
				began := time.Now()
				for range tt.messages {
					if _, err := c.Read(); err != nil && err != zmtp.ErrTooLarge {
						t.Fatal(err)
					}
				}
				sent := tt.messages * (len(tt.text) + zmtp.MessageCost)
				least := time.Duration(max(0, sent-burst)) * time.Second / perSecond
				if took := time.Since(began); took < least-time.Millisecond || took > least+time.Second/10 {
					t.Errorf("%d bytes took %s, want %s", sent, took, least)
				}
				if delayed := c.Delayed(); delayed > 0 != tt.delayed {
					t.Errorf("%d messages in a row were delayed", delayed)
				}
			})
		})
	}
}

func TestCloseEndsTheWaitForTheRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		local, remote := net.Pipe()
		defer remote.Close()
		conn := &peer{local, strings.NewReader(greeting + ready + strings.Repeat("\x00\x04text", 100))}
		c, err := zmtp.Open(t.Context(), conn, zmtp.Dealer, zmtp.Limits{Rate: rate.NewLimiter(1, 64<<10)})
		testkit.NoError(t, "Open", err)
		began := time.Now()
		ended := make(chan error, 1)
		go func() {
			for {
				if _, err := c.Read(); err != nil {
					ended <- err
					return
				}
			}
		}()
		synctest.Wait() // until it waits
		c.Close()
		if err := <-ended; err != io.EOF || time.Since(began) > 0 {
			t.Errorf("it ended after %s: %v", time.Since(began), err)
		}
	})
}

func TestMessageBeyondTheBoundsIsDiscarded(t *testing.T) {
	large := "\x02\x00\x00\x00\x00\x01\x00\x00\x01" + strings.Repeat("x", zmtp.MaxMessage+1)
	for name, text := range map[string]string{
		"frame":   large,
		"frames":  strings.Repeat("\x01\x01x", zmtp.MaxFrames) + "\x00\x01x",
		"message": "\x03\x00\x00\x00\x00\x00\x80\x00\x00" + strings.Repeat("x", 8<<20) + "\x02\x00\x00\x00\x00\x00\x80\x00\x01" + strings.Repeat("x", 8<<20+1),
	} {
		c, err := open(t, greeting+ready+text+"\x00\x04next", nil)
		testkit.NoError(t, "Open", err)
		_, err = c.Read()
		testkit.ErrorIs(t, name, err, zmtp.ErrTooLarge)
		if frames, err := c.Read(); err != nil || string(frames[0]) != "next" {
			t.Errorf("%s: then %q, %v", name, frames, err)
		}
	}
}

// A frame's length alone takes no memory.
func TestDeclaredLengthIsNotAllocated(t *testing.T) {
	for _, length := range []string{"\x00\x00\x00\x00\x00\xff\xff\xff", "\x7f\xff\xff\xff\xff\xff\xff\xff", "\xff\xff\xff\xff\xff\xff\xff\xff"} {
		c, err := open(t, greeting+ready+"\x02"+length+"x", nil)
		testkit.NoError(t, "Open", err)
		if n := testing.AllocsPerRun(1, func() { _, err = c.Read() }); n > 64 {
			t.Errorf("%v allocations", n)
		}
		if err == nil {
			t.Error("no error")
		}
	}
}

func TestCommandsBetweenMessagesAreBounded(t *testing.T) {
	ping := "\x04\x07\x04PING\x00\x00"
	c, err := open(t, greeting+ready+strings.Repeat(ping, 10)+"\x00\x04next"+strings.Repeat(ping, 100), nil)
	testkit.NoError(t, "Open", err)
	if frames, err := c.Read(); err != nil || string(frames[0]) != "next" {
		t.Errorf("%q, %v", frames, err)
	}
	if _, err := c.Read(); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("after 100 commands: %v", err)
	}
}

func TestWriteEndsWithItsContext(t *testing.T) {
	local, remote := net.Pipe() // which has no buffer
	defer remote.Close()
	opened := make(chan *zmtp.Conn, 1)
	go func() {
		c, _ := zmtp.Open(context.Background(), local, zmtp.Dealer, zmtp.Limits{})
		opened <- c
	}()
	go func() { _, _ = remote.Write([]byte(greeting + ready)) }()
	buf := make([]byte, 64+2+1+5+1+11+4+6)
	_, err := io.ReadFull(remote, buf)
	testkit.NoError(t, "read the handshake", err)
	c := testkit.Receive(t, "the connection", opened)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Write(ctx, []byte("x")); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if _, err := c.Read(); err == nil {
		t.Error("the connection is still open")
	}
}

// Whatever a peer sends, the client neither panics nor holds more than the bounds allow.
func FuzzPeer(f *testing.F) {
	f.Add([]byte("\x01\x02id\x00\x03end"))
	f.Add([]byte("\x02\xff\xff\xff\xff\xff\xff\xff\xffx"))
	f.Add([]byte("\x04\x07\x04PING\x00\x00\x00\x01x"))
	f.Fuzz(func(t *testing.T, sent []byte) {
		budget := quota.New(1 << 20)
		c, err := open(t, greeting+ready+string(sent), budget)
		if err != nil {
			t.Fatal(err)
		}
		for err == nil || err == zmtp.ErrTooLarge {
			var frames [][]byte
			frames, err = c.Read()
			size := 0
			for _, frame := range frames {
				size += len(frame)
			}
			if len(frames) > zmtp.MaxFrames || size > len(sent) {
				t.Fatalf("%d frames with %d bytes", len(frames), size)
			}
		}
		if used := budget.Used(); used != 0 {
			t.Errorf("%d bytes are still in use", used)
		}
	})
}
