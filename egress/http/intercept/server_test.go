package intercept

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

func TestMisdirectedRequestsAreRefused(t *testing.T) {
	reached := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		t.Errorf("%s of %s reached the host", req.RequestURI, req.Host)
	})
	for name, c := range map[string]struct {
		serverName string
		request    string
		code       problem.Code
	}{
		"another host":           {host, "GET / HTTP/1.1\r\nHost: other.example\r\n\r\n", problem.RequestMisdirected},
		"another port":           {host, "GET / HTTP/1.1\r\nHost: api.example.com:444\r\n\r\n", problem.RequestMisdirected},
		"port 0":                 {host, "GET / HTTP/1.1\r\nHost: api.example.com:0\r\n\r\n", problem.RequestMisdirected},
		"two dots":               {host, "GET / HTTP/1.1\r\nHost: api.example.com..\r\n\r\n", problem.RequestMisdirected},
		"brackets":               {host, "GET / HTTP/1.1\r\nHost: [api.example.com\r\n\r\n", problem.RequestMisdirected},
		"no host":                {host, "GET / HTTP/1.0\r\n\r\n", problem.RequestMisdirected},
		"absolute, another host": {host, "GET https://other.example/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n", problem.RequestMisdirected},
		"absolute, no TLS":       {host, "GET http://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n", problem.RequestMisdirected},
		"another name in TLS":    {"other.example", "GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n", problem.RequestMisdirected},
		"no name in TLS":         {"", "GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n", problem.RequestMisdirected},
		"CONNECT":                {host, "CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com:443\r\n\r\n", problem.MethodNotAllowed},
		"asterisk":               {host, "OPTIONS * HTTP/1.1\r\nHost: api.example.com\r\n\r\n", problem.TargetInvalid},
		"opaque":                 {host, "GET https:other.example/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n", problem.TargetInvalid},
		"upgrade":                {host, "GET / HTTP/1.1\r\nHost: api.example.com\r\nConnection: upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n", problem.UpgradeNotAllowed},
		"two upgrades":           {host, "GET / HTTP/1.1\r\nHost: api.example.com\r\nConnection: upgrade\r\nUpgrade: websocket, tcp\r\n\r\n", problem.UpgradeNotAllowed},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, reached)
			res := r.send(r.dialTLS(c.serverName, "http/1.1"), c.request)
			why := wantRefusal(t, res, c.code, "")
			if refused := r.refusals(); len(refused) != 1 || refused[0].Code != c.code || refused[0].Detail != why.Detail || why.Detail == "" {
				t.Errorf("the destination refused %+v", refused)
			}
		})
	}
}

func TestHostMatchesInAnySpelling(t *testing.T) {
	r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { io.WriteString(w, req.Host+req.RequestURI) }))
	for _, request := range []string{
		"GET /x HTTP/1.1\r\nHost: API.Example.com.\r\n\r\n",
		"GET /x HTTP/1.1\r\nHost: api.example.com.:443\r\n\r\n",
		"GET /x HTTP/1.1\r\nHost: [api.example.com]\r\n\r\n",
		"GET https://API.example.com./x HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
		"GET /x HTTP/1.1\r\nHost: api.example.com:443\r\n\r\n",
		"GET https://api.example.com/x HTTP/1.1\r\nHost: ignored.example\r\n\r\n",
		"GET /x HTTP/1.1\r\nHost: api.example.com\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
	} {
		if res := r.send(r.dialTLS(host, "http/1.1"), request); res.StatusCode != 200 || testkit.Body(t, res) != host+"/x" {
			t.Errorf("%q: %d, or the upstream saw another host than %s", request, res.StatusCode, host)
		}
	}
}

func TestUpstreamGetsTheCanonicalHost(t *testing.T) {
	for _, c := range []struct {
		to         Destination
		sent, want string
	}{
		{Destination{Host: "api.example.com", Port: 443, TLS: true}, "API.example.com.:443", "api.example.com"},
		{Destination{Host: "api.example.com", Port: 8443, TLS: true}, "[api.Example.com]:8443", "api.example.com:8443"},
		{Destination{Host: "api.example.com", Port: 80}, "api.example.com.", "api.example.com"},
		{Destination{Host: "2001:db8::1", Port: 80}, "[2001:DB8::1]", "[2001:db8::1]"},
	} {
		r := httptest.NewRequest("GET", "/", nil)
		r.Host = c.sent
		if c.to.complete(r); r.Host != c.want || r.URL.Host != c.want {
			t.Errorf("%s became %s in the request and %s in its URL, want %s", c.sent, r.Host, r.URL.Host, c.want)
		}
	}
}

