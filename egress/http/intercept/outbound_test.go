package intercept

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/testkit"
)

func TestRequestArrivesUnchanged(t *testing.T) {
	both(t, func(t *testing.T, major int) {
		got := make(chan *http.Request, 1)
		r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			body, _ := io.ReadAll(req.Body)
			req.Body = io.NopCloser(bytes.NewReader(body))
			got <- req
			w.Header().Set("X-Answer", "yes")
			w.Header()["Date"] = nil
			w.WriteHeader(http.StatusTeapot)
			io.WriteString(w, "<html>untyped")
		}))
		req, _ := http.NewRequest("PUT", "https://"+host+"/a%2Fb//c/../d%20e?x=1&y=%zz;z", strings.NewReader("hello"))
		req.Header["User-Agent"] = nil
		req.Header["X-Many"] = []string{"1", "2"}
		req.Header.Set("Connection", "X-Hop")
		req.Header.Set("X-Hop", "1")
		req.Header.Set("Proxy-Authorization", "Basic eDp5")
		req.Header.Set("Accept-Encoding", "sdch, gzip")
		if major == 2 {
			delete(req.Header, "Connection")
			delete(req.Header, "X-Hop")
		}
		res, err := r.client(major).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		seen := <-got
		if seen.RequestURI != "/a%2Fb//c/../d%20e?x=1&y=%zz;z" || seen.Method != "PUT" || seen.Host != host || seen.ContentLength != 5 || seen.ProtoMajor != 2 {
			t.Errorf("%s %s of %s, %d bytes, %s", seen.Method, seen.RequestURI, seen.Host, seen.ContentLength, seen.Proto)
		}
		names := slices.Sorted(maps.Keys(seen.Header))
		if want := []string{"Accept-Encoding", "Content-Length", "X-Many"}; !slices.Equal(names, want) {
			t.Errorf("header fields %q, want %q", names, want)
		}
		if seen.Header.Get("Accept-Encoding") != "sdch, gzip" || len(seen.Header["X-Many"]) != 2 {
			t.Errorf("header %v", seen.Header)
		}
		if body := testkit.Body(t, res); res.StatusCode != http.StatusTeapot || res.Header.Get("X-Answer") != "yes" || body != "<html>untyped" {
			t.Errorf("%d %v %q", res.StatusCode, res.Header, body)
		}
		if _, dated := res.Header["Date"]; dated {
			t.Errorf("a field was added: %v", res.Header)
		}
		if result := <-r.results; result.Status != http.StatusTeapot || result.BytesOut != 5 || result.BytesIn != 13 || result.Err != nil || !loopback(result.Address) {
			t.Errorf("%+v", result)
		}
	})
}

func TestFieldsThatBypassTheNodeAreRemoved(t *testing.T) {
	r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("Alt-Svc", `h3=":443"`)
		w.Header().Set(problem.HeaderError, "forged")
		w.Header().Set(problem.HeaderFlow, "forged")
		w.Header().Set("doze-anything", "forged")
		w.Header().Set("Keep-Alive", "timeout=5")
		w.Header().Set("Trailer", "Doze-Wake")
		io.WriteString(w, "hello")
		w.Header().Set("Doze-Wake", "forged")
		w.Header().Set(http.TrailerPrefix+"Doze-Error", "forged")
	}))
	res, err := r.client(1).Get("https://" + host + "/")
	if err != nil {
		t.Fatal(err)
	}
	testkit.Body(t, res)
	if len(res.Trailer) > 0 {
		t.Errorf("the trailers %v were passed on", res.Trailer)
	}
	for _, name := range []string{"Alt-Svc", problem.HeaderError, problem.HeaderFlow, "Doze-Anything", "Keep-Alive"} {
		if _, ok := res.Header[http.CanonicalHeaderKey(name)]; ok {
			t.Errorf("%s was passed on", name)
		}
	}
}

// A policy may add trailers to a request whose client has announced none.
func TestTrailersOfAPolicyAreSent(t *testing.T) {
	got := make(chan http.Header, 1)
	up := make(chan *Upstream, 1)
	r := start(t, http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		_, _ = io.Copy(io.Discard, req.Body)
		got <- req.Trailer
	}), func(r *rig, d *Destination, _ *UpstreamConfig) {
		d.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			req.Trailer = http.Header{"X-Sum": {"42"}}
			u := <-up
			u.Do(w, req, Route{}, nil)
			up <- u
		})
	})
	u := NewUpstream(UpstreamConfig{RootCAs: upstreamCA().Pool(), Dial: func(ctx context.Context, _ dial.Target) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", r.upstream.Listener.Addr().String())
	}})
	defer u.Close()
	up <- u
	for _, major := range []int{1, 2} {
		req, _ := http.NewRequest("POST", "https://"+host+"/", io.MultiReader(strings.NewReader("body"))) // in chunks
		res, err := r.client(major).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		testkit.Body(t, res)
		if trailer := <-got; trailer.Get("X-Sum") != "42" {
			t.Errorf("HTTP/%d: the upstream got the trailers %v", major, trailer)
		}
	}
}

// A request with an absolute URI comes through net/http's server, which is half duplex: it
// may discard a part of the body before it sends an early response.
func TestEarlyResponseReachesASendingProxyClient(t *testing.T) {
	r := start(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusRequestEntityTooLarge) }), withoutTLS)
	u := NewUpstream(UpstreamConfig{Dial: func(ctx context.Context, _ dial.Target) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", r.upstream.Listener.Addr().String())
	}})
	defer u.Close()
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.server.ServeRequest(w, req, Destination{Host: host, Port: 80, Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			u.Do(w, req, Route{}, nil)
		})})
	}))
	defer proxy.Close()
	for _, body := range []string{"Content-Length: 1099511627776\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n10000000000\r\n"} {
		conn, err := net.Dial("tcp", proxy.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(conn, "POST http://"+host+"/ HTTP/1.1\r\nHost: "+host+"\r\n"+body)
		sent := make(chan struct{})
		go func() { // ends with the connection
			defer close(sent)
			_, _ = io.Copy(conn, zeros{})
		}()
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || res.StatusCode != http.StatusRequestEntityTooLarge {
			t.Errorf("%q: got %+v, %v", body, res, err)
		}
		conn.Close()
		<-sent
	}
}

func TestTrailersAreForwarded(t *testing.T) {
	both(t, func(t *testing.T, major int) {
		r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			io.Copy(io.Discard, req.Body)
			w.Header().Set("Trailer", "X-Announced")
			io.WriteString(w, "short")
			w.Header().Set("X-Announced", req.Trailer.Get("X-Sum"))
			w.Header().Set(http.TrailerPrefix+"X-Late", "2")
		}))
		req, _ := http.NewRequest("POST", "https://"+host+"/", struct{ io.Reader }{strings.NewReader("body")})
		req.Trailer = http.Header{"X-Sum": {"42"}}
		res, err := r.client(major).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if body := testkit.Body(t, res); body != "short" || res.Trailer.Get("X-Announced") != "42" || res.Trailer.Get("X-Late") != "2" {
			t.Errorf("%q, trailers %v", body, res.Trailer)
		}
	})
}

func TestEarlyHintsAreForwarded(t *testing.T) {
	both(t, func(t *testing.T, major int) {
		r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			w.Header().Set("Link", "</a.css>; rel=preload")
			w.WriteHeader(http.StatusEarlyHints)
			w.Header().Del("Link")
			io.WriteString(w, "done")
		}))
		var hints []string
		req, _ := http.NewRequest("GET", "https://"+host+"/", nil)
		req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			hints = append(hints, fmt.Sprint(code, " ", h.Get("Link")))
			return nil
		}}))
		res, err := r.client(major).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if testkit.Body(t, res) != "done" || len(hints) != 1 || hints[0] != "103 </a.css>; rel=preload" || res.Header.Get("Link") != "" {
			t.Errorf("hints %q, header %v", hints, res.Header)
		}
	})
}

