package s3test

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"time"
)

// Fault describes how the proxy fails a request. With the zero value, the proxy forwards the request.
type Fault struct {
	// Delay is how long the proxy waits after it has read the request. It comes before
	// the other faults.
	Delay time.Duration
	// Status, such as 500 or 503, is the status of an S3 error that the proxy responds with
	// instead of forwarding the request.
	Status int
	// Cut closes the connection instead of forwarding the request, as if the server had died.
	Cut bool
	// CutResponse forwards the request and closes the connection after this many bytes of the
	// response's body. A body of at most this length arrives completely. 0 cuts no response.
	CutResponse int64
}

// Fail sets the fault of each subsequent request; nil ends the faults. f is called
// concurrently, when the proxy has read all of the request's body, which f must not read.
func (s *Server) Fail(f func(r *http.Request) Fault) {
	if f == nil {
		s.faults.Store(nil)
		return
	}
	s.faults.Store(&f)
}

// serveProxy starts the proxy. It ends with the test, before the S3 server.
func (s *Server) serveProxy() {
	transport := &http.Transport{DisableCompression: true} // compression would add a header
	proxy := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.serve(w, r, transport)
	}))
	proxy.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	proxy.Start()
	s.URL = proxy.URL
	s.t.Cleanup(func() {
		proxy.CloseClientConnections() // a request may be delayed
		proxy.Close()
		transport.CloseIdleConnections()
	})
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request, transport http.RoundTripper) {
	s.requests.Add(1)
	body, err := io.ReadAll(counted{r.Body, &s.uploaded})
	if err != nil {
		panic(http.ErrAbortHandler) // the client is gone
	}
	// versitygw does not read the end of a body with Transfer-Encoding: chunked, which minio-go
	// sends for empty objects, so the proxy forwards each body with its length.
	r.Body, r.ContentLength, r.TransferEncoding = io.NopCloser(bytes.NewReader(body)), int64(len(body)), nil
	var fault Fault
	if f := s.faults.Load(); f != nil {
		fault = (*f)(r)
	}
	select {
	case <-time.After(fault.Delay):
	case <-r.Context().Done():
		panic(http.ErrAbortHandler)
	}
	target := s.target.Load()
	switch {
	case fault.Status != 0:
		respond(w, r, fault.Status)
	case fault.Cut, target == nil:
		panic(http.ErrAbortHandler)
	default:
		forward(w, r, target, transport, fault.CutResponse)
	}
}

// forward forwards a request to the S3 server, and closes the client's connection if the
// server does not respond. The signature covers the Host header and the query.
func forward(w http.ResponseWriter, r *http.Request, target *url.URL, transport http.RoundTripper, cut int64) {
	proxy := &httputil.ReverseProxy{
		Transport:     transport,
		FlushInterval: -1, // so that the bytes before a cut arrive
		ErrorLog:      slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Scheme, p.Out.URL.Host = target.Scheme, target.Host
			p.Out.URL.RawQuery = p.In.URL.RawQuery
			p.Out.Host = p.In.Host
		},
		ModifyResponse: func(res *http.Response) error {
			if cut > 0 {
				res.Body = &cutBody{res.Body, cut}
			}
			return nil
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	proxy.ServeHTTP(w, r)
}

// respond responds with an error as S3 does.
// See https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html.
func respond(w http.ResponseWriter, r *http.Request, status int) {
	code := strings.ReplaceAll(http.StatusText(status), " ", "")
	switch status {
	case http.StatusForbidden:
		code = "AccessDenied"
	case http.StatusNotFound:
		code = "NoSuchKey"
	case http.StatusInternalServerError:
		code = "InternalError"
	case http.StatusServiceUnavailable:
		code = "SlowDown"
	}
	b, err := xml.Marshal(struct {
		XMLName                 xml.Name `xml:"Error"`
		Code, Message, Resource string
	}{Code: code, Message: "injected by the test", Resource: r.URL.Path})
	if err != nil {
		panic(err)
	}
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, xml.Header)
	_, _ = w.Write(b)
}

// counted adds the bytes that are read to a count.
type counted struct {
	io.Reader
	count *atomic.Int64
}

func (c counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.count.Add(int64(n))
	return n, err
}

var errCut = errors.New("response is cut")

// cutBody is a body that fails after left bytes.
type cutBody struct {
	io.ReadCloser
	left int64
}

func (b *cutBody) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, errCut
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}
