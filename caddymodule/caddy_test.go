package caddymodule

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/doze-run/doze/egress"
	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/node/nodetest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

const (
	testToken = nodetest.Token
	apiHost   = "api.doze.localhost"
)

// site is a real Caddy with doze in it. Its node is the real one over fakes.
type site struct {
	*sandboxtest.Node
	node    *node.Node
	t       *testing.T
	home    string
	port    int
	global  string // more global options
	storage string // its arguments; default: files
}

// newSite loads a Caddyfile like the one of `make up`, with more options of doze.
func newSite(t *testing.T, options ...string) *site {
	t.Helper()
	s := prepareSite(t)
	s.start(strings.Join(options, "\n"))
	return s
}

// prepareSite returns a site that start starts.
func prepareSite(t *testing.T) *site {
	t.Helper()
	home, err := os.MkdirTemp("", "doze") // the path of a Unix socket must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(home) })
	s := &site{Node: sandboxtest.Prepare(t, nil), t: t, home: home, port: testkit.FreePort(t)}
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// start opens the node, as a restart does if it was closed, and loads the site. The
// configuration takes the node over.
func (s *site) start(options string) {
	s.t.Helper()
	held := new(heldNode)
	held.target.set(slog.DiscardHandler)
	cfg := node.Config{Home: s.home, Sandbox: sandbox.DefaultConfig(), Egress: egress.DefaultSettings(), PolicyCompiler: policyCompiler}
	cfg.Sandbox.Images.Names = map[string]string{"base": "localhost/doze/base:latest"}
	s.node = nodetest.Open(s.t, cfg, s.Node, slog.New(logHandler{target: &held.target}))
	held.Node = s.node
	if s.storage != "" {
		var err error
		if held.store, err = holdStore(s.home, slog.DiscardHandler); err != nil {
			s.t.Fatal(err)
		}
	}
	if _, _, err := nodes.LoadOrNew(s.home, func() (caddy.Destructor, error) { return held, nil }); err != nil {
		s.t.Fatal(err)
	}
	s.mustLoad(options, "")
	if _, err := nodes.Delete(s.home); err != nil {
		s.t.Fatal(err)
	}
	s.mustServe()
}

// mustServe fails the test unless the configuration that runs serves the site's node.
func (s *site) mustServe() {
	s.t.Helper()
	if newestApp(s.t).held.Node != s.node {
		s.t.Fatal("another node was opened")
	}
}

// sleepAfter is the default of sandboxes that are created now.
func (s *site) sleepAfter() time.Duration {
	s.t.Helper()
	sb, _, err := s.Manager.Create(s.t.Context(), sandbox.CreateRequest{Owner: node.Operator})
	if err != nil {
		s.t.Fatal(err)
	}
	if err := s.Manager.Destroy(s.t.Context(), sb.ID); err != nil {
		s.t.Fatal(err)
	}
	return time.Duration(sb.SleepAfter)
}

// load loads the site with more options of doze and more sites.
func (s *site) load(options, sites string) error {
	config := fmt.Sprintf(`{
	admin off
	persist_config off
	storage %[6]s
	skip_install_trust
	default_bind 127.0.0.1
	https_port %[2]d
	auto_https disable_redirects
	log {
		output discard
	}
	%[5]s
	doze {
		data %[1]s
		preview_port %[2]d
		%[3]s
	}
}
api.doze.localhost {
	doze_api
}
*.preview.doze.localhost {
	tls internal
	doze_preview
}
https:// {
	doze_preview
}
%[4]s`, s.home, s.port, options, sites, s.global, cmp.Or(s.storage, "file_system "+s.home+"/caddy"))
	adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(config), nil)
	if err != nil {
		return err
	}
	return caddy.Load(adapted, true)
}

func (s *site) mustLoad(options, sites string) {
	s.t.Helper()
	if err := s.load(options, sites); err != nil {
		s.t.Fatal(err)
	}
	// Caddy issues certificates in the background.
	for _, host := range []string{apiHost, "any." + defaultPreviewDomain} {
		s.awaitCertificate(host)
	}
}

func (s *site) awaitCertificate(host string) {
	s.t.Helper()
	testkit.Eventually(s.t, host+" has a certificate", func() bool {
		conn, err := tls.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)), &tls.Config{ServerName: host, InsecureSkipVerify: true})
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
}

// client reaches the site under any host name; h2 chooses HTTP/2.
func (s *site) client(h2 bool) *http.Client {
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)))
		},
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, // the CA is the test's own
		ForceAttemptHTTP2: h2,
	}
	if h2 {
		// A thousand streams need no more. The client would else make hundreds
		// concurrently, and starve those so that the server closes them.
		transport.MaxConnsPerHost = 4
	}
	s.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// sandbox makes a running sandbox with a server in it and returns the address
// of its preview. The network of the test's node leads to the test's loopback.
func (s *site) sandbox(app http.HandlerFunc, port sandbox.Port) (sandbox.Sandbox, string) {
	s.t.Helper()
	server := httptest.NewServer(app)
	s.t.Cleanup(server.Close)
	port.Port = uint16(server.Listener.Addr().(*net.TCPAddr).Port)
	return s.sandboxAt(port)
}

func (s *site) sandboxAt(port sandbox.Port) (sandbox.Sandbox, string) {
	s.t.Helper()
	sb, _, err := s.Manager.Create(s.t.Context(), sandbox.CreateRequest{Owner: node.Operator, Name: fmt.Sprintf("test-%d", port.Port)})
	if err != nil {
		s.t.Fatal(err)
	}
	if _, err := s.Manager.Expose(s.t.Context(), sb.ID, port); err != nil {
		s.t.Fatal(err)
	}
	var ports struct{ Ports []struct{ URL string } }
	res := s.api("GET", "/api/v1/sandbox/"+string(sb.ID)+"/ports", "")
	if err := json.NewDecoder(res.Body).Decode(&ports); err != nil || len(ports.Ports) != 1 {
		s.t.Fatalf("ports %+v, %v", ports, err)
	}
	return s.get(sb.ID), ports.Ports[0].URL
}

func (s *site) get(id sandbox.ID) sandbox.Sandbox {
	s.t.Helper()
	sb, ok := s.Manager.ByID(id)
	if !ok {
		s.t.Fatalf("no sandbox %s", id)
	}
	return sb
}

func (s *site) api(method, path, body string) *http.Response {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), method, fmt.Sprintf("https://%s:%d%s", apiHost, s.port, path), strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+testToken)
	return s.do(s.client(true), req)
}

func (s *site) fetch(client *http.Client, url string) *http.Response {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), "GET", url, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	return s.do(client, req)
}

func (s *site) do(client *http.Client, req *http.Request) *http.Response {
	s.t.Helper()
	res, err := send(client, req)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { res.Body.Close() })
	return res
}

// send connects again when a reload ends a connection on which the old
// configuration's server has read no request yet. The kernel does that with
// what is not accepted (see net.ipv4.tcp_migrate_req), and net/http with the
// rest; browsers connect again too.
func send(client *http.Client, req *http.Request) (*http.Response, error) {
	for attempt := 0; ; attempt++ {
		res, err := client.Do(req)
		if attempt == 3 || req.Method != "GET" || !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, io.EOF) {
			return res, err
		}
	}
}

func hello(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }
