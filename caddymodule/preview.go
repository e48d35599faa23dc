package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/doze-run/doze/redact"
	"github.com/doze-run/doze/wakeproxy"
)

func init() {
	caddy.RegisterModule(new(Preview))
}

// Preview serves the previews of sandboxes and wakes the ones that sleep. It
// responds to every request that reaches it; hosts that name no preview get 404.
type Preview struct {
	// Domains of previews; they can also be on the directive's line. Default:
	// `preview_domain`.
	Domains []string `json:"domains,omitempty"`
	// The time that a request waits for a wake, and after a cold wake for the port, before
	// it gets 504 with Retry-After. The wake continues. Default: `30s`.
	WaitTimeout caddy.Duration `json:"wait_timeout,omitempty"`
	// The time that a browser's navigation waits before it gets the waiting page, which
	// opens the real one by itself. Default: `1s`.
	WaitingPageAfter caddy.Duration `json:"waiting_page_after,omitempty"`
	// The maximum number of requests in flight to all sandboxes, WebSockets included.
	// Further ones get 503 with Retry-After. Default: `16384`.
	MaxRequests int `json:"max_requests,omitempty"`
	// The maximum number of requests in flight to one sandbox. Default: `4096`.
	MaxRequestsPerSandbox int `json:"max_requests_per_sandbox,omitempty"`

	app     *App
	proxy   *reverseproxy.Handler
	once    sync.Once // makes handler with the first request after the node is open
	handler *wakeproxy.Handler
}

// CaddyModule returns the Caddy module information.
func (*Preview) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.doze_preview", New: func() caddy.Module { return new(Preview) }}
}

// forever is how long upgraded connections outlive the configuration they came
// with: reverse_proxy would close them on every reload. They end by themselves,
// with their sandbox, or with the process.
const forever = caddy.Duration(100 * 365 * 24 * time.Hour)

// Provision makes Caddy's own reverse proxy with our transport.
func (p *Preview) Provision(ctx caddy.Context) (err error) {
	if p.app, err = dozeApp(ctx); err != nil {
		return err
	}
	p.Domains = p.app.domains(p.Domains)
	p.app.previews = append(p.app.previews, p.Domains...)
	p.proxy = &reverseproxy.Handler{
		Transport: transport{p.app},
		// The transport finds the way by the request; this is the name that
		// logs and metrics show.
		Upstreams:        reverseproxy.UpstreamPool{{Dial: "sandbox:80"}},
		StreamCloseDelay: forever,
	}
	if err := p.proxy.Provision(ctx); err != nil {
		return fmt.Errorf("provision the reverse proxy: %w", err)
	}
	return nil
}

// Validate checks the settings.
func (p *Preview) Validate() error {
	if p.WaitTimeout < 0 || p.WaitingPageAfter < 0 || p.MaxRequests < 0 || p.MaxRequestsPerSandbox < 0 {
		return fmt.Errorf("doze_preview: a limit is negative; limits are positive, or 0 for the default")
	}
	for _, domain := range p.Domains {
		if err := wakeproxy.ValidateDomain(domain); err != nil {
			return fmt.Errorf("doze_preview: %w", err)
		}
	}
	return nil
}

// Cleanup releases the reverse proxy; streams continue.
func (p *Preview) Cleanup() error {
	if p.proxy == nil {
		return nil
	}
	return p.proxy.Cleanup()
}

// ServeHTTP serves one preview request.
func (p *Preview) ServeHTTP(w http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
	skipAccessLog(r)
	node, err := p.app.node()
	if err != nil {
		notOpen.Write(w, r)
		return nil
	}
	p.once.Do(func() {
		next := func(w http.ResponseWriter, r *http.Request) error { return p.proxy.ServeHTTP(w, r, nothing) }
		p.handler = wakeproxy.NewHandler(node.Previews, next, wakeproxy.Options{
			Domains:               p.Domains,
			WaitTimeout:           time.Duration(p.WaitTimeout),
			WaitingPageAfter:      time.Duration(p.WaitingPageAfter),
			MaxRequests:           p.MaxRequests,
			MaxRequestsPerSandbox: p.MaxRequestsPerSandbox,
			Trusted:               fromTrustedProxy,
		})
	})
	p.handler.ServeHTTP(w, r)
	return nil
}

var nothing = caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })

// fromTrustedProxy: the server's trusted_proxies decide.
func fromTrustedProxy(r *http.Request) bool {
	trusted, _ := caddyhttp.GetVar(r.Context(), caddyhttp.TrustedProxyVarKey).(bool)
	return trusted
}

// transport sends requests through the node's wakeproxy, which opens after the
// reverse proxy is provisioned.
type transport struct{ app *App }

func (t transport) RoundTrip(req *http.Request) (*http.Response, error) {
	res, err := t.send(req)
	redactRequest(req)
	if err == nil && res.StatusCode != http.StatusSwitchingProtocols {
		res.Body = loggableBody{res.Body}
	}
	return res, err
}

// redactRequest leaves of a request that was sent what the reverse proxy needs to
// return the response. The reverse proxy logs this request when the response breaks
// off, whatever the log's format.
func redactRequest(req *http.Request) {
	header := http.Header{}
	for _, name := range []string{"Accept-Encoding", "Connection", "Upgrade"} {
		if values := req.Header[name]; values != nil {
			header[name] = values
		}
	}
	req.Header = header
	req.Host = redact.Text(req.Host)
	req.RequestURI, _, _ = strings.Cut(req.RequestURI, "?")
	if req.TLS != nil {
		state := *req.TLS
		state.ServerName = redact.Text(state.ServerName)
		req.TLS = &state
	}
}

// loggableBody is the body of a response whose errors do not quote it: the reverse
// proxy logs them.
type loggableBody struct{ io.ReadCloser }

func (b loggableBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	switch {
	case err == nil, err == io.EOF, errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, context.Canceled), errors.As(err, new(net.Error)):
	default:
		err = errMalformedBody
	}
	return n, err
}

var errMalformedBody = errors.New("malformed response body or trailer")

func (t transport) send(req *http.Request) (*http.Response, error) {
	node, err := t.app.node()
	if err != nil {
		if req.Body != nil {
			req.Body.Close()
		}
		return nil, err
	}
	return node.Previews.RoundTrip(req)
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Preview)(nil)
	_ caddy.Validator             = (*Preview)(nil)
	_ caddy.CleanerUpper          = (*Preview)(nil)
	_ caddyhttp.MiddlewareHandler = (*Preview)(nil)
	_ http.RoundTripper           = transport{}
)