// The client waits for 100 Continue before it sends the body, and the upstream decides
// whether it sends one.
func TestUpstreamDecidesOn100Continue(t *testing.T) {
	both(t, func(t *testing.T, major int) {
		r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if req.URL.Path == "/unwanted" {
				w.WriteHeader(http.StatusExpectationFailed)
				return
			}
			io.Copy(w, req.Body)
		}))
		for path, want := range map[string]int{"/": 200, "/unwanted": 417} {
			body := &touched{Reader: strings.NewReader("body")}
			req, _ := http.NewRequest("POST", "https://"+host+path, body)
			req.Header.Set("Expect", "100-continue")
			res, err := r.client(major).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			testkit.Body(t, res)
			// net/http's HTTP/2 client sends the body in any case.
			if sent := body.was.Load(); res.StatusCode != want || major == 1 && sent != (want == 200) {
				t.Errorf("%s: %d, body was sent: %t", path, res.StatusCode, sent)
			}
		}
	})
}

type touched struct {
	io.Reader
	was atomic.Bool
}

func (t *touched) Read(b []byte) (int, error) { t.was.Store(true); return t.Reader.Read(b) }

// Each side sends its next byte only after it has received one from the other side.
func TestBodiesStreamConcurrently(t *testing.T) {
	both(t, func(t *testing.T, major int) {
		r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			http.NewResponseController(w).EnableFullDuplex()
			out := http.NewResponseController(w)
			b := make([]byte, 1)
			for {
				if _, err := io.ReadFull(req.Body, b); err != nil {
					return
				}
				w.Write(bytes.ToUpper(b))
				out.Flush()
			}
		}))
		in, out := io.Pipe()
		req, _ := http.NewRequest("POST", "https://"+host+"/", in)
		go out.Write([]byte("a"))
		res, err := r.client(major).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b := make([]byte, 1)
		for _, c := range "abcdef" {
			if c != 'a' {
				out.Write([]byte(string(c)))
			}
			if _, err := io.ReadFull(res.Body, b); err != nil || b[0] != byte(c)-32 {
				t.Fatalf("%q, %v", b, err)
			}
		}
		out.Close()
		if rest, err := io.ReadAll(res.Body); err != nil || len(rest) != 0 {
			t.Errorf("%q, %v", rest, err)
		}
	})
}

func TestEventsAreNotDelayed(t *testing.T) {
	both(t, func(t *testing.T, major int) {
		more := make(chan string)
		r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
			http.NewResponseController(w).Flush()
			for event := range more {
				io.WriteString(w, event)
				http.NewResponseController(w).Flush()
			}
		}))
		res, err := r.client(major).Get("https://" + host + "/") // the header comes before any event
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		sendEvents(t, more, res)
	})
}

// sendEvents makes the upstream send events and end the response, and fails the test
// unless each event arrives when it is sent.
func sendEvents(t *testing.T, more chan<- string, res *http.Response) {
	t.Helper()
	for _, event := range []string{"data: 1\n\n", "data: two\n\n"} {
		more <- event
		b := make([]byte, len(event))
		if _, err := io.ReadFull(res.Body, b); err != nil || string(b) != event {
			t.Fatalf("%q, %v", b, err)
		}
	}
	close(more)
	testkit.Body(t, res)
}

