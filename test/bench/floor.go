package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"

	"github.com/doze-run/doze/testkit/testca"
)

// floor is the least that Go's own library needs to intercept: TLS on both sides and its
// reverse proxy, which adds the header. It has no policy, no rules, no audit and no
// scrubbing, so that it shows what the library costs.
func floor(ctx context.Context, p *proxy) (*exec.Cmd, error) {
	program, err := os.Executable()
	cmd := exec.CommandContext(ctx, program, "floor", p.address, p.CA, p.originCA, p.origin)
	p.URL, p.origin = "", localURL(p.address)
	return cmd, err
}

// serveFloor is that proxy: it writes the authority of its certificates to a file.
func serveFloor(address, ca, originCA, origin string) error {
	leaf, authority, err := testca.New("localhost")
	if err != nil {
		return err
	}
	if err := os.WriteFile(ca, authority, 0o600); err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if err := trust(roots, originCA); err != nil {
		return err
	}
	to, err := url.Parse(origin)
	if err != nil {
		return err
	}
	l, err := tls.Listen("tcp", address, &tls.Config{Certificates: []tls.Certificate{leaf}})
	if err != nil {
		return err
	}
	return newServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(to)
			r.Out.Header.Set("Authorization", "Bearer "+benchToken)
		},
		Transport: &http.Transport{
			TLSClientConfig: &tls.Config{RootCAs: roots}, MaxIdleConnsPerHost: loadConnections, DisableCompression: true,
		},
	}).Serve(l)
}
