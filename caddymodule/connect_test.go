package caddymodule

import (
	"crypto/tls"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"golang.org/x/net/http2"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// WebSockets over a stream of HTTP/2 (RFC 8441) or HTTP/3 (RFC 9220): no
// client library has them, so the frames are made here.

// connectRequest asks for a WebSocket as a page of the preview would.
func (s *site) connectRequest(address string) *http.Request {
	s.t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		s.t.Fatal(err)
	}
	u.Path = "/hmr"
	return (&http.Request{
		Method: http.MethodConnect, URL: u, Host: u.Host,
		Header: http.Header{"Origin": {strings.TrimSuffix(address, "/")}, "Sec-Websocket-Version": {"13"}},
	}).WithContext(s.t.Context())
}

// connectH2 opens a WebSocket on a connection of its own over HTTP/2.
func (s *site) connectH2(address string) (io.ReadWriteCloser, *http.Response, error) {
	transport := &http2.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	conn, err := tls.Dial("tcp", "127.0.0.1:"+strconv.Itoa(s.port), &tls.Config{
		InsecureSkipVerify: true, ServerName: "any." + defaultPreviewDomain, NextProtos: []string{"h2"},
	})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { conn.Close() })
	cc, err := transport.NewClientConn(conn)
	if err != nil {
		s.t.Fatal(err)
	}
	up, visitor := io.Pipe()
	s.t.Cleanup(func() { visitor.Close() })
	req := s.connectRequest(address)
	req.Header[":protocol"] = []string{"websocket"}
	req.Body = up
	res, err := cc.RoundTrip(req)
	if err != nil {
		return nil, nil, err
	}
	s.t.Cleanup(func() { res.Body.Close() })
	return struct {
		io.Reader
		io.WriteCloser
	}{res.Body, visitor}, res, nil
}

// connectH3 does the same over HTTP/3.
func (s *site) connectH3(address string) (io.ReadWriteCloser, *http.Response, error) {
	conn, err := quic.DialAddr(s.t.Context(), "127.0.0.1:"+strconv.Itoa(s.port), &tls.Config{
		InsecureSkipVerify: true, ServerName: "any." + defaultPreviewDomain, NextProtos: []string{http3.NextProtoH3},
	}, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { conn.CloseWithError(0, "") })
	cc := (&http3.Transport{}).NewClientConn(conn)
	select {
	case <-cc.ReceivedSettings():
	case <-s.t.Context().Done():
	}
	if !cc.Settings().EnableExtendedConnect {
		s.t.Fatal("HTTP/3 does not offer it")
	}
	stream, err := cc.OpenRequestStream(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	req := s.connectRequest(address)
	req.Proto = "websocket"
	if err := stream.SendRequestHeader(req); err != nil {
		return nil, nil, err
	}
	res, err := stream.ReadResponse()
	return stream, res, err
}

// sayFrame writes a text frame, masked with zeros, and reads its echo.
func sayFrame(t *testing.T, rw io.ReadWriter, words string) {
	t.Helper()
	frame := append([]byte{0x81, 0x80 | byte(len(words)), 0, 0, 0, 0}, words...)
	if _, err := rw.Write(frame); err != nil {
		t.Fatal(err)
	}
	echo := make([]byte, 2+len(words))
	if _, err := io.ReadFull(rw, echo); err != nil || string(echo[2:]) != words {
		t.Fatalf("heard %q, %v", echo, err)
	}
}

// Browsers use WebSockets over HTTP/2 as soon as a server offers them; ours
// does not, unless GODEBUG=http2xconnect=1 is set.
func TestAWebSocketOverHTTP2IsNotOffered(t *testing.T) {
	s := newSite(t)
	_, address := s.sandbox(devServer(nil), sandbox.Port{})
	if _, _, err := s.connectH2(address); err == nil || !strings.Contains(err.Error(), "extended connect not supported") {
		t.Errorf("the client got %v", err)
	}
}

const connectEnabled = "DOZE_TEST_CONNECT"

// Where it is asked for, it works. Go reads GODEBUG once, when a process starts.
func TestAWebSocketOverHTTP2SurvivesSleep(t *testing.T) {
	if os.Getenv(connectEnabled) == "" {
		again := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.count=1")
		again.Env = append(os.Environ(), "GODEBUG=http2xconnect=1", connectEnabled+"=1")
		if out, err := again.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	testConnect(t, (*site).connectH2)
}

// HTTP/3 always offers it.
func TestAWebSocketOverHTTP3SurvivesSleep(t *testing.T) {
	testConnect(t, (*site).connectH3)
}

func testConnect(t *testing.T, connect func(*site, string) (io.ReadWriteCloser, *http.Response, error)) {
	s := newSite(t)
	var open atomic.Int64
	sb, address := s.sandbox(func(w http.ResponseWriter, r *http.Request) {
		open.Add(1)
		defer open.Add(-1)
		serveDev(w, r, nil)
	}, sandbox.Port{})
	sleep := func() {
		t.Helper()
		testkit.Eventually(t, "the silent WebSocket lets it sleep", func() bool {
			_, err := s.Manager.Sleep(t.Context(), sb.ID)
			return err == nil
		})
	}
	sleep()
	c, res, err := connect(s, address)
	if err != nil {
		t.Fatal(err)
	}
	if res.StatusCode != 200 || res.Header.Get("Doze-Wake") != "warm" {
		t.Errorf("status %d, %v", res.StatusCode, res.Header)
	}
	sayFrame(t, c, "one")
	sleep()
	sayFrame(t, c, "two")
	if got := s.get(sb.ID).State; got != sandbox.StateRunning {
		t.Errorf("a byte from the visitor left it %s", got)
	}
	s.mustLoad("sleep_after 5m", "")
	sayFrame(t, c, "after a reload")
	c.Close()
	testkit.Eventually(t, "the server's connection ends", func() bool { return open.Load() == 0 })
}
