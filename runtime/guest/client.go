package guest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"
)

const (
	// dialTimeout covers a connect on a local socket.
	dialTimeout = 5 * time.Second
	// responseTimeout is how long the guest may take to begin a response, beyond
	// the time that the request itself asks it to wait. Generous, because a sandbox with
	// a quarter of a core may be busy; a caller's context is usually shorter.
	responseTimeout = 30 * time.Second
	// stallTimeout ends an upload when the guest stops reading, and a download of a file,
	// an archive or a listing when it stops sending.
	stallTimeout = 60 * time.Second
	// longTimeout is how long the guest may work on a request whose response comes only at
	// its end: removing a folder, or moving one between file systems.
	longTimeout = 15 * time.Minute
	// endTimeout is how long the end of a stream may follow its last frame.
	endTimeout = time.Second
	// writeBuffer is for a chunk of a body: 32 KiB, and its length. With less, each chunk takes
	// three system calls.
	writeBuffer = 33 << 10
	// maxHeader bounds the header of a response.
	maxHeader = 32 << 10
	// maxIdle bounds the idle connections: more concurrent calls to one sandbox are rare,
	// and a connect costs 50 µs.
	maxIdle = 16
	// idleTimeout closes an idle connection, which costs two goroutines here, and one and
	// a descriptor in the guest.
	idleTimeout = 30 * time.Second
	// maxError bounds an error's JSON and maxMessage its text.
	maxError   = 64 << 10
	maxMessage = 4 << 10
)

// ErrLost is returned when the connection ended before the response was complete. How a
// command ended is then unknown.
var ErrLost = errors.New("connection to the sandbox's guest was lost")

// ErrNoResponse is returned (wrapped) when the guest accepts a connection but does not
// respond.
var ErrNoResponse = errors.New("the sandbox's guest does not respond")

// VersionError refuses a guest that speaks another protocol than this node.
type VersionError struct {
	Guest, Node int    // protocol versions
	Version     string // build of the guest
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("the sandbox's guest (build %q) speaks protocol %d, this node speaks %d: stop and wake the sandbox to replace its guest",
		e.Version, e.Guest, e.Node)
}

// Client talks to one guest. It dials when it is first used and keeps a pool of
// connections. It is safe for concurrent use.
//
// The guest is not trusted: its responses are bounded in size, their beginning and each
// pause in the contents of files in time; values out of range are errors.
//
// Errors: *Error when the guest refuses, ErrLost, ErrNoResponse, the context's, or
// the transport's.
type Client struct {
	transport *http.Transport
	dedicated dedicated     // for a request that lasts as long as the guest
	timeout   time.Duration // responseTimeout
	stall     time.Duration // stallTimeout
	defaults  func() map[string]string
	changes   func() map[string]*string

	requests, trimmed atomic.Uint64 // begins and ends of requests, in all and until Trim
}

// NewClient returns a Client for the guest that listens on the Unix socket. The path may
// have any length. Its last component must not be a symbolic link.
func NewClient(socket string) *Client {
	dial := func(ctx context.Context) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, dialTimeout)
		defer cancel()
		return dialSocket(ctx, socket, time.After)
	}
	return &Client{timeout: responseTimeout, stall: stallTimeout, dedicated: dedicated{dial}, transport: &http.Transport{
		DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
		DisableCompression:     true,
		MaxIdleConns:           maxIdle,
		MaxIdleConnsPerHost:    maxIdle,
		IdleConnTimeout:        idleTimeout,
		MaxResponseHeaderBytes: maxHeader,
		WriteBufferSize:        writeBuffer,
	}}
}

// SetDefaults makes f the source of the Defaults of each command and process, in place of the
// request's; f must be quick. Call it before the Client is used.
func (c *Client) SetDefaults(f func() map[string]string) { c.defaults = f }

func (c *Client) defaultsOr(defaults map[string]string) map[string]string {
	if c.defaults == nil {
		return defaults
	}
	return c.defaults()
}

