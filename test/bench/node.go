package main

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/doze-run/doze/test/testnode"
)

// startWait bounds the wait for a server's response through the node.
const startWait = time.Minute

// peerSite leads to a server outside of any sandbox, which is the peer of the throughput
// figure.
const peerSite = `
peer.doze.localhost {
	tls internal
	reverse_proxy 127.0.0.1:%d
}
`

// node is a node of the bench's own, with a home of its own.
type node struct {
	*testnode.Node
	peerPort int
	web      *http.Client // keeps its connections

	// Of a node by startEgressNode or startBackupNode.
	origin *origin
	store  *objectStore
	folder string
}

// startNode starts a node on an empty home.
func startNode(bin string) (*node, error) {
	n := new(node)
	return n, n.start(bin)
}

// start starts the node with the project's Caddyfile, more lines of the global option doze,
// and peerSite.
func (n *node) start(bin string, options ...string) (err error) {
	if n.peerPort, err = testnode.FreePort(); err != nil {
		return err
	}
	caddyfile, err := testnode.ProjectCaddyfile(options...)
	if err != nil {
		return err
	}
	if n.Node, err = testnode.New(testnode.Config{Bin: bin, Caddyfile: caddyfile + fmt.Sprintf(peerSite, n.peerPort)}); err != nil {
		return err
	}
	if err := n.Start(); err != nil {
		return err
	}
	n.web = n.Client("h1")
	n.web.Timeout = time.Minute
	return nil
}

// get fetches a preview or the peer and reads all of it.
func (n *node) get(ctx context.Context, url string) error {
	_, _, err := ask(ctx, n.web, http.MethodGet, url)
	return err
}

// getWaking is get for a request that must wake its sandbox in this way: warm,
// cold, or not at all.
func (n *node) getWaking(ctx context.Context, url, wake string) error {
	header, _, err := ask(ctx, n.web, http.MethodGet, url)
	if err != nil {
		return err
	}
	if got := header.Get("Doze-Wake"); got != wake {
		return fmt.Errorf("%s: the wake was %q, not %q", url, got, wake)
	}
	return nil
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
