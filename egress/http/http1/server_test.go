package http1

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/doze-run/doze/problem"
)

const host = "Host: a.example\r\n"

// chunked is the head of a request with a chunked body.
const chunked = "POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n"

// both is a request of 89 (0x59) bytes with ambiguous framing: Content-Length and
// Transfer-Encoding.
const both = "POST /2 HTTP/1.1\r\n" + host + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + "0\r\n\r\n"

// streams are inputs from clients, with the number of requests that are served
// completely.
var streams = map[string]struct {
	sent    string
	served  int
	twoEnds bool // the next request is refused because of its ambiguous framing
}{
	"nothing":                  {"", 0, false},
	"no body":                  {"GET / HTTP/1.1\r\n" + host + "\r\n", 1, false},
	"a length":                 {"POST / HTTP/1.1\r\n" + host + "Content-Length: 3\r\n\r\nabc", 1, false},
	"chunks":                   {chunked + "3\r\nabc\r\n0\r\n\r\n", 1, false},
	"CL and TE":                {"POST / HTTP/1.1\r\n" + host + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 0, true},
	"TE and CL":                {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 0, true},
	"in any case":              {"POST / HTTP/1.1\r\n" + host + "tRANSFER-eNCODING: Chunked\r\ncONTENT-lENGTH: 3\r\n\r\n0\r\n\r\n", 0, true},
	"line feeds":               {"POST / HTTP/1.1\n" + "Host: a\nContent-Length: 3\nTransfer-Encoding: chunked\n\n0\r\n\r\n", 0, true},
	"the length twice":         {"POST / HTTP/1.1\r\n" + host + "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc" + both, 1, true},
	"the length on a new line": {"POST / HTTP/1.1\r\n" + host + "Content-Length:\r\n 3\r\n\r\nabc" + both, 1, true},
	"a field on a new line":    {"POST / HTTP/1.1\r\n" + host + "X: y\r\n Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc" + both, 1, true},
	"chunks of HTTP/1.0":       {"POST / HTTP/1.0\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 0, true},
	"after none":               {"GET / HTTP/1.1\r\n" + host + "\r\n" + both, 1, true},
	"after line breaks":        {"POST / HTTP/1.1\r\n" + host + "Content-Length: 0\r\n\r\n\r\n\r\n" + both, 1, true},
	"after a length":           {"POST / HTTP/1.1\r\n" + host + "Content-Length: 3\r\n\r\nabc" + both, 1, true},
	"after a length of zeros":  {"POST / HTTP/1.1\r\n" + host + "Content-Length: 0003\r\n\r\nabc" + both, 1, true},
	"in a body":                {"POST / HTTP/1.1\r\n" + host + "Content-Length: 89\r\n\r\n" + both, 1, false},
	"in a chunk":               {chunked + "59\r\n" + both + "\r\n0\r\n\r\n", 1, false},
	"after a chunk":            {chunked + "059;x=\"y\" \r\n" + both + "\r\n0\r\n\r\n" + both, 1, true},
	"after trailers":           {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\nTrailer: X\r\n\r\n1\r\na\r\n0\r\nX: Content-Length: 3\r\n\r\n" + both, 1, true},
	"a trailer of that name":   {chunked + "1\r\na\r\n0\r\nContent-Length: 3\r\n\r\n" + both, 1, true},
	"announced by that name":   {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\nTrailer: Content-Length\r\n\r\n0\r\n\r\n" + both, 0, false},
	"a header of 20 KiB":       {"POST / HTTP/1.1\r\n" + host + "X: " + strings.Repeat("x", 20<<10) + "\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 0, true},
	"of names alike":           {"POST / HTTP/1.1\r\n" + host + "X-Transfer-Encoding: chunked\r\nContent-Lengths: 3\r\nContent-Length: 3\r\n\r\nabc", 1, false},
	"a space before the colon": {"POST / HTTP/1.1\r\n" + host + "Content-Length : 3\r\n\r\nabc" + both, 0, false},
	"a signed length":          {"POST / HTTP/1.1\r\n" + host + "Content-Length: +3\r\n\r\nabc" + both, 0, false},
	"two lengths":              {"POST / HTTP/1.1\r\n" + host + "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc" + both, 0, false},
	"an endless length":        {"POST / HTTP/1.1\r\n" + host + "Content-Length: 9223372036854775808\r\n\r\nabc" + both, 0, false},
	"HTTP/2":                   {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + both, 0, false},
	"a bad chunk":              {chunked + "-1\r\n" + both, 0, false},
	"a chunk after line feed":  {chunked + "1\r\na\r\n5\n" + both, 0, false},
	"a chunk that is too long": {chunked + "3\r\nabcd\n" + both, 0, false},
	"a chunk with a space":     {chunked + "5 ;x\r\n" + both, 0, false},
	"a chunk of 17 digits":     {chunked + "00000000000000000\r\n\r\n" + both, 0, false},
	"more overhead than data":  {chunked + strings.Repeat("1;"+strings.Repeat("x", 1<<10)+"\r\na\r\n", 17) + "0\r\n\r\n" + both, 0, false},
	"a long line":              {chunked + "0;" + strings.Repeat("x", 4<<10) + "\r\n\r\n" + both, 0, false},
	"a bad trailer":            {chunked + "0\r\nno trailer\r\n\r\n" + both, 0, false},
	"trailers of 3 KiB":        {chunked + "0\r\nX: " + strings.Repeat("x", 3<<10) + "\r\n\r\n" + both, 1, true},
	"trailers of 30 KiB":       {chunked + "0\r\nX: " + strings.Repeat("x", 30<<10) + "\r\n\r\n" + both, 0, false},
}

// script is a connection on which the client sends a text in pieces and then closes.
type script struct {
	net.Conn
	sent     *bytes.Reader
	piece    int
	received bytes.Buffer
}

func (s *script) Read(b []byte) (int, error)      { return s.sent.Read(b[:min(len(b), s.piece)]) }
func (s *script) Write(b []byte) (int, error)     { return s.received.Write(b) }
func (s *script) RemoteAddr() net.Addr            { return &net.TCPAddr{} }
func (s *script) SetReadDeadline(time.Time) error { return nil }

// request is a request that was served completely.
type request struct{ method, target, body string }

// serve returns the requests that are served from sent, and the error that refuses the
// next one.
func serve(sent []byte, piece int) (served []request, refused *problem.Problem) {
	s := &Server{
		MaxHead: 64 << 10,
		Handler: func(w http.ResponseWriter, r *http.Request) {
			if body, err := io.ReadAll(r.Body); err == nil {
				served = append(served, request{r.Method, r.RequestURI, string(body)})
			}
		},
		Refuse: func(_ http.ResponseWriter, _ *http.Request, why *problem.Problem) { refused = why },
	}
	conn := &script{sent: bytes.NewReader(sent), piece: piece}
	s.Serve(context.Background(), conn, conn)
	return served, refused
}

func TestAmbiguousRequestsAreRefused(t *testing.T) {
	for name, c := range streams {
		for _, piece := range []int{1, 2, 3, 7, 64, 4096, 1 << 20} {
			served, refused := serve([]byte(c.sent), piece)
			if len(served) != c.served || (refused != nil && refused.Code == problem.RequestAmbiguous) != c.twoEnds {
				t.Errorf("%s, in pieces of %d: served %d, want %d; then %v", name, piece, len(served), c.served, refused)
			}
		}
	}
}

func TestRefusalsHaveTheCodeOfTheirReason(t *testing.T) {
	for sent, code := range map[string]problem.Code{
		"GET /\r\n\r\n":                                                             problem.RequestMalformed,
		"GET / HTTP/1.1\r\n\r\n":                                                    problem.RequestMalformed,
		"GET / HTTP/2.0\r\nHost: a.test\r\n\r\n":                                    problem.HTTPVersionUnsupported,
		"GET / HTTP/1.1\r\nX: " + strings.Repeat("x", 80<<10):                       problem.HeaderTooLarge,
		"GET / HTTP/1.1\r\nHost: a.test\r\nExpect: more\r\n\r\n":                    problem.ExpectationUnsupported,
		"GET / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: gzip\r\n\r\n":         problem.TransferEncodingUnsupported,
		"GET / HTTP/1.0\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n": problem.RequestAmbiguous,
	} {
		if served, refused := serve([]byte(sent), 4096); len(served) > 0 || refused == nil || refused.Code != code {
			t.Errorf("%.80q: served %d, refused with %v, want %s", sent, len(served), refused, code)
		}
	}
}

// A reason is logged, and a request that cannot be parsed may contain a secret.
func TestReasonsDoNotQuoteTheRequest(t *testing.T) {
	for _, sent := range []string{
		"GET /?canary\r\n\r\n",
		"GET http://%zz/canary HTTP/1.1\r\n" + host + "\r\n",
		"GET / HTTP/1.canary\r\n" + host + "\r\n",
		"GET / HTTP/1.1\r\n" + host + "Authorization : canary\r\n\r\n",
		"GET / HTTP/1.1\r\n" + host + "canary\r\n\r\n",
		"GET / HTTP/1.1\r\n" + host + "X: canary\x00\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: canary/\r\n\r\n",
		"GET / HTTP/1.1\r\n" + host + "Content-Length: canary\r\n\r\n",
		"GET / HTTP/1.1\r\n" + host + "Transfer-Encoding: canary\r\n\r\n",
		"GET / HTTP/1.1\r\n" + host + "Expect: canary\r\n\r\n",
	} {
		if served, refused := serve([]byte(sent), 4096); len(served) > 0 || refused == nil || strings.Contains(refused.Detail, "canary") {
			t.Errorf("%q: served %q; %v", sent, served, refused)
		}
	}
}

var (
	hasCoding = regexp.MustCompile(`(?im)^transfer-encoding:`)
	hasLength = regexp.MustCompile(`(?im)^content-length:`)
)

// reference returns the requests in sent as net/http reads them, up to one with ambiguous
// framing or a broken body.
func reference(sent []byte) (read []request, twoEnds bool) {
	src := bytes.NewReader(sent)
	b := bufio.NewReader(src)
	at := func() int { return len(sent) - src.Len() - b.Buffered() }
	for {
		start, _ := b.Peek(4)
		b.Discard(len(start) - len(bytes.TrimLeft(start, "\r\n")))
		from := at()
		r, err := http.ReadRequest(b)
		if err != nil {
			return read, false
		}
		if head := sent[from:at()]; hasCoding.Match(head) && (hasLength.Match(head) || r.ProtoMajor == 1 && r.ProtoMinor == 0) {
			return read, true
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return read, false
		}
		read = append(read, request{r.Method, r.RequestURI, string(body)})
	}
}

// The server serves the requests that net/http reads, or fewer of them.
func FuzzServe(f *testing.F) {
	for _, c := range streams {
		f.Add([]byte(c.sent), 5)
	}
	f.Fuzz(func(t *testing.T, sent []byte, piece int) {
		if len(sent) > 4000 { // the limits of net/http differ
			return
		}
		want, twoEnds := reference(sent)
		got, refused := serve(sent, max(piece, 1))
		if len(got) > len(want) || !slices.Equal(got, want[:len(got)]) {
			t.Errorf("%q: served %q, net/http reads %q", sent, got, want)
		}
		if twoEnds && len(got) == len(want) && (refused == nil || refused.Status < 400) {
			t.Errorf("%q: not refused", sent)
		}
	})
}

// started is a server of one connection, with its client.
type started struct {
	net.Conn
	r     *bufio.Reader
	ended chan struct{}
}

func start(t *testing.T, handler http.HandlerFunc) *started {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	s := &started{client, bufio.NewReader(client), make(chan struct{})}
	go func() {
		defer close(s.ended)
		defer conn.Close()
		(&Server{Handler: handler, MaxHead: 64 << 10, Refuse: func(w http.ResponseWriter, _ *http.Request, why *problem.Problem) {
			w.WriteHeader(why.Status)
		}}).Serve(context.Background(), conn, conn)
	}()
	t.Cleanup(func() {
		client.Close()
		conn.Close()
		<-s.ended
	})
	return s
}

func (s *started) ask(t *testing.T, text, method string) (*http.Response, string) {
	t.Helper()
	io.WriteString(s, text)
	return s.response(t, method)
}

func (s *started) response(t *testing.T, method string) (*http.Response, string) {
	t.Helper()
	res, err := http.ReadResponse(s.r, &http.Request{Method: method})
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res, string(body)
}

const get = "GET / HTTP/1.1\r\n" + host + "\r\n"

func TestResponses(t *testing.T) {
	long := strings.Repeat("long ", 10<<10)
	for name, c := range map[string]struct {
		handler func(w http.ResponseWriter)
		request string
		want    string // the sorted header without Date, and the body
	}{
		"nothing": {func(http.ResponseWriter) {}, get, "200 Content-Length: 0|"},
		"short":   {func(w http.ResponseWriter) { io.WriteString(w, "short") }, get, "200 Content-Length: 5|Content-Type: text/plain; charset=utf-8|short"},
		"long":    {func(w http.ResponseWriter) { io.WriteString(w, long) }, get, "200 Content-Type: text/plain; charset=utf-8|Transfer-Encoding: chunked|" + long},
		"flushed": {func(w http.ResponseWriter) { w.(http.Flusher).Flush() }, get, "200 Transfer-Encoding: chunked|"},
		"of a length": {func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", fmt.Sprint(len(long)))
			io.WriteString(w, long)
		}, get, fmt.Sprintf("200 Content-Length: %d|Content-Type: text/plain; charset=utf-8|", len(long)) + long},
		"HEAD":        {func(w http.ResponseWriter) { w.Header().Set("Content-Length", "5"); io.WriteString(w, "short") }, "HEAD" + get[3:], "200 Content-Length: 5|"},
		"204":         {func(w http.ResponseWriter) { w.Header().Set("Content-Length", "5"); w.WriteHeader(204) }, get, "204 "},
		"304":         {func(w http.ResponseWriter) { w.Header().Set("Content-Length", "5"); w.WriteHeader(304) }, get, "304 Content-Length: 5|"},
		"HTTP/1.0":    {func(w http.ResponseWriter) { io.WriteString(w, long) }, "GET / HTTP/1.0\r\n\r\n", "200 Connection: close|Content-Type: text/plain; charset=utf-8|" + long},
		"reused, 1.0": {func(w http.ResponseWriter) { io.WriteString(w, "short") }, "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "200 Connection: keep-alive|Content-Length: 5|Content-Type: text/plain; charset=utf-8|short"},
		"closed":      {func(w http.ResponseWriter) { w.Header().Set("Connection", "close") }, get, "200 Connection: close|Content-Length: 0|"},
		"a line break": {func(w http.ResponseWriter) {
			w.Header()["X"] = []string{"a\r\nY: b"}
			w.Header()["Bad name"] = []string{"x"}
		}, get, "200 Content-Length: 0|X: a  Y: b|"},
		"own framing": {func(w http.ResponseWriter) {
			w.Header().Set("Transfer-Encoding", "gzip")
			w.Header().Set("Content-Length", "-1")
		}, get, "200 Content-Length: 0|"},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, func(w http.ResponseWriter, _ *http.Request) { c.handler(w) })
			method, _, _ := strings.Cut(c.request, " ")
			res, body := s.ask(t, c.request, method)
			if res.TransferEncoding != nil {
				res.Header["Transfer-Encoding"] = res.TransferEncoding
			}
			if res.Close {
				res.Header.Set("Connection", "close")
			}
			if res.Header.Get("Date") == "" {
				t.Error("no Date")
			}
			res.Header.Del("Date")
			var header bytes.Buffer
			res.Header.Write(&header)
			if got := fmt.Sprint(res.StatusCode, " ", strings.ReplaceAll(header.String(), "\r\n", "|"), body); got != c.want {
				t.Errorf("got %.300q, want %.300q", got, c.want)
			}
		})
	}
}

func TestTrailersAndInformationalResponses(t *testing.T) {
	s := start(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Link", "</a>")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Link")
		w.Header().Set("Trailer", "X-Announced")
		io.Copy(w, r.Body)
		w.Header().Set("X-Announced", r.Trailer.Get("X-Sent"))
		w.Header().Set(http.TrailerPrefix+"X-Not", "2")
	})
	io.WriteString(s, "POST / HTTP/1.1\r\n"+host+"Transfer-Encoding: chunked\r\nTrailer: x-sent\r\n\r\n4\r\nbody\r\n0\r\nX-Sent: 1\r\n\r\n")
	if hints, _ := s.response(t, "POST"); hints.StatusCode != 103 || hints.Header.Get("Link") != "</a>" {
		t.Errorf("got %v", hints)
	}
	res, body := s.response(t, "POST")
	if body != "body" || res.Header.Get("Link") != "" || res.Trailer.Get("X-Announced") != "1" || res.Trailer.Get("X-Not") != "2" {
		t.Errorf("got %v, trailers %v", res, res.Trailer)
	}
}

