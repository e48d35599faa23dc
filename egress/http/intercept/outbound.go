package intercept

import (
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
	"net/netip"
	"net/textproto"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/requestid"
)

// Filter inspects the response of an upstream, and may change it. It is used for one
// request, by one goroutine at a time.
type Filter interface {
	// Header changes the header of a response, including 1xx responses, or its trailers.
	Header(h http.Header)
	// Body returns a reader of the filtered body, which has the same length. It is
	// called once for the body of a response, and once for each message of a
	// WebSocket.
	Body(body io.Reader) io.Reader
	// Text filters a text that is shown to the client.
	Text(text string) string
}

// Result is the outcome of a request.
type Result struct {
	Status   int            // of the response to the client; 0 if none
	BytesOut int64          // of the request's body, or the client's end of a WebSocket
	BytesIn  int64          // of the response's body as the upstream sent it, or its end of a WebSocket
	Address  netip.AddrPort // of the upstream; invalid without a connection
	// Err is a *Failure if the client got no response of the upstream, or only a part of
	// one.
	Err error
	// Cut reports that the response ended early. The caller then panics with
	// http.ErrAbortHandler, so that the client does not mistake it for a complete
	// response.
	Cut bool
}

// Do sends a request, as a Destination's Handler receives it, to its upstream, and the
// response to w: header, body and trailers as they arrive. It does not change r. f may be
// nil. With a filter, the whole response passes through it, decoded if it was compressed,
// and no ranges are requested.
//
// A request that fails before the response has begun is refused.
func (u *Upstream) Do(w http.ResponseWriter, r *http.Request, to Route, f Filter) Result {
	o := &outbound{u: u, w: w, r: r, filter: f, to: newTarget(r, to)}
	defer o.finish()
	o.send()
	res := Result{Status: o.status, Cut: o.cut, BytesOut: o.sent.Load(), BytesIn: o.received.Load()}
	o.to.mu.Lock()
	res.Address = o.to.address
	o.to.mu.Unlock()
	if o.failure != nil {
		res.Err = o.failure
	}
	return res
}

// outbound is a request to an upstream, and its response.
type outbound struct {
	u      *Upstream
	w      http.ResponseWriter
	r      *http.Request
	filter Filter // nil: none
	to     *target

	status   int
	failure  *Failure
	cut      bool // the response ended early
	sent     atomic.Int64
	received atomic.Int64
	body     *upload // nil: none
	windows  int     // acquired from Route.Windows

	mu sync.Mutex // guards w until responded
	// responded is set when the transport has returned. 1xx responses after that are
	// dropped.
	responded bool
}

// finish stops the upload: a request must not be read after its handler has ended. It
// does not wait for a Read that waits for the client, which may in turn wait for the
// response; the server ends that Read.
func (o *outbound) finish() {
	if o.body != nil {
		o.body.Close()
	}
	o.holdWindows(0)
}

// holdWindows acquires or releases large windows until the request holds n. It returns false
// if the limit was reached.
func (o *outbound) holdWindows(n int) bool {
	pool := o.to.Windows
	for ; o.windows > n; o.windows-- {
		pool.Release(1)
	}
	for ; o.windows < n; o.windows++ {
		if pool != nil && pool.TryAcquire(1) != nil {
			return false
		}
	}
	return true
}

func (o *outbound) send() {
	out := o.request()
	res, err := o.u.roundTrip(out, o.to, o.r.ProtoMajor, o.informed)
	o.mu.Lock()
	o.responded = true
	o.mu.Unlock()
	if err != nil {
		o.fail(o.blameClient(failed(o.r.Context(), o.to.host, err)))
		return
	}
	defer o.closeLater(res.Body)
	switch status := res.StatusCode; {
	case status == http.StatusSwitchingProtocols:
		o.upgrade(res)
	case status < 200 || status > 999: // net/http reads such a status but cannot write it
		o.fail(&Failure{Code: problem.UpstreamResponseInvalid, Reason: fmt.Sprintf("%s responded with the invalid status %d", o.to.host, status)})
	default:
		o.respond(res)
	}
}

// closeLater closes the body of a response. Over HTTP/2, Close waits for a Read of the
// request's body, which waits for the client, which may in turn wait for the end of the
// response.
func (o *outbound) closeLater(body io.Closer) {
	if o.body == nil || o.body.over.Load() {
		body.Close()
		return
	}
	go body.Close() // ends with that Read: with the client's next byte or the end of its connection
}

// blameClient describes the failure of a request whose body could not be read.
func (o *outbound) blameClient(f *Failure) *Failure {
	if f.Code != problem.UpstreamDisconnected && f.Code != problem.UpstreamResponseInvalid || o.body == nil {
		return f
	}
	if err := o.body.broken.Load(); err != nil {
		return &Failure{Code: problem.BodyIncomplete, Reason: "the body of the request is incomplete or not valid HTTP", Err: *err}
	}
	return f
}

// request returns the request to send upstream.
func (o *outbound) request() *http.Request {
	r := o.r
	header := requestHeader(r)
	if o.filter != nil {
		readable(header, o.holdWindows)
	}
	out := &http.Request{
		Method: r.Method,
		URL: &url.URL{
			Scheme: r.URL.Scheme, Host: o.to.poolKey(),
			Path: r.URL.Path, RawPath: r.URL.RawPath, RawQuery: r.URL.RawQuery, ForceQuery: r.URL.ForceQuery,
		},
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: header,
		Host:   r.Host,
	}
	if r.ContentLength != 0 && r.Body != nil && r.Body != http.NoBody {
		o.body = &upload{body: r.Body, sent: &o.sent}
		out.Body, out.ContentLength = o.body, r.ContentLength
		if b, ok := r.Body.(interface{ Begin() }); ok { // of http1: the upload may begin later than the response
			b.Begin()
		}
		if len(r.Trailer) > 0 {
			out.Trailer = r.Trailer.Clone()
			o.body.to, o.body.from = out.Trailer, r
		}
	}
	return out.WithContext(r.Context())
}

