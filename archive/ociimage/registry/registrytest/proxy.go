package registrytest

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"strings"
)

// Upload is the state of a request that uploads a blob.
type Upload struct {
	Request *http.Request
	Read    int64 // bytes of the body that the proxy has forwarded
}

// Fail sets a function that is called concurrently before the proxy forwards a part of a blob. If it
// returns true, the proxy closes the connection. nil ends the faults.
func (s *Server) Fail(f func(Upload) bool) {
	if f == nil {
		s.fault.Store(nil)
		return
	}
	s.fault.Store(&f)
}

// serveProxy starts the proxy. It ends with the test, before the registry.
func (s *Server) serveProxy() {
	transport := &http.Transport{DisableCompression: true} // compression would add a header
	forward := &httputil.ReverseProxy{
		Transport: transport,
		ErrorLog:  slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Scheme, p.Out.URL.Host = s.target.Scheme, s.target.Host
			p.Out.Host = p.In.Host // for the locations that the registry responds with
		},
		ModifyResponse: func(res *http.Response) error {
			if isUpload(res.Request) && res.StatusCode == http.StatusCreated {
				s.blobs.Add(1)
			}
			return nil
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	proxy := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if isUpload(r) {
			r.Body = &uploadBody{ReadCloser: r.Body, server: s, upload: Upload{Request: r}}
		}
		forward.ServeHTTP(w, r)
	}))
	proxy.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	proxy.Start()
	s.Host = strings.TrimPrefix(proxy.URL, "http://")
	s.t.Cleanup(func() {
		proxy.CloseClientConnections()
		proxy.Close()
		transport.CloseIdleConnections()
	})
}

// isUpload reports whether a request has the content of a blob.
func isUpload(r *http.Request) bool {
	return r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/blobs/uploads/")
}

var errCut = errors.New("request is cut")

// uploadBody counts a body, and fails it.
type uploadBody struct {
	io.ReadCloser
	server *Server
	upload Upload
}

func (b *uploadBody) Read(p []byte) (int, error) {
	if f := b.server.fault.Load(); f != nil && (*f)(b.upload) {
		return 0, errCut
	}
	n, err := b.ReadCloser.Read(p)
	b.upload.Read += int64(n)
	b.server.content.Add(int64(n))
	return n, err
}