// An upstream may respond before it has read the body, and read no more of it.
func TestResponseBeforeTheEndOfTheUpload(t *testing.T) {
	both(t, func(t *testing.T, major int) {
		r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			w.WriteHeader(http.StatusRequestEntityTooLarge)
			io.WriteString(w, "too large")
		}))
		req, _ := http.NewRequest("POST", "https://"+host+"/", io.LimitReader(zeros{}, 64<<20))
		req.ContentLength = 64 << 20
		res, err := r.client(major).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if body := testkit.Body(t, res); res.StatusCode != http.StatusRequestEntityTooLarge || body != "too large" {
			t.Errorf("%d %q", res.StatusCode, body)
		}
	})
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func TestCancellationReachesTheHost(t *testing.T) {
	both(t, func(t *testing.T, major int) {
		began, ended := make(chan struct{}), make(chan struct{})
		r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			close(began)
			<-req.Context().Done()
			close(ended)
		}))
		ctx, cancel := context.WithCancel(t.Context())
		req, _ := http.NewRequestWithContext(ctx, "GET", "https://"+host+"/", nil)
		failed := make(chan error)
		go func() {
			_, err := r.client(major).Do(req)
			failed <- err
		}()
		<-began
		cancel()
		<-failed
		<-ended
		var f *Failure
		if result := <-r.results; !errors.As(result.Err, &f) || f.Code != problem.ClientDisconnected || result.Status != 0 {
			t.Errorf("%+v", result)
		}
	})
}

func TestBrokenResponseIsAborted(t *testing.T) {
	both(t, func(t *testing.T, major int) {
		r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			io.WriteString(w, "half of it")
			http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}))
		res, err := r.client(major).Get("https://" + host + "/")
		if err == nil {
			var body []byte
			if body, err = io.ReadAll(res.Body); err == nil {
				t.Errorf("the client considers the response %q complete", body)
			}
			res.Body.Close()
		}
		var f *Failure
		if result := <-r.results; !errors.As(result.Err, &f) || f.Code != problem.UpstreamDisconnected || result.Status != 200 {
			t.Errorf("%+v", result)
		}
	})
}

func TestFailuresAreReadable(t *testing.T) {
	untrusted := func(_ *rig, _ *Destination, c *UpstreamConfig) { c.RootCAs = x509.NewCertPool() }
	failing := func(err error) option {
		return func(_ *rig, _ *Destination, c *UpstreamConfig) {
			c.Dial = func(context.Context, dial.Target) (net.Conn, error) { return nil, err }
		}
	}
	unused := func(t *testing.T) option {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		return func(_ *rig, _ *Destination, c *UpstreamConfig) {
			c.Dial = func(ctx context.Context, _ dial.Target) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
			}
		}
	}
	speaks := func(text string) option {
		return func(_ *rig, d *Destination, c *UpstreamConfig) {
			d.TLS, d.Port = false, 80
			c.Dial = func(context.Context, dial.Target) (net.Conn, error) {
				here, there := net.Pipe()
				go func() {
					there.Read(make([]byte, 4096))
					io.WriteString(there, text)
					there.Close()
				}()
				return here, nil
			}
		}
	}
	unencrypted := func(_ *rig, _ *Destination, c *UpstreamConfig) {
		c.Dial = func(context.Context, dial.Target) (net.Conn, error) {
			here, there := net.Pipe()
			go func() {
				there.Read(make([]byte, 4096))
				io.WriteString(there, "HTTP/1.1 400 Bad Request\r\n\r\n")
				there.Close()
			}()
			return here, nil
		}
	}
	for name, c := range map[string]struct {
		how    option
		code   problem.Code
		reason string // substring
	}{
		"unknown authority":  {untrusted, problem.UpstreamCertificateInvalid, "signed by an unknown authority"},
		"refused by dial":    {failing(&Failure{Code: problem.EgressDenied, Reason: "10.1.2.3 is private", Err: io.EOF, Denied: true}), problem.EgressDenied, "10.1.2.3 is private"},
		"no name":            {failing(&net.DNSError{Err: "no such host", Name: "internal-resolver"}), problem.UpstreamUnreachable, "cannot be resolved"},
		"port closed":        {unused(t), problem.UpstreamUnreachable, "connection refused"},
		"timeout":            {failing(context.DeadlineExceeded), problem.UpstreamTimeout, "in time"},
		"ends":               {speaks(""), problem.UpstreamDisconnected, "closed the connection"},
		"no HTTP":            {speaks("SSH-2.0-secret\r\n\r\n"), problem.UpstreamResponseInvalid, "is not valid HTTP"},
		"no status of HTTP":  {speaks("HTTP/1.1 042 secret\r\nContent-Length: 0\r\n\r\n"), problem.UpstreamResponseInvalid, "the invalid status 42"},
		"TLS that fails":     {unencrypted, problem.UpstreamTLSFailed, "the TLS handshake with api.example.com failed"},
		"over a limit":       {failing(&Failure{Code: problem.EgressLimitExceeded, Reason: "a limit was reached", Denied: true}), problem.EgressLimitExceeded, "a limit was reached"},
		"unasked for switch": {speaks("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: secret\r\n\r\n"), problem.UpstreamResponseInvalid, "was not requested"},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, http.NotFoundHandler(), c.how)
			scheme := "https://"
			if strings.Contains(name, "HTTP") || name == "ends" || strings.HasPrefix(name, "unasked") {
				scheme = "http://"
			}
			res, err := r.client(1).Get(scheme + host + "/")
			if err != nil {
				t.Fatal(err)
			}
			why := wantRefusal(t, res, c.code, c.reason)
			result := <-r.results
			if result.Err == nil || result.Err.Error() != why.Detail || result.Status != why.Status || strings.Contains(why.Detail, "secret") {
				t.Errorf("%+v", result)
			}
			if log := r.log.String(); log != "" {
				t.Errorf("the log says %s", log)
			}
			if name == "refused by dial" && !errors.Is(result.Err, io.EOF) {
				t.Error("the caller's error is lost")
			}
		})
	}
}

