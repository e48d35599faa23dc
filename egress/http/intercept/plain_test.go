package intercept

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/http2"

	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/egress/tls/clienthello/hellotest"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// An ambiguous request is refused, or forwarded in an unambiguous form.
func TestRequestsAreNotSmuggled(t *testing.T) {
	const post = "POST /first HTTP/1.1\r\nHost: api.example.com\r\n"
	const head = post + "Connection: close\r\n"
	for name, c := range map[string]struct {
		request string
		want    string // start of the status line
		arrives string // the part that reaches the upstream, if any
	}{
		"length and chunks":  {post + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /second HTTP/1.1\r\nHost: api.example.com\r\n\r\n", "HTTP/1.1 400", ""},
		"the same, second":   {post + "Content-Length: 0\r\n\r\n" + post + "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\nGET /second HTTP/1.1\r\nHost: api.example.com\r\n\r\n", "HTTP/1.1 200", "/first 0"},
		"chunks in 1.0":      {"POST /first HTTP/1.0\r\nHost: api.example.com\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "HTTP/1.0 400", ""},
		"two lengths":        {head + "Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde", "HTTP/1.1 400", ""},
		"signed length":      {head + "Content-Length: +4\r\n\r\nabcd", "HTTP/1.1 400", ""},
		"other coding":       {head + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "HTTP/1.1 501", ""},
		"two codings":        {head + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "HTTP/1.1 501", ""},
		"space before colon": {head + "Content-Length : 4\r\n\r\nabcd", "HTTP/1.1 400", ""},
		"bad chunk":          {post + "Transfer-Encoding: chunked\r\n\r\n-1\r\nGET /second HTTP/1.1\r\nHost: api.example.com\r\n\r\n", "HTTP/1.1 400", "/first"},
		"folded":             {head + "X-Folded: a\r\n Content-Length: 4\r\nContent-Length: 0\r\n\r\n", "HTTP/1.1 200", "/first 0 a Content-Length: 4"},
		"two hosts":          {"GET /first HTTP/1.1\r\nHost: api.example.com\r\nHost: other.example\r\n\r\n", "HTTP/1.1 400", ""},
		"NUL":                {head + "X-Nul: a\x00b\r\n\r\n", "HTTP/1.1 400", ""},
		"large header":       {head + "X-Large: " + strings.Repeat("a", maxHeader+8192) + "\r\n\r\n", "HTTP/1.1 431", ""},
	} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			var seen []string
			see := func(text string) {
				mu.Lock()
				defer mu.Unlock()
				seen = append(seen, strings.TrimSpace(text))
			}
			r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				body, err := io.ReadAll(req.Body)
				if err != nil {
					see(req.RequestURI)
					return
				}
				see(req.RequestURI + " " + strconv.Itoa(len(body)) + " " + req.Header.Get("X-Folded"))
			}))
			response := r.exchange(c.request)
			if !strings.HasPrefix(response, c.want) {
				// A response to a request with a broken body need not arrive.
				if name != "bad chunk" || response != "" {
					t.Errorf("response %q", response)
				}
			}
			r.upstream.Close() // no more handlers begin, except over HTTP/2 after a broken body
			mu.Lock()
			defer mu.Unlock()
			if got := strings.Join(seen, "; "); c.arrives == "" && got != "" || len(seen) > 1 || got != strings.TrimSpace(c.arrives) && name != "bad chunk" {
				t.Errorf("the host saw %q", got)
			}
			// The destination is notified of each refusal, unless the body caused it.
			last := response[max(0, strings.LastIndex(response, "HTTP/1.")):]
			if refused := r.refusals(); (len(refused) == 1) != (!strings.HasPrefix(last, "HTTP/1.1 200") && c.arrives != "/first") {
				t.Errorf("refused %+v; last response %q", refused, last)
			}
		})
	}
}