// SetChanges makes f the source of the Changes of each command, process, terminal and session, in
// place of the request's; f must be quick. Call it before the Client is used.
func (c *Client) SetChanges(f func() map[string]*string) { c.changes = f }

func (c *Client) changesOr(changes map[string]*string) map[string]*string {
	if c.changes == nil {
		return changes
	}
	return c.changes()
}

// Close closes idle connections. Streams end by their own Close.
func (c *Client) Close() { c.transport.CloseIdleConnections() }

// Hello returns the guest's version. For a guest with another ProtocolVersion it returns
// *VersionError.
func (c *Client) Hello(ctx context.Context) (Hello, error) {
	h, err := get[Hello](ctx, c, request{method: http.MethodGet, route: RouteHello})
	if err != nil {
		return Hello{}, err
	}
	h.Version, h.Trust = Shorten(h.Version, 100), Shorten(h.Trust, 2*sha256.Size)
	if h.Protocol != ProtocolVersion {
		return Hello{}, &VersionError{Guest: h.Protocol, Node: ProtocolVersion, Version: h.Version}
	}
	return h, nil
}

// Trust makes the programs of the sandbox trust CAs. An error, such as *Error with
// CodeNoSpace, names the parts that failed; the others are done.
func (c *Client) Trust(ctx context.Context, t Trust) (TrustResult, error) {
	return get[TrustResult](ctx, c, request{method: http.MethodPut, route: RouteTrust, json: t})
}

// PortReady returns when a program in the sandbox listens on the TCP port, on any address.
// After wait it returns an *Error with CodePortNotReady.
func (c *Client) PortReady(ctx context.Context, port uint16, wait time.Duration) error {
	q := url.Values{"port": {fmt.Sprint(port)}, "wait": {wait.String()}}
	return c.call(ctx, request{method: http.MethodGet, route: RoutePort, query: q, wait: wait}, nil)
}

// Trim makes the guest return the memory that it does not need while it is idle to the
// kernel, which takes some milliseconds. Without a request since the last Trim it does nothing.
func (c *Client) Trim(ctx context.Context) error {
	before := c.requests.Load()
	if before == c.trimmed.Load() {
		return nil
	}
	err := c.call(ctx, request{method: http.MethodPost, route: RouteTrim, dedicated: true}, nil)
	if err == nil {
		c.trimmed.Store(before + 2) // a request meanwhile makes the two differ
	}
	return err
}

// request is one request to the guest.
type request struct {
	method  string
	route   string
	query   url.Values
	header  http.Header
	body    io.Reader
	json    any           // body, when body is nil
	wait    time.Duration // that the guest may take beyond responseTimeout
	content bool          // 206, 304, 412 and 416 are successes too
	stream  bool          // the response's body comes without pauses

	upgrade   bool // 101 is the success
	dedicated bool // has a connection of its own
}

// response is a successful response whose body is not read yet. Its Close ends
// the request.
type response struct {
	*http.Response
	client *Client
	watch  *watchdog
	stall  time.Duration // the longest pause in the body; 0: any
}

func (a *response) Close() error {
	err := a.Body.Close()
	a.watch.stop()
	a.client.requests.Add(1)
	return err
}

// Read reads the body and turns an end that came too early into ErrLost.
func (a *response) Read(p []byte) (int, error) {
	if a.stall > 0 {
		a.watch.set(a.stall)
		defer a.watch.pause()
	}
	n, err := a.Body.Read(p)
	if err != nil && err != io.EOF {
		err = a.watch.explain(lost(err))
	}
	return n, err
}