func TestContinueIsSentWhenTheBodyIsRead(t *testing.T) {
	s := start(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/read" {
			io.Copy(w, r.Body)
		}
	})
	const rest = " HTTP/1.1\r\n" + host + "Expect: 100-continue\r\nContent-Length: 4\r\n\r\n"
	io.WriteString(s, "POST /read"+rest)
	if res, _ := s.response(t, "POST"); res.StatusCode != 100 {
		t.Errorf("got %v", res)
	}
	if res, body := s.ask(t, "body", "POST"); res.StatusCode != 200 || body != "body" {
		t.Errorf("got %v", res)
	}
	if res, _ := s.ask(t, "POST /unread"+rest, "POST"); res.StatusCode != 200 {
		t.Errorf("got %v", res)
	}
	if _, err := s.r.ReadByte(); err != io.EOF { // the client may or may not send the body
		t.Errorf("the connection goes on: %v", err)
	}
}

// An unread body is discarded if it is short, and ends the connection otherwise.
func TestUnreadBodies(t *testing.T) {
	s := start(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.URL.Path) })
	for _, n := range []int{10, 200 << 10} {
		post := fmt.Sprintf("POST /%d HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s", n, host, n, strings.Repeat("x", n))
		if _, body := s.ask(t, post, "POST"); body != fmt.Sprint("/", n) {
			t.Errorf("got %q", body)
		}
	}
	fmt.Fprintf(s, "POST /end HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n", host, 1<<30)
	go io.Copy(s, io.LimitReader(zeros{}, 64<<20))
	if _, body := s.response(t, "POST"); body != "/end" {
		t.Errorf("got %q", body)
	}
	<-s.ended
}