// Clients may reuse an HTTP/2 connection for other names in its certificate. Here the
// certificate has one name.
func TestConnectionIsForOneAuthority(t *testing.T) {
	r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { io.WriteString(w, req.Host+req.Header.Get("Host")) }))
	for name, c := range map[string]struct {
		fields []hpack.HeaderField
		status string
	}{
		"its own":           {[]hpack.HeaderField{{Name: ":authority", Value: host}}, "200"},
		"its own, and host": {[]hpack.HeaderField{{Name: ":authority", Value: host}, {Name: "host", Value: "other.example"}}, "200"},
		"another":           {[]hpack.HeaderField{{Name: ":authority", Value: "other.example"}}, "421"},
		"another, and host": {[]hpack.HeaderField{{Name: ":authority", Value: "other.example"}, {Name: "host", Value: host}}, "421"},
		"none":              {nil, "421"},
	} {
		t.Run(name, func(t *testing.T) {
			if status, body := r.sendFields(c.fields...); status != c.status || status == "200" && body != host {
				t.Errorf("status %s, the host saw %q", status, body)
			}
		})
	}
}

// sendFields sends one GET request with these fields over HTTP/2, and returns the response.
func (r *rig) sendFields(fields ...hpack.HeaderField) (status, body string) {
	r.t.Helper()
	conn := r.dialTLS(host, "h2")
	io.WriteString(conn, http2.ClientPreface)
	f := http2.NewFramer(conn, conn)
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	f.WriteSettings()
	var block strings.Builder
	e := hpack.NewEncoder(&block)
	for _, field := range append([]hpack.HeaderField{{Name: ":method", Value: "GET"}, {Name: ":scheme", Value: "https"}, {Name: ":path", Value: "/"}}, fields...) {
		e.WriteField(field)
	}
	f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte(block.String()), EndHeaders: true, EndStream: true})
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			r.t.Fatal(err)
		}
		if h, ok := frame.(*http2.MetaHeadersFrame); ok {
			status = h.PseudoValue("status")
		}
		if d, ok := frame.(*http2.DataFrame); ok {
			body += string(d.Data())
		}
		if frame.Header().StreamID == 1 && frame.Header().Flags.Has(http2.FlagDataEndStream) {
			return status, body
		}
	}
}

// A policy that counts bytes would count a negative length.
func TestLengthsAreTheBodys(t *testing.T) {
	r := start(t, nil, func(_ *rig, d *Destination, _ *UpstreamConfig) {
		d.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			io.WriteString(w, strings.Join(req.Header["Content-Length"], ","))
		})
	})
	for sent, want := range map[string]string{"-100": "0", "none": "0", "5": "0", "0": "0"} {
		status, body := r.sendFields(hpack.HeaderField{Name: ":authority", Value: host}, hpack.HeaderField{Name: "content-length", Value: sent})
		if status != "200" || body != want {
			t.Errorf("length %s: status %s, handlers see %q", sent, status, body)
		}
	}
}

func TestPanicOfAHandlerEndsItsStreamOnly(t *testing.T) {
	both(t, func(t *testing.T, major int) {
		r := start(t, http.NotFoundHandler(), func(_ *rig, d *Destination, _ *UpstreamConfig) {
			d.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if req.URL.Path == "/panic" {
					panic("oh")
				}
			})
		})
		c := r.client(major)
		if res, err := c.Get("https://" + host + "/panic"); err == nil {
			res.Body.Close()
			t.Error("the panicking handler sent a response")
		}
		if res, err := c.Get("https://" + host + "/"); err != nil || res.StatusCode != 200 {
			t.Error(err)
		}
		if log := r.log.String(); !strings.Contains(log, "panic=string") || strings.Contains(log, "panic=oh") {
			t.Errorf("log %q", log)
		}
	})
}

func TestServeEndsWithItsContextAndHandlers(t *testing.T) {
	both(t, func(t *testing.T, major int) {
		s := New(Config{Certificate: certificates(newAuthority()), Log: slog.New(slog.DiscardHandler)})
		here, there := tcp(t)
		ctx, cancel := context.WithCancel(t.Context())
		began, handlerEnded := make(chan struct{}), false
		served := make(chan error)
		go func() {
			served <- s.Serve(ctx, there, Destination{Host: host, Port: 443, TLS: true, Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				close(began)
				<-req.Context().Done()
				handlerEnded = true
			})})
		}()
		protocols := new(http.Protocols)
		protocols.SetHTTP1(major == 1)
		protocols.SetHTTP2(major == 2)
		tr := &http.Transport{Protocols: protocols, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DialContext: func(context.Context, string, string) (net.Conn, error) { return here, nil }}
		responded := make(chan struct{})
		go func() {
			defer close(responded)
			req, _ := http.NewRequest("GET", "https://"+host+"/", nil)
			if res, err := tr.RoundTrip(req); err == nil {
				res.Body.Close()
			}
		}()
		<-began
		cancel()
		if err := <-served; err != nil || !handlerEnded {
			t.Errorf("%v, handler ended: %t", err, handlerEnded)
		}
		<-responded
		tr.CloseIdleConnections()
	})
}