// send sends the request and returns the guest's response once it has begun, or *Error when
// the guest refused.
func (c *Client) send(ctx context.Context, r request) (*response, error) {
	var text []byte
	if r.json != nil {
		var err error
		if text, err = json.Marshal(r.json); err != nil {
			return nil, err
		}
		if len(text) > MaxJSON {
			return nil, &Error{Status: http.StatusRequestEntityTooLarge, Code: CodeTooLarge,
				Message: fmt.Sprintf("the request has %d bytes, at most %d are allowed", len(text), MaxJSON)}
		}
	}
	c.requests.Add(1)
	ctx, watch := newWatchdog(ctx, c.timeout+r.wait)
	req := &http.Request{
		Method: r.method,
		URL:    &url.URL{Scheme: "http", Host: "guest", Path: r.route, RawQuery: r.query.Encode()},
		Header: r.header,
		Host:   "guest",
	}
	if req.Header == nil {
		req.Header = make(http.Header, 1)
	}
	switch {
	case r.body != nil:
		req.Body, req.ContentLength = upload(r.body, watch, c.stall)
		watch.set(c.stall)
	case text != nil:
		req.Body, req.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
	}
	var transport http.RoundTripper = c.transport
	if r.dedicated {
		transport = c.dedicated
	}
	resp, err := transport.RoundTrip(req.WithContext(ctx))
	if err != nil {
		err = watch.explain(lost(err))
		watch.stop()
		return nil, err
	}
	a := &response{Response: resp, client: c, watch: watch}
	if r.stream {
		a.stall = c.stall
	}
	accepted := resp.StatusCode == http.StatusOK
	switch resp.StatusCode {
	case http.StatusPartialContent, http.StatusNotModified, http.StatusPreconditionFailed, http.StatusRequestedRangeNotSatisfiable:
		accepted = r.content
	case http.StatusSwitchingProtocols:
		accepted = r.upgrade
	}
	if accepted {
		watch.pause()
		return a, nil
	}
	defer a.Close()
	watch.set(c.timeout)
	return nil, readError(a)
}

// call sends the request and decodes the response's JSON into v, unless v is nil.
func (c *Client) call(ctx context.Context, r request, v any) error {
	a, err := c.send(ctx, r)
	if err != nil {
		return err
	}
	defer a.Close()
	a.watch.set(c.timeout)
	b, err := readAll(a, MaxJSON)
	if err != nil {
		return err
	}
	if v == nil {
		return nil
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("guest sent unusable JSON for %s: %w", r.route, err)
	}
	return nil
}

// get is call for a result of type T.
func get[T any](ctx context.Context, c *Client, r request) (v T, err error) {
	err = c.call(ctx, r, &v)
	return v, err
}

// readError returns the *Error of a refusal, bounded in size.
func readError(a *response) error {
	if a.StatusCode < 400 || a.StatusCode > 599 {
		return fmt.Errorf("guest responded with status %d", a.StatusCode)
	}
	e := &Error{}
	b, err := readAll(a, maxError)
	if err != nil {
		return err
	}
	if json.Unmarshal(b, e) != nil || e.Code == "" || len(e.Code) > 64 || strings.Trim(e.Code, "abcdefghijklmnopqrstuvwxyz_") != "" {
		e = &Error{Code: CodeInternal, Message: fmt.Sprintf("guest responded with status %d", a.StatusCode)}
	}
	e.Status, e.Message = a.StatusCode, Shorten(e.Message, maxMessage)
	return e
}

func readAll(r io.Reader, limit int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > limit {
		return nil, fmt.Errorf("guest sent more than %d bytes", limit)
	}
	return b, nil
}

// lost turns the transport's errors for a connection that ended into ErrLost.
func lost(err error) error {
	if err == nil || errors.Is(err, ErrLost) {
		return err
	}
	op, ok := errors.AsType[*net.OpError](err)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || ok && op.Op != "dial" ||
		err.Error() == "http: server closed idle connection" { // which the library does not export
		return fmt.Errorf("%w: %w", ErrLost, err)
	}
	return err
}

// Shorten cuts s to at most n bytes and an ellipsis.
func Shorten(s string, n int) string {
	if len(s) > n {
		return strings.ToValidUTF8(s[:n], "") + "…"
	}
	return s
}