func TestPoolsDoNotShareConnections(t *testing.T) {
	dials := 0
	f := NewUpstream(UpstreamConfig{Dial: func(_ context.Context, to dial.Target) (net.Conn, error) {
		dials++
		if to.Host != host || to.Port != 80 {
			t.Errorf("dialed %s port %d", to.Host, to.Port)
		}
		here, there := net.Pipe()
		t.Cleanup(func() { there.Close() })
		go func() {
			b := make([]byte, 4096)
			for {
				if _, err := there.Read(b); err != nil {
					return
				}
				io.WriteString(there, "HTTP/1.1 204 No Content\r\n\r\n")
			}
		}()
		return here, nil
	}})
	defer f.Close()
	for _, to := range []Route{{Pool: "one"}, {Pool: "one"}, {Pool: "two"}, {Pool: "one"}, {Pool: "a.b:1/%"}, {Pool: "two"}, {Pool: "one", Private: true}, {Pool: "one"}} {
		req, _ := http.NewRequestWithContext(t.Context(), "GET", "http://"+host+"/", nil)
		w := &recorder{header: http.Header{}}
		if res := f.Do(w, req, to, nil); res.Err != nil || w.status != 204 {
			t.Fatalf("%+v", res)
		}
	}
	if dials != 4 {
		t.Errorf("%d connections for 3 pools, one of them private, too", dials)
	}
}

func TestPoolKeysOfRoutesDiffer(t *testing.T) {
	keys := map[string]Route{}
	r := httptest.NewRequest("GET", "http://"+host+"/", nil)
	for _, pool := range []string{"proxy/ann", "proxy/ann private", "proxy/ann-private", "k3f9x2m7q1az", ""} {
		for _, private := range []bool{false, true} {
			to := Route{Pool: pool, Private: private}
			key := newTarget(r, to).poolKey()
			if other, found := keys[key]; found {
				t.Errorf("%+v and %+v share connections", to, other)
			}
			keys[key] = to
		}
	}
}

