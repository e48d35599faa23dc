package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/doze-run/doze/test/testnode"
)

// startWait bounds the wait for a server's response through the node.
const startWait = time.Minute

// caddyfile of the measured node: the project's own plus a reverse proxy to a
// server outside of any sandbox, which is the peer of the throughput figure.
const caddyfile = `{
	admin unix/{$DOZE_HOME}/admin.sock|0600
	persist_config off
	auto_https disable_redirects
	skip_install_trust
	default_bind 127.0.0.1
	https_port {$DOZE_HTTPS_PORT}
	storage file_system {$DOZE_HOME}/caddy
	doze {
		data {$DOZE_HOME}
		preview_domain preview.doze.localhost
		preview_port {$DOZE_HTTPS_PORT}
		image base localhost/doze/base:latest
	}
	log {
		level ERROR
	}
}
127.0.0.1, api.doze.localhost {
	tls internal
	doze_api
}
*.preview.doze.localhost {
	tls internal
	doze_preview
}
peer.doze.localhost {
	tls internal
	reverse_proxy 127.0.0.1:{$BENCH_PEER_PORT}
}
`

// node is a node of the bench's own, with a home of its own.
type node struct {
	*testnode.Node
	peerPort int
	web      *http.Client // keeps its connections

	// Of a node by startEgressNode.
	origin *origin
	folder string
}

// startNode starts a node on an empty home.
func startNode(bin string) (*node, error) {
	peerPort, err := testnode.FreePort()
	if err != nil {
		return nil, err
	}
	made, err := testnode.New(testnode.Config{Bin: bin, Caddyfile: caddyfile, Env: []string{fmt.Sprint("BENCH_PEER_PORT=", peerPort)}})
	if err != nil {
		return nil, err
	}
	n := &node{Node: made, peerPort: peerPort}
	return n, n.start()
}

func (n *node) start() error {
	if err := n.Start(); err != nil {
		return err
	}
	n.web = n.Client("h1")
	n.web.Timeout = time.Minute
	return nil
}

// get fetches a preview or the peer and reads all of it.
func (n *node) get(ctx context.Context, url string) error {
	_, err := n.fetch(ctx, url)
	return err
}

// getWaking is get for a request that must wake its sandbox in this way: warm,
// cold, or not at all.
func (n *node) getWaking(ctx context.Context, url, wake string) error {
	header, err := n.fetch(ctx, url)
	if err != nil {
		return err
	}
	if got := header.Get("Doze-Wake"); got != wake {
		return fmt.Errorf("%s: the wake was %q, not %q", url, got, wake)
	}
	return nil
}

func (n *node) fetch(ctx context.Context, url string) (http.Header, error) {
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := n.web.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", url, resp.Status)
	}
	return resp.Header, nil
}

// awaitResponse returns when a server behind the node responds.
func (n *node) awaitResponse(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	var failed error
	if err := poll(ctx, 10*time.Millisecond, func() (bool, error) {
		failed = n.get(ctx, url)
		return failed == nil, nil
	}); err != nil {
		return fmt.Errorf("%w: %w", err, failed)
	}
	return nil
}