// Requests that cannot be parsed get a response, and the destination is notified of the
// refusal.
func TestUnreadableRequestsAreRefused(t *testing.T) {
	for name, o := range map[string][]option{"TLS": nil, "plain": {withoutTLS}} {
		t.Run(name, func(t *testing.T) {
			for request, want := range map[string]struct {
				code   problem.Code
				reason string
			}{
				"GET / HTTP/1.1\r\n\r\n": {problem.RequestMalformed, "missing required Host header"},
				"GET / HTTP/1.1\r\nHost: api.example.com\r\nTransfer-Encoding: gzip\r\n\r\n":            {problem.TransferEncodingUnsupported, "Unsupported transfer encoding"},
				"GET / HTTP/1.7\r\nHost: api.example.com\r\nX: \xff\x00\r\n\r\n":                        {problem.RequestMalformed, "malformed header"},
				"GET / HTTP/3.0\r\nHost: api.example.com\r\n\r\n":                                       {problem.HTTPVersionUnsupported, "unsupported protocol version"},
				"GET / HTTP/1.1\r\nHost: api.example.com\r\nExpect: wonders\r\n\r\n":                    {problem.ExpectationUnsupported, "Expectation Failed"},
				"GET / HTTP/1.1\r\nHost: api.example.com\r\nX: " + strings.Repeat("x", 80<<10) + "\r\n": {problem.HeaderTooLarge, "Request Header Fields Too Large"},
			} {
				r := start(t, http.NotFoundHandler(), o...)
				if response := r.exchange("GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n" + request); !strings.Contains(response, "HTTP/1.1 "+strconv.Itoa(want.code.Definition().Status)) || !strings.Contains(response, `"code":"`+want.code.String()+`"`) {
					t.Errorf("%.80q: response %q", request, response)
				}
				if refused := r.refusals(); len(refused) != 1 || refused[0].Code != want.code || !strings.Contains(refused[0].Detail, want.reason) {
					t.Errorf("%.80q: refused %+v", request, refused)
				}
			}
		})
	}
}

// The bytes after a broken body are not a request, neither to the node nor to the
// upstream, even if the response began before them.
func TestRestOfABrokenBodyIsNotForwarded(t *testing.T) {
	const smuggled = "GET /smuggled HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n\r\n"
	for name, o := range map[string][]option{"TLS": nil, "plain": {withoutTLS}} {
		for _, early := range []bool{false, true} {
			for _, broken := range []string{"-1\r\n", "5\n", "3\r\nabcd\n", "5 ;x\r\n", "0\r\nno trailer\r\n\r\n"} {
				t.Run(fmt.Sprintf("%s, early %v, %q", name, early, broken), func(t *testing.T) {
					u := startUpload(t, early, chunked, o...)
					response := u.then(broken + smuggled)
					if strings.Contains(response, "/smuggled") || !strings.Contains(response, "Connection: close") ||
						!early && !strings.Contains(response, `"code":"body_incomplete"`) {
						t.Errorf("response %q", response)
					}
				})
			}
		}
	}
}

// The handler ignores the error of reading a broken body, and responds without closing
// the connection.
func TestNoRequestIsServedAfterABrokenBody(t *testing.T) {
	for name, o := range map[string][]option{"TLS": nil, "plain": {withoutTLS}} {
		r := start(t, http.NotFoundHandler(), append(o, func(_ *rig, d *Destination, _ *UpstreamConfig) {
			d.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				io.ReadAll(req.Body)
				io.WriteString(w, "seen "+req.URL.Path)
			})
		})...)
		response := r.exchange("POST /first HTTP/1.1\r\nHost: api.example.com\r\n" + chunked + "-1\r\nGET /second HTTP/1.1\r\nHost: api.example.com\r\n\r\n")
		if !strings.Contains(response, "seen /first") || strings.Contains(response, "/second") {
			t.Errorf("%s: response %q", name, response)
		}
	}
}

// A response before the end of a body ends the connection, and no part of the remaining
// body is served as a request. The client receives no reset, although it still sends.
func TestResponseBeforeTheEndOfABody(t *testing.T) {
	const inside = "GET /inside HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
	const after = "GET /after HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
	for name, o := range map[string][]option{"TLS": nil, "plain": {withoutTLS}} {
		for _, body := range [][2]string{
			{chunked, fmt.Sprintf("%x\r\n", len(inside)) + inside + "\r\n0\r\n\r\n"},
			{fmt.Sprintf("Content-Length: %d\r\n\r\na", 1+len(inside)), inside},
		} {
			u := startUpload(t, true, body[0], o...)
			response := u.then(body[1] + after)
			if !strings.Contains(response, "seen /first") || !strings.Contains(response, "Connection: close") || strings.Contains(response, "seen /inside") || strings.Contains(response, "seen /after") {
				t.Errorf("%s, %q: response %q", name, body, response)
			}
			if refused := u.refusals(); len(refused) > 0 {
				t.Errorf("%s, %q: refused %+v", name, body, refused)
			}
		}
	}
}