// The rest of a body must not be taken for a request, and a client that waits for 100
// Continue may send the body or the next request.
func TestResponseWithinABodyEndsTheConnection(t *testing.T) {
	const body = "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n"
	for name, c := range map[string]struct {
		request string
		read    int // bytes to read before the response; -1: call Begin
		last    bool
	}{
		"begun":             {"POST / HTTP/1.1\r\n" + host + "Content-Length: 1\r\n\r\na", -1, true},
		"partly read":       {"POST / HTTP/1.1\r\n" + host + body, 1, true},
		"waits for 100":     {"POST / HTTP/1.1\r\n" + host + "Expect: 100-continue\r\nContent-Length: 1\r\n\r\n", 0, true},
		"read to its end":   {"POST / HTTP/1.1\r\n" + host + "Content-Length: 1\r\n\r\na", 1, false},
		"not read, short":   {"POST / HTTP/1.1\r\n" + host + "Content-Length: 1\r\n\r\na", 0, false},
		"without a body":    {get, 0, false},
		"an empty body":     {"POST / HTTP/1.1\r\n" + host + "Content-Length: 0\r\n\r\n", 0, false},
		"short, chunked":    {"POST / HTTP/1.1\r\n" + host + body + "0\r\n\r\n", 0, false},
		"read with its end": {"POST / HTTP/1.1\r\n" + host + body + "0\r\n\r\n", 2, false},
	} {
		s := start(t, func(w http.ResponseWriter, r *http.Request) {
			if c.read < 0 {
				r.Body.(*requestBody).Begin()
			} else {
				_, _ = io.ReadFull(r.Body, make([]byte, c.read))
			}
			io.WriteString(w, "done")
		})
		res, text := s.ask(t, c.request, "POST")
		if text != "done" || res.Close != c.last {
			t.Errorf("%s: got %q, the connection ends: %v", name, text, res.Close)
		}
		s.Close()
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func TestContextEndsWhenTheClientDisconnects(t *testing.T) {
	for name, request := range map[string]string{"no body": get, "a body": chunked + "1\r\na\r\n0\r\n\r\n"} {
		left := make(chan error, 1)
		s := start(t, func(_ http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			<-r.Context().Done()
			left <- r.Context().Err()
		})
		io.WriteString(s, request)
		s.Close()
		if err := <-left; !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A request that arrives while the server watches for a disconnect during the previous
// one is not lost.
func TestPipelinedRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		here, there := net.Pipe()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			defer there.Close()
			(&Server{MaxHead: 64 << 10, Handler: func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/first" {
					time.Sleep(10 * watchAfter)
				}
				io.WriteString(w, r.URL.Path)
			}}).Serve(context.Background(), there, there)
		}()
		client := &started{here, bufio.NewReader(here), ended}
		io.WriteString(here, strings.Replace(get, "/", "/first", 1))
		time.Sleep(2 * watchAfter)
		go io.WriteString(here, strings.Repeat(strings.Replace(get, "/", "/next", 1), 3))
		for _, want := range []string{"/first", "/next", "/next", "/next"} {
			if _, body := client.response(t, "GET"); body != want {
				t.Errorf("got %q, want %q", body, want)
			}
		}
		here.Close()
		<-ended
	})
}

