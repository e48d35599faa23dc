package wakeproxy

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

// streaming is an exchange whose response has begun, without a network: time in
// these tests is synctest's.
type streaming struct {
	t    *testing.T
	node *fakeNode
	x    *exchange
	// The server's end of the response, and what the visitor has of it.
	server  *io.PipeWriter
	visitor io.Reader
	// The visitor's end of the request's body, and what the server gets of it.
	upload *io.PipeWriter
	body   io.Reader
}

const streamSleepAfter = time.Minute

func newStreaming(t *testing.T, port sandbox.Port) *streaming {
	t.Helper()
	node := newFakeNode(t, "", port)
	node.sb.SleepAfter = sandbox.Duration(streamSleepAfter)
	proxy := New(node, node.log.Logger())
	t.Cleanup(proxy.Close)
	x := NewHandler(proxy, nil, Options{}).newExchange(httptest.NewRequest("POST", "/", nil), testID, node.sb.Ports[0])
	if err := x.acquire(t.Context()); err != nil {
		t.Fatal(err)
	}
	s := &streaming{t: t, node: node, x: x}
	var response, request io.ReadCloser
	response, s.server = io.Pipe()
	request, s.upload = io.Pipe()
	res := &http.Response{Body: response}
	x.stream(t.Context(), res)
	s.visitor, s.body = res.Body, &requestBody{body: body{ReadCloser: request, x: x, ctx: t.Context()}}
	return s
}

// pass sends a byte in one direction and receives it.
func (s *streaming) pass(from io.Writer, to io.Reader) error {
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		from.Write([]byte("x"))
	}()
	_, err := io.ReadFull(to, make([]byte, 1))
	<-sent
	return err
}

func (s *streaming) mustPass(from io.Writer, to io.Reader) {
	s.t.Helper()
	if err := s.pass(from, to); err != nil {
		s.t.Fatal(err)
	}
}

// fallSilent lets the stream be silent for sleep_after.
func (s *streaming) fallSilent() {
	s.t.Helper()
	time.Sleep(streamSleepAfter)
	synctest.Wait()
	s.wantLeases(0)
}

func (s *streaming) wantLeases(n int64) {
	s.t.Helper()
	if got := s.node.leases.Load(); got != n {
		s.t.Fatalf("%d leases after %s of silence, want %d", got, time.Since(time.Unix(0, s.x.lastByte.Load())), n)
	}
}

func TestStreamHoldsItsLeaseWhileBytesPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStreaming(t, sandbox.Port{})
		for range 5 {
			time.Sleep(streamSleepAfter - 1)
			s.wantLeases(1)
			s.mustPass(s.server, s.visitor)
			time.Sleep(streamSleepAfter - 1)
			s.wantLeases(1)
			s.mustPass(s.upload, s.body)
		}
		if n := s.node.acquired.Load(); n != 1 {
			t.Errorf("%d leases were acquired, want 1", n)
		}
		s.x.cleanUp()
		s.wantLeases(0)
	})
}

func TestSilentStreamReleasesItsLeaseAndItsNextByteAcquiresAnother(t *testing.T) {
	for name, byteOf := range map[string]func(*streaming) (io.Writer, io.Reader){
		"the server":  func(s *streaming) (io.Writer, io.Reader) { return s.server, s.visitor },
		"the visitor": func(s *streaming) (io.Writer, io.Reader) { return s.upload, s.body },
	} {
		for _, state := range []sandbox.State{sandbox.StateRunning, sandbox.StateAsleep} {
			t.Run(name+" while "+string(state), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newStreaming(t, sandbox.Port{})
					from, to := byteOf(s)
					for range 2 {
						s.fallSilent()
						if state == sandbox.StateAsleep {
							s.node.sleep(sandbox.WakeWarm, nil)
						}
						s.mustPass(from, to)
						s.wantLeases(1)
						if sb, _ := s.node.ByID(testID); sb.State != sandbox.StateRunning {
							t.Errorf("after a byte the sandbox is %s", sb.State)
						}
					}
					s.x.cleanUp()
					s.wantLeases(0)
				})
			})
		}
	}
}