// The end of a response does not wait for the next byte of the client, whether the
// response is small or large.
func TestBrokenResponseBeforeTheEndOfABody(t *testing.T) {
	for _, size := range []int{10, 1 << 20} {
		r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			io.CopyN(w, zeros{}, int64(size))
			http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}))
		conn := r.connect()
		io.WriteString(conn, "POST /first HTTP/1.1\r\nHost: api.example.com\r\n"+chunked)
		if n, _ := io.Copy(io.Discard, conn); n < int64(size) { // until its end
			t.Errorf("%d of %d bytes arrived", n, size)
		}
	}
}

// A connection is reused after the body of a request was read, even if a policy replaces
// that body.
func TestConnectionOutlivesAReplacedBody(t *testing.T) {
	var f *Upstream
	r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		io.WriteString(w, "seen") // does not read
	}), func(r *rig, d *Destination, _ *UpstreamConfig) {
		d.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			io.ReadAll(req.Body)
			req.Body = io.NopCloser(strings.NewReader("other"))
			req.ContentLength = 5
			f.Do(w, req, Route{}, nil)
		})
	})
	f = NewUpstream(UpstreamConfig{RootCAs: upstreamCA().Pool(), Dial: func(ctx context.Context, _ dial.Target) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", r.upstream.Listener.Addr().String())
	}})
	defer f.Close()
	client := r.client(1)
	for range 200 {
		res, err := client.Post("https://"+host+"/", "text/plain", strings.NewReader("body"))
		if err != nil {
			t.Fatal(err)
		}
		if testkit.Body(t, res); res.Close {
			t.Fatal("the connection ends")
		}
	}
}

// chunked is the last header field of a request and the first chunk of its body.
const chunked = "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n"

// uploading is a client that has sent the start of a request.
type uploading struct {
	*rig
	conn     net.Conn
	response []byte
}

// startUpload sends the start of a POST /first to an upstream that responds with the
// path: immediately if early, else after it has read the body. An early response has
// arrived when startUpload returns.
func startUpload(t *testing.T, early bool, body string, o ...option) *uploading {
	r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if early {
			http.NewResponseController(w).EnableFullDuplex() // otherwise an HTTP/1.1 server reads the body first
		} else {
			io.ReadAll(req.Body)
		}
		io.WriteString(w, "seen "+req.URL.Path)
	}), o...)
	u := &uploading{rig: r, conn: r.connect()}
	io.WriteString(u.conn, "POST /first HTTP/1.1\r\nHost: api.example.com\r\n"+body)
	for early && !strings.Contains(string(u.response), "seen /first") {
		part := make([]byte, 4096)
		n, err := u.conn.Read(part)
		if err != nil {
			t.Fatalf("no response: %v; %q", err, u.response)
		}
		u.response = append(u.response, part[:n]...)
	}
	return u
}

// then sends the rest and returns everything that was received, until the end of the
// connection.
func (u *uploading) then(rest string) string {
	u.t.Helper()
	io.WriteString(u.conn, rest)
	more, err := io.ReadAll(u.conn)
	if err != nil {
		u.t.Errorf("the connection ended by %v", err)
	}
	return string(u.response) + string(more)
}

// Bytes that only begin like the preface of HTTP/2 do not hide a request after them.
func TestIncompletePrefaceIsRefused(t *testing.T) {
	const second = "POST /second HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
	for name, o := range map[string][]option{"TLS": nil, "plain": {withoutTLS}} {
		for _, request := range []string{
			"PRI * HTTP/2.0\r\nHost: api.example.com\r\n\r\n",
			"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\nPRI * HTTP/2.0\r\n\r\n",
			"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n" + http2.ClientPreface,
			"PRI * HTTP/2.0\r\n\r\nsm\r\n\r\n",
		} {
			r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { io.WriteString(w, "seen "+req.URL.Path) }), o...)
			conn := r.connect()
			io.WriteString(conn, request+second)
			response, _ := io.ReadAll(conn)
			refused := r.refusals()
			if strings.Contains(string(response), "/second") || len(refused) != 1 || refused[0].Code != problem.HTTPVersionUnsupported {
				t.Errorf("%s: %q: refused %+v; response %q", name, request, refused, response)
			}
		}
	}
}

