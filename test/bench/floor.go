package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/doze-run/doze/testkit/testca"
)

// startFloor starts the least that Go's own library needs to intercept: TLS on both
// sides and its reverse proxy, which adds the header. It has no policy, no rules, no
// audit and no scrubbing, so that it shows what the library costs.
func startFloor(ctx context.Context, folder, originCA string) (*proxy, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	address, err := freeAddress()
	if err != nil {
		return nil, err
	}
	p := &proxy{URL: "http://" + address, CA: filepath.Join(folder, "ca.pem")}
	p.cmd = exec.CommandContext(ctx, program, "floor", address, p.CA, originCA)
	return p, p.start(ctx, address)
}

// serveFloor is that proxy: it writes the authority of its certificates to a file.
func serveFloor(address, ca, originCA string) error {
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
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	forward := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "https", Host: r.In.Host})
			r.Out.Header.Set("Authorization", "Bearer "+benchToken)
		},
		Transport: &http.Transport{
			TLSClientConfig: &tls.Config{RootCAs: roots}, MaxIdleConnsPerHost: loadConnections, DisableCompression: true,
		},
	}
	server := &http.Server{Handler: forward, ReadHeaderTimeout: time.Minute, ErrorLog: log.New(io.Discard, "", 0)}
	return server.Serve(&tunnels{l, &tls.Config{Certificates: []tls.Certificate{leaf}}})
}

// tunnels are the TLS connections that clients open by CONNECT.
type tunnels struct {
	net.Listener
	cfg *tls.Config
}

// Accept implements net.Listener: clients connect one after the other.
func (t *tunnels) Accept() (net.Conn, error) {
	for {
		conn, err := t.Listener.Accept()
		if err != nil {
			return nil, err
		}
		_ = conn.SetDeadline(time.Now().Add(time.Minute))
		_, err = http.ReadRequest(bufio.NewReader(conn)) // a client sends nothing more before the response
		if err == nil {
			_, err = io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\n")
		}
		if err != nil { // such as the error of start, which only connects
			conn.Close()
			continue
		}
		_ = conn.SetDeadline(time.Time{})
		return tls.Server(conn, t.cfg), nil
	}
}