func TestUntrustingClientIsReported(t *testing.T) {
	s := New(Config{Certificate: certificates(newAuthority()), Log: slog.New(slog.DiscardHandler)})
	here, there := tcp(t)
	served := make(chan error)
	go func() { served <- s.Serve(t.Context(), there, Destination{Host: host, Port: 443, TLS: true}) }()
	if err := tls.Client(here, &tls.Config{ServerName: host, RootCAs: upstreamCA().Pool()}).Handshake(); err == nil {
		t.Fatal("it trusts")
	}
	if err := <-served; err == nil || !strings.Contains(err.Error(), host) {
		t.Errorf("%v", err)
	}
}

func TestRefusalInTheProtocolOfTheClient(t *testing.T) {
	r := start(t, http.NotFoundHandler(), func(_ *rig, d *Destination, _ *UpstreamConfig) {
		d.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			w.Header().Set("Content-Encoding", "gzip") // set by a policy before the refusal
			Refuse(w, req, problem.New(problem.EgressDenied, "nö: 100%").WithFlow(host, "node/x", "f1"))
		})
	})
	req, _ := http.NewRequest("HEAD", "https://"+host+"/", nil)
	res, err := r.client(2).Do(req)
	if err != nil || res.StatusCode != 403 || res.ContentLength <= 0 || res.Header.Get(problem.HeaderError) != "egress_denied" || res.Header.Get("Content-Encoding") != "" {
		t.Errorf("HEAD: %v, %v", res, err)
	}
	for kind, grpc := range map[string]bool{"application/grpc": true, "application/grpc+proto": true, "application/grpc-web": false, "application/json": false} {
		req, _ := http.NewRequest("POST", "https://"+host+"/", strings.NewReader("x"))
		req.Header.Set("Content-Type", kind)
		res, err := r.client(2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if !grpc {
			if why := wantRefusal(t, res, problem.EgressDenied, "nö: 100%"); why.Rule != "node/x" {
				t.Errorf("%s: %+v", kind, why)
			}
			continue
		}
		if body := testkit.Body(t, res); res.StatusCode != 200 || body != "" || res.Header.Get("Grpc-Status") != "7" || res.Header.Get("Grpc-Message") != "n%C3%B6: 100%25 (flow f1)" {
			t.Errorf("%s: %d %v %s", kind, res.StatusCode, res.Header, body)
		}
	}
}

func TestCloseNotifyIsSent(t *testing.T) {
	r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { io.WriteString(w, "hello") }))
	conn := r.dialTLS(host, "http/1.1")
	io.WriteString(conn, "GET / HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n\r\n")
	if _, err := io.ReadAll(bufio.NewReader(conn)); err != nil { // without close_notify: unexpected EOF
		t.Error(err)
	}
}

// Clients other than Go's.
func TestOtherClients(t *testing.T) {
	r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		io.Copy(w, req.Body)
		io.WriteString(w, req.Proto)
	}))
	bundle := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(bundle, r.bundle, 0o600); err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(r.addr)
	for name, c := range map[string]struct {
		args  []string
		input string
		want  string
	}{
		"curl":      {[]string{"curl", "-sS", "--cacert", bundle, "--connect-to", "::127.0.0.1:" + port, "-d", "hello ", "https://" + host + "/"}, "", "hello HTTP/2.0"},
		"curl 1.1":  {[]string{"curl", "-sS", "--http1.1", "--cacert", bundle, "--connect-to", "::127.0.0.1:" + port, "-H", "Expect: 100-continue", "-d", "hello ", "https://" + host + "/"}, "", "hello HTTP/2.0"},
		"openssl":   {[]string{"openssl", "s_client", "-quiet", "-verify_quiet", "-verify_return_error", "-CAfile", bundle, "-servername", host, "-connect", r.addr, "-ign_eof"}, "GET / HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n\r\n", "HTTP/2.0"},
		"python":    {[]string{"python3", "-c", "import ssl,socket,http.client,sys\nc=http.client.HTTPSConnection('" + host + "',context=ssl.create_default_context(cafile=sys.argv[1]))\nc._create_connection=lambda a,*x:socket.create_connection(('127.0.0.1',int(sys.argv[2])))\nc.request('POST','/',body=iter([b'hel',b'lo ']),encode_chunked=True,headers={'Transfer-Encoding':'chunked'})\nprint(c.getresponse().read().decode())", bundle, port}, "", "hello HTTP/2.0"},
		"Node http": {[]string{"node", "-e", "const q=require('https').request({host:'127.0.0.1',port:" + port + ",servername:'" + host + "',ca:require('fs').readFileSync('" + bundle + "'),headers:{Host:'" + host + "'},method:'POST'},r=>r.pipe(process.stdout));q.end('hello ')"}, "", "hello HTTP/2.0"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := exec.LookPath(c.args[0]); err != nil {
				t.Fatal("not installed: run packaging/host/setup --with-tests")
			}
			cmd := exec.Command(c.args[0], c.args[1:]...)
			cmd.Stdin = strings.NewReader(c.input)
			out, err := cmd.CombinedOutput()
			if !strings.Contains(string(out), c.want) {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

// tcp returns both ends of a connection.
func tcp(t testing.TB) (here, there net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if here, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if there, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { here.Close(); there.Close() })
	return here, there
}