func TestConnectionsBeingMadeAreBounded(t *testing.T) {
	dials := quota.New(1)
	f := NewUpstream(UpstreamConfig{Dial: func(context.Context, dial.Target) (net.Conn, error) {
		if n := dials.Used(); n != 1 {
			t.Errorf("%d are counted while one is made", n)
		}
		return nil, io.EOF
	}})
	defer f.Close()
	for _, scheme := range []string{"http", "https"} {
		req := httptest.NewRequest("GET", scheme+"://"+host+"/", nil)
		_ = f.Do(httptest.NewRecorder(), req, Route{Dials: dials}, nil)
		if n := dials.Used(); n != 0 {
			t.Errorf("%s: %d are counted afterwards", scheme, n)
		}
		_ = dials.TryAcquire(1)
		w := httptest.NewRecorder()
		result := f.Do(w, req, Route{Flow: "f1", Dials: dials}, nil)
		wantRefusal(t, w.Result(), problem.EgressLimitExceeded, "being established")
		if f, ok := errors.AsType[*Failure](result.Err); !ok || !f.Denied {
			t.Errorf("%s: %+v", scheme, result)
		}
		dials.Release(1)
	}
}

type recorder struct {
	header http.Header
	status int
}

func (r *recorder) Header() http.Header         { return r.header }
func (r *recorder) Write(b []byte) (int, error) { return len(b), nil }
func (r *recorder) WriteHeader(status int)      { r.status = status }

func TestPlainHTTPKeepsItsVersion(t *testing.T) {
	both(t, func(t *testing.T, major int) {
		r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { io.WriteString(w, req.Proto) }), withoutTLS)
		res, err := r.client(major).Get("http://" + host + "/")
		if err != nil {
			t.Fatal(err)
		}
		if proto := testkit.Body(t, res); proto[5] != '0'+byte(major) || res.ProtoMajor != major {
			t.Errorf("%s arrived as %s", res.Proto, proto)
		}
	})
}

// The HTTP/1.1 connection of an upgrade does not carry other requests.
func TestRefusedUpgradeDoesNotChangeTheProtocol(t *testing.T) {
	r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		io.WriteString(w, req.Proto+" "+req.RemoteAddr)
	}))
	conn := r.dialTLS(host, "http/1.1")
	ask := func(fields string) (proto, address string) {
		proto, address, _ = strings.Cut(testkit.Body(t, r.send(conn, "GET / HTTP/1.1\r\nHost: api.example.com\r\n"+fields+"\r\n")), " ")
		return proto, address
	}
	const upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
	first, address := ask(upgrade)
	if first != "HTTP/1.1" {
		t.Errorf("the upgrade was sent by %s", first)
	}
	if other, _ := ask(""); other != "HTTP/2.0" {
		t.Errorf("the next request was sent by %s", other)
	}
	if again, same := ask(upgrade); again != "HTTP/1.1" || same != address {
		t.Errorf("the next upgrade was sent by %s from %s, not %s", again, same, address)
	}
}

func TestHeadHasNoBody(t *testing.T) {
	both(t, func(t *testing.T, major int) {
		r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { w.Header().Set("Content-Length", "1000") }))
		res, err := r.client(major).Head("https://" + host + "/")
		if err != nil {
			t.Fatal(err)
		}
		if body := testkit.Body(t, res); body != "" || res.ContentLength != 1000 {
			t.Errorf("%q, length %d", body, res.ContentLength)
		}
	})
}

// HTTP/2 allows any number as a status, and has no protocol to switch to.
func TestStatusesOfHTTP2(t *testing.T) {
	for statuses, want := range map[string]int{"1000": 502, "42": 502, "101 200": 200, "103 299": 299} {
		t.Run(statuses, func(t *testing.T) {
			both(t, func(t *testing.T, major int) {
				l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{upstreamLeaf(t)}, NextProtos: []string{"h2"}})
				if err != nil {
					t.Fatal(err)
				}
				var serving sync.WaitGroup
				serving.Go(func() { respondHTTP2(l, strings.Fields(statuses)) }) // ends with its connection
				t.Cleanup(serving.Wait)
				r := start(t, http.NotFoundHandler(), func(_ *rig, _ *Destination, c *UpstreamConfig) {
					c.Dial = func(ctx context.Context, _ dial.Target) (net.Conn, error) {
						return new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
					}
				})
				res, err := r.client(major).Get("https://" + host + "/")
				if err != nil {
					t.Fatal(err)
				}
				testkit.Body(t, res)
				if res.StatusCode != want || r.log.String() != "" {
					t.Errorf("status %d, log %q", res.StatusCode, r.log.String())
				}
			})
		})
	}
}