// A server that is frozen cannot send what comes after what is in its socket.
func TestReadingAfterASilenceWakesTheSandbox(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStreaming(t, sandbox.Port{})
		s.fallSilent() // no reads meanwhile
		s.node.sleep(sandbox.WakeWarm, nil)
		go s.visitor.Read(make([]byte, 1))
		synctest.Wait()
		s.wantLeases(1)
		if n := s.node.wakes.Load(); n != 1 {
			t.Errorf("%d wakes, want 1", n)
		}
		s.server.Close()
		s.x.cleanUp()
	})
}

func TestStreamDoesNotWakeAnotherContainer(t *testing.T) {
	for _, test := range []struct {
		name   string
		port   sandbox.Port
		change func(*fakeNode)
		want   error // of a read
	}{
		{"stopped", sandbox.Port{}, func(n *fakeNode) { n.sb.State = sandbox.StateStopped }, io.EOF},
		{"started again and asleep", sandbox.Port{}, func(n *fakeNode) {
			n.sb.State, n.sb.StartedAt = sandbox.StateAsleep, time.Now()
		}, io.EOF},
		{"no longer exposed", sandbox.Port{}, func(n *fakeNode) { n.sb.State, n.sb.Ports = sandbox.StateAsleep, nil }, errTunnelEnded},
		{"destroyed", sandbox.Port{}, func(n *fakeNode) { n.sb.ID = "another00000" }, errTunnelEnded},
		{"never to be woken", sandbox.Port{Wake: sandbox.WakeNever}, func(n *fakeNode) { n.sb.State = sandbox.StateAsleep }, sandbox.ErrNotRunning},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStreaming(t, test.port)
				s.fallSilent()
				s.node.set(test.change)
				s.server.Close() // as the kernel does when a container ends
				if _, err := s.visitor.Read(make([]byte, 1)); !errors.Is(err, test.want) {
					t.Errorf("read: %v, want %v", err, test.want)
				}
				if n := s.node.wakes.Load(); n != 0 {
					t.Errorf("%d wakes", n)
				}
				s.x.cleanUp()
				s.wantLeases(0)
			})
		})
	}
}

func TestStreamOfASandboxThatNeverSleepsHoldsItsLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStreaming(t, sandbox.Port{})
		s.node.set(func(n *fakeNode) { n.sb.SleepAfter = 0 })
		time.Sleep(100 * streamSleepAfter)
		s.wantLeases(1)
		// One that is given a time while the stream is open gets it.
		s.node.set(func(n *fakeNode) { n.sb.SleepAfter = sandbox.Duration(time.Second) })
		time.Sleep(maxSilenceCheck)
		synctest.Wait()
		s.wantLeases(0)
		s.x.cleanUp()
	})
}

// wrappedBody must be neither read nor closed.
type wrappedBody struct{ t *testing.T }

func (b wrappedBody) Read([]byte) (int, error) {
	b.t.Error("the wrapper was read")
	return 0, io.EOF
}

func (b wrappedBody) Close() error { return nil }

// The body in which Caddy's reverse proxy wraps the visitor's is not safe for a Close
// during a Read, which is how http.Transport ends a body whose response is over.
func TestBodyIsReadWithoutTheReverseProxysWrapper(t *testing.T) {
	var got []byte
	server := app(t, func(_ http.ResponseWriter, r *http.Request) { got, _ = io.ReadAll(r.Body) })
	node := newFakeNode(t, server, sandbox.Port{})
	proxy := New(node, node.log.Logger())
	t.Cleanup(proxy.Close)
	next := func(w http.ResponseWriter, r *http.Request) error {
		r.Body = wrappedBody{t}
		return reverseProxy(proxy)(w, r)
	}
	r := httptest.NewRequest("POST", "http://"+previewHost(), strings.NewReader("hello"))
	w := httptest.NewRecorder()
	NewHandler(proxy, next, Options{Domains: []string{domain}}).ServeHTTP(w, r)
	if w.Code != http.StatusOK || string(got) != "hello" {
		t.Errorf("status %d, the server got %q", w.Code, got)
	}
}

func TestBodyIsClosedOnceItWasRead(t *testing.T) {
	body, closed := &requestBody{}, 0
	body.ReadCloser = struct {
		io.Reader
		closer
	}{strings.NewReader("hello"), func() error { closed++; return nil }}
	body.Close()
	if closed != 0 {
		t.Error("a body that was not read is closed")
	}
	body.Read(nil)
	body.Close()
	if closed != 1 {
		t.Error("a body that was read is not closed")
	}
}

type closer func() error

func (c closer) Close() error { return c() }