// informed forwards a 1xx response. The server itself requests the body (100) when the
// transport begins to read it. Some upstreams send 101 over HTTP/2, which has no
// upgrades.
func (o *outbound) informed(status int, header textproto.MIMEHeader) error {
	if status == http.StatusContinue || status == http.StatusSwitchingProtocols {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.responded {
		return nil
	}
	from := http.Header(header)
	o.clean(from)
	to := o.w.Header()
	later := maps.Clone(to) // set for the final response
	clear(to)
	maps.Copy(to, from)
	o.w.WriteHeader(status)
	clear(to)
	maps.Copy(to, later)
	return nil
}

// clean turns a header of the upstream into one for the client.
func (o *outbound) clean(h http.Header) {
	removeHopByHop(h)
	// Reserved for the node, such as on refusals.
	maps.DeleteFunc(h, func(name string, _ []string) bool { return strings.HasPrefix(name, "Doze-") })
	if o.filter != nil {
		o.filter.Header(h)
	}
}

// respond sends a response to the client.
func (o *outbound) respond(res *http.Response) {
	body := io.Reader(&counted{res.Body, &o.received})
	kind, _, _ := mime.ParseMediaType(res.Header.Get("Content-Type"))
	streams := res.ContentLength < 0 || kind == "text/event-stream"
	if o.filter != nil {
		if res.StatusCode == http.StatusPartialContent {
			o.fail(unreadable(o.to.host, "is partial content, which was not requested"))
			return
		}
		plain, err := decode(res, body, o.holdWindows)
		if err != nil {
			o.fail(unreadable(o.to.host, "%s", err))
			return
		}
		defer plain.Close()
		body = o.filter.Body(plain)
	}
	o.clean(res.Header)
	o.clean(res.Trailer) // only the names are known so far
	announced := slices.Collect(maps.Keys(res.Trailer))
	to := o.w.Header()
	copyHeader(to, res.Header)
	if len(announced) > 0 {
		to["Trailer"] = announced
		delete(to, "Content-Length") // HTTP/1.1 has trailers after chunks only
	}
	o.status = res.StatusCode
	o.w.WriteHeader(res.StatusCode)
	if o.r.Method == http.MethodHead || res.Body == http.NoBody {
		return
	}
	close := func() error { o.closeLater(res.Body); return nil }
	d := &download{from: body, to: o.w, close: close, ahead: o.u.ahead}
	if streams {
		d.flush = http.NewResponseController(o.w)
	}
	if w, ok := o.w.(*writer); ok {
		d.wire = w.wire
	}
	if err := d.run(); err != nil {
		o.breakOff(failed(o.r.Context(), o.to.host, err))
		return
	}
	o.trailers(res.Trailer, announced)
}

// trailers sends the fields after the body. Fields that were not announced need a prefix
// for the server.
func (o *outbound) trailers(from http.Header, announced []string) {
	if len(from) == 0 {
		return
	}
	o.clean(from)
	http.NewResponseController(o.w).Flush() // otherwise a short body gets a Content-Length, and no trailers
	to := o.w.Header()
	for name, values := range from {
		if !slices.Contains(announced, name) {
			name = http.TrailerPrefix + name
		}
		to[name] = values
	}
}

// fail refuses a request without a response of the upstream.
func (o *outbound) fail(f *Failure) {
	if f.Code == problem.ClientDisconnected {
		o.breakOff(f)
		return
	}
	if o.filter != nil {
		f.Reason = o.filter.Text(f.Reason)
	}
	why := problem.New(f.Code, f.Reason).WithFlow(o.to.host, "", o.to.Flow).For(requestid.Or(o.to.RequestID))
	o.failure, o.status = f, why.Status
	Refuse(o.w, o.r, why)
}

// breakOff records that the response ended early because of f.
func (o *outbound) breakOff(f *Failure) { o.failure, o.cut = f, true }

// upload is the body of a request on its way upstream.
type upload struct {
	body   io.Reader
	sent   *atomic.Int64
	closed atomic.Bool
	over   atomic.Bool           // no more of it is read
	broken atomic.Pointer[error] // of reading it, except io.EOF
	// The server fills in from's trailers at the end of the body. Copies of the client's
	// request share them.
	to   http.Header
	from *http.Request
}

func (u *upload) Read(b []byte) (int, error) {
	if u.closed.Load() {
		return 0, http.ErrBodyReadAfterClose
	}
	n, err := u.body.Read(b)
	u.sent.Add(int64(n))
	switch err {
	case nil:
		return n, nil
	case io.EOF:
		for name := range u.to {
			u.to[name] = u.from.Trailer[name]
		}
	default:
		u.broken.Store(&err)
	}
	u.over.Store(true)
	return n, err
}

// Close ends the upload. It leaves the client's body to the server, which closes it.
func (u *upload) Close() error { u.closed.Store(true); return nil }

// counted counts the bytes read from r.
type counted struct {
	r io.Reader
	n *atomic.Int64
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n.Add(int64(n))
	return n, err
}