// HTTP/2 over TLS requires that ALPN negotiated it.
func TestTLSForHTTP1IsForHTTP1(t *testing.T) {
	r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { io.WriteString(w, req.Proto) }))
	for _, protocols := range [][]string{nil, {"http/1.1"}} {
		conn := r.dialTLS(host, protocols...)
		io.WriteString(conn, http2.ClientPreface)
		response, _ := io.ReadAll(conn)
		if !strings.HasPrefix(string(response), "HTTP/1.1 505") {
			t.Errorf("%v: response %q", protocols, response)
		}
	}
}

// The end of a connection is not a request, whatever error net/http returns for it.
func TestEndsOfConnectionsAreNotReported(t *testing.T) {
	trusts := &tls.Config{ServerName: host, InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}}
	open := func(t *testing.T, conn net.Conn) *tls.Conn {
		c := tls.Client(conn, trusts)
		if err := c.Handshake(); err != nil {
			t.Error(err)
		}
		return c
	}
	for name, end := range map[string]func(t *testing.T, conn net.Conn, cancel func()){
		"FIN":          func(t *testing.T, conn net.Conn, _ func()) { open(t, conn); conn.Close() },
		"close_notify": func(t *testing.T, conn net.Conn, _ func()) { open(t, conn).Close() },
		"reset": func(t *testing.T, conn net.Conn, _ func()) {
			open(t, conn)
			conn.(*net.TCPConn).SetLinger(0)
			conn.Close()
		},
		"reset after half a request": func(t *testing.T, conn net.Conn, _ func()) {
			io.WriteString(open(t, conn), "GET / HTT")
			conn.(*net.TCPConn).SetLinger(0)
			conn.Close()
		},
		"the node's": func(t *testing.T, conn net.Conn, cancel func()) {
			open(t, conn)
			cancel()
			io.Copy(io.Discard, conn)
			conn.Close()
		},
		"ECH": func(t *testing.T, conn net.Conn, _ func()) {
			configs, err := hellotest.ECHConfigs(host)
			if err != nil {
				t.Error(err)
			}
			config := trusts.Clone()
			config.ServerName, config.MinVersion, config.EncryptedClientHelloConfigList = "hidden.example", tls.VersionTLS13, configs
			config.EncryptedClientHelloRejectionVerify = func(tls.ConnectionState) error { return nil }
			var rejected *tls.ECHRejectionError
			if err := tls.Client(conn, config).Handshake(); !errors.As(err, &rejected) {
				t.Errorf("got %v", err)
			}
			conn.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := New(Config{Certificate: certificates(newAuthority()), Log: slog.New(slog.DiscardHandler)})
			var refused []*problem.Problem // only written before Serve returns
			for range 10 {
				here, there := tcp(t)
				ctx, cancel := context.WithCancel(t.Context())
				served := make(chan struct{})
				go func() {
					defer close(served)
					s.Serve(ctx, there, Destination{Host: host, Port: 443, TLS: true, Handler: http.NotFoundHandler(),
						Refused: func(_ *http.Request, why *problem.Problem) { refused = append(refused, why) }})
				}()
				end(t, here, cancel)
				<-served
				cancel()
			}
			if len(refused) > 0 {
				t.Errorf("refused %+v", refused)
			}
		})
	}
}

// With TLS 1.2, a Read returns data together with the error that came after it.
func TestDataThatArrivesWithAnErrorIsReported(t *testing.T) {
	r := start(t, http.NotFoundHandler())
	raw, err := net.Dial("tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	gathered := &gathering{Conn: raw}
	conn := tls.Client(gathered, &tls.Config{ServerName: host, RootCAs: r.trust, MaxVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}})
	if err := conn.Handshake(); err != nil {
		t.Fatal(err)
	}
	gathered.hold = true
	io.WriteString(conn, "GARBAGE\r\n\r\n")
	raw.Write(append(gathered.held, append([]byte{21, 3, 3, 0, 26}, make([]byte, 26)...)...)) // an alert that fails authentication
	io.Copy(io.Discard, raw)
	if refused := r.refusals(); len(refused) != 1 || refused[0].Code != problem.RequestMalformed {
		t.Errorf("refused %+v", refused)
	}
}

// gathering is a connection that holds back writes once hold is set.
type gathering struct {
	net.Conn
	hold bool
	held []byte
}

func (g *gathering) Write(b []byte) (int, error) {
	if !g.hold {
		return g.Conn.Write(b)
	}
	g.held = append(g.held, b...)
	return len(b), nil
}