func TestAbortedAndShortResponsesEndTheConnection(t *testing.T) {
	for name, handler := range map[string]http.HandlerFunc{
		"aborted": func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, "part")
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		},
		"short": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "10")
			io.WriteString(w, "part")
			w.(http.Flusher).Flush()
		},
	} {
		s := start(t, handler)
		io.WriteString(s, get)
		res, err := http.ReadResponse(s.r, nil)
		if err != nil {
			t.Fatal(name, err)
		}
		if body, err := io.ReadAll(res.Body); err == nil {
			t.Errorf("%s: %q", name, body)
		}
	}
}

func TestHijackedConnectionHasBufferedData(t *testing.T) {
	s := start(t, func(w http.ResponseWriter, r *http.Request) {
		conn, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		line, _ := buffered.ReadString('\n')
		io.WriteString(conn, "received "+line)
	})
	io.WriteString(s, get+"more\n")
	if line, _ := s.r.ReadString('\n'); line != "received more\n" {
		t.Errorf("got %q", line)
	}
}

// A Read of the body by another goroutine ends with the handler.
func TestReadOfABodyEndsWithItsHandler(t *testing.T) {
	reading := make(chan error, 1)
	s := start(t, func(w http.ResponseWriter, r *http.Request) {
		r.Body.Read(make([]byte, 1))
		var started sync.WaitGroup
		started.Add(1)
		go func() {
			started.Done()
			_, err := r.Body.Read(make([]byte, 1))
			reading <- err
		}()
		started.Wait()
	})
	io.WriteString(s, "POST / HTTP/1.1\r\n"+host+"Content-Length: 2\r\n\r\na")
	if err := <-reading; err == nil {
		t.Error("the Read went on")
	}
}
