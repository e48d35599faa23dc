//go:build integration

package podman

import (
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"
)

// newRegistryProxy starts a reverse proxy for the registry that listens at behind.
func newRegistryProxy(t *testing.T, behind string) *registry {
	t.Helper()
	r := &registry{}
	proxy := &httputil.ReverseProxy{Rewrite: func(p *httputil.ProxyRequest) {
		p.SetURL(&url.URL{Scheme: "http", Host: behind})
		p.Out.Host = p.In.Host
	}}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodGet {
			_, tag, isManifest := strings.Cut(req.URL.Path, "/manifests/")
			if isManifest && !strings.HasPrefix(tag, "sha256:") {
				r.pulls.Add(1)
			}
			if strings.Contains(req.URL.Path, "/blobs/") {
				r.shut.RLock()
				defer r.shut.RUnlock()
			}
		}
		proxy.ServeHTTP(w, req)
	}))
	t.Cleanup(server.Close)
	r.host = strings.TrimPrefix(server.URL, "http://")
	return r
}
