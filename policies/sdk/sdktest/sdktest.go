//go:build !wasip1

// Package sdktest runs a policy natively, in `go test`, with a host that stands in
// for the node.
//
//	func TestTokenIsAdded(t *testing.T) {
//		p := sdktest.New(t, `{"scheme":"Bearer"}`)
//		p.Secrets["token"] = "s3cret"
//		got := p.Send(sdktest.Get("https://api.example.com/user"))
//		if got.Header.Get("Authorization") != "Bearer s3cret" {
//			t.Errorf("sent %v", got.Header)
//		}
//	}
//
// If the node would stop the policy, because it violates the ABI or exceeds a limit, Send
// panics with the reason. Other problems deny the request, as on the node: a message that is
// too long for a policy that buffers it, or a secret that is not a key.
//
// The policy is the one that the tested program passes to sdk.Serve. Tests that use this
// package must not run in parallel: a program has one policy.
package sdktest

import (
	"bytes"
	"cmp"
	"io"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/policies/sdk"
	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

// Policy is a policy with the state that the node has when it runs the policy.
type Policy struct {
	// Secrets maps the names that the policy uses to secrets. For Sign, they are keys in
	// PEM.
	Secrets map[string]string
	// Sandbox is the sandbox that sends the requests.
	Sandbox Sandbox
	// Now is the time that the policy sees. It does not advance.
	Now time.Time
	// Upstream responds to requests that the policy forwards. If nil, the response is 200
	// without a body.
	Upstream func(*http.Request) *http.Response
	// MaxBody bounds buffered bodies, in bytes, as the node does; 0 means 1 MiB.
	MaxBody int

	config   string
	features uint32
	kv       kv
}

// Sandbox is the sandbox that sends the requests.
type Sandbox = sdk.Sandbox

// New starts the policy with a configuration. It fails the test if the policy rejects it.
func New(t testing.TB, config string) *Policy {
	t.Helper()
	p, err := Start(config)
	if err != nil {
		t.Fatalf("the policy refuses its configuration: %v", err)
	}
	return p
}

// Start starts the policy with a configuration. It returns an error if the policy rejects
// it.
func Start(config string) (*Policy, error) {
	if abi.Loaded.Start == nil {
		panic("sdktest: this program has not called sdk.Serve in func init")
	}
	p := &Policy{
		Secrets: map[string]string{},
		Sandbox: Sandbox{ID: "k3f9x2m7q1az", Name: "shop", Owner: "tester", Labels: map[string]string{}},
		Now:     time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		config:  config,
		kv:      kv{},
	}
	return p, p.start()
}

// running is the policy that the program currently runs. There is only one instance, so
// Send restarts a policy that is not running, in tests that alternate between policies.
var running *Policy

// start starts the policy, as the node starts an instance before its first exchange.
func (p *Policy) start() error {
	h := &host{policy: p, phase: starting}
	var err error
	abi.With(h, func() { err = abi.Loaded.Start() })
	p.features, running = h.features, p
	return err
}

// Get returns a GET request.
func Get(url string) *http.Request { return Request("GET", url, "") }

// Request returns a request with a body. It panics if the method or the URL is invalid.
func Request(method, url, body string) *http.Request {
	r, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		panic(err)
	}
	r.Header.Set("User-Agent", "test")
	return r
}

// Result is the outcome of a request.
type Result struct {
	// Denied reports whether the request was denied, and Reason is the reason.
	Denied bool
	Reason string

	// The request that was sent upstream, with secrets instead of references. Method is
	// empty if none was sent.
	Method string
	URI    string
	Header http.Header
	Body   string

	// The client's response, unless the request was denied.
	Response     *http.Response
	ResponseBody string

	Notes []string // in the audit log
	Log   []string
}

// Send runs a request through the policy and, if the policy forwards it, to Upstream.
func (p *Policy) Send(r *http.Request) Result {
	if running != p {
		if err := p.start(); err != nil {
			return Result{Denied: true, Reason: err.Error()}
		}
	}
	h := newHost(p, r)
	var next uint64
	h.stopping(func() {
		abi.With(h, func() { next = abi.Loaded.HandleRequest() })
		if h.denied || uint32(next) != 1 {
			return
		}
		h.forward()
		if h.buffered || h.features&abi.RequestOnly == 0 {
			abi.With(h, func() { abi.Loaded.HandleResponse(uint32(next>>32), 0) })
		}
	})
	return h.result()
}

// forward sends the request, as the policy changed it, to the upstream.
func (h *host) forward() {
	body := h.requestBody()
	h.sent = h.rendered(string(body))
	response := &http.Response{StatusCode: 200}
	if h.policy.Upstream != nil {
		r := Request(h.sent.Method, h.url.Scheme+"://"+h.url.Host+h.sent.URI, h.sent.Body)
		maps.Copy(r.Header, h.sent.Header)
		response = h.policy.Upstream(r)
	}
	h.phase = afterNext
	h.buffered = h.features&abi.BufferResponse != 0 || h.own.written
	// Fields that the policy set are defaults. The body that it wrote precedes the
	// upstream's body.
	h.upstream = &message{status: response.StatusCode, header: h.own.header, trailer: http.Header{}, body: h.own.body}
	maps.Copy(h.upstream.header, response.Header)
	maps.Copy(h.upstream.trailer, response.Trailer)
	if response.Body != nil {
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil {
			panic(err)
		}
		h.upstream.body = append(h.upstream.body, body...)
	}
	if limit := h.maxBody(); h.buffered && len(h.upstream.body) > limit {
		refuseLength("it reads whole responses, and this one has more than %d bytes", limit)
	}
}

func (h *host) result() Result {
	r := h.sent
	r.Notes, r.Log = h.notes, h.log
	if h.denied {
		r.Denied, r.Reason = true, h.reason
		return r
	}
	a := &h.own
	if h.upstream != nil {
		a = h.upstream
	}
	r.ResponseBody = string(a.body)
	r.Response = &http.Response{
		StatusCode: cmp.Or(a.status, http.StatusOK), Header: a.header, Trailer: a.trailer, Body: io.NopCloser(bytes.NewReader(a.body)),
	}
	return r
}