// The initial SETTINGS frame limits how much of a response an upstream may send ahead of
// its client.
func TestSmallWindowLimitsTheResponseAhead(t *testing.T) {
	for small, want := range map[bool]uint32{false: maxStreamAhead, true: smallStreamAhead} {
		l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{upstreamLeaf(t)}, NextProtos: []string{"h2"}})
		if err != nil {
			t.Fatal(err)
		}
		window := make(chan uint32, 1)
		var serving sync.WaitGroup
		serving.Go(func() { window <- windowHTTP2(l) })
		t.Cleanup(serving.Wait)
		r := start(t, http.NotFoundHandler(), func(r *rig, _ *Destination, c *UpstreamConfig) {
			r.smallWindow = small
			c.Dial = func(ctx context.Context, _ dial.Target) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
			}
		})
		res, err := r.client(1).Get("https://" + host + "/")
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if got := <-window; got != want {
			t.Errorf("small window %v: %d bytes, want %d", small, got, want)
		}
	}
}

// windowHTTP2 accepts one connection and returns the initial window of its streams.
func windowHTTP2(l net.Listener) (window uint32) {
	conn, err := l.Accept()
	l.Close()
	if err != nil {
		return 0
	}
	defer conn.Close()
	_, _ = io.ReadFull(conn, make([]byte, len(http2.ClientPreface)))
	frame, _ := http2.NewFramer(conn, conn).ReadFrame()
	if settings, ok := frame.(*http2.SettingsFrame); ok {
		window, _ = settings.Value(http2.SettingInitialWindowSize)
	}
	return window
}

// respondHTTP2 accepts one connection and responds to a request with the statuses.
func respondHTTP2(l net.Listener, statuses []string) {
	conn, err := l.Accept()
	l.Close()
	if err != nil {
		return
	}
	defer conn.Close()
	if _, err := io.ReadFull(conn, make([]byte, len(http2.ClientPreface))); err != nil {
		return
	}
	f := http2.NewFramer(conn, conn)
	for err = f.WriteSettings(); err == nil; {
		var frame http2.Frame
		if frame, err = f.ReadFrame(); err != nil || frame.Header().Type != http2.FrameHeaders {
			continue
		}
		for i, status := range statuses {
			var block bytes.Buffer
			_ = hpack.NewEncoder(&block).WriteField(hpack.HeaderField{Name: ":status", Value: status})
			_ = f.WriteHeaders(http2.HeadersFrameParam{
				StreamID: frame.Header().StreamID, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: i == len(statuses)-1,
			})
		}
	}
}

// An HTTP/2 connection cannot become a WebSocket with an HTTP/1.1 upstream.
func TestUpgradeThatTheConnectionCannotCarryIsRefused(t *testing.T) {
	f := NewUpstream(UpstreamConfig{Dial: func(context.Context, dial.Target) (net.Conn, error) {
		here, there := net.Pipe()
		t.Cleanup(func() { there.Close() })
		go func() {
			there.Read(make([]byte, 4096))
			io.WriteString(there, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		}()
		return here, nil
	}})
	defer f.Close()
	req := httptest.NewRequest("GET", "http://"+host+"/", nil)
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "websocket")
	w := httptest.NewRecorder()
	result := f.Do(w, req, Route{Flow: "f1"}, nil)
	wantRefusal(t, w.Result(), problem.UpgradeFailed, "cannot become a WebSocket")
	if failure := (*Failure)(nil); !errors.As(result.Err, &failure) || failure.Code != problem.UpgradeFailed || result.Status != http.StatusBadGateway {
		t.Errorf("%+v", result)
	}
}
