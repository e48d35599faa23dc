package disk

import (
	"context"
	"errors"
	"net"
	"net/rpc"
	"net/rpc/jsonrpc"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/runtime/disk/wire"
	"github.com/doze-run/doze/runtime/netns"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// lateDisks is a helper whose copy begins only after the first attempt to cancel it.
type lateDisks struct {
	began    chan struct{} // closed when a copy was requested
	canceled chan struct{}
	attempts atomic.Int32
}

func (d *lateDisks) Prefetch(_ wire.Request, reply *wire.Reply) error {
	close(d.began)
	<-d.canceled
	reply.Error = context.Canceled.Error()
	return nil
}

func (d *lateDisks) Cancel(wire.Request, *wire.Reply) error {
	if d.attempts.Add(1) == 2 {
		close(d.canceled)
	}
	return nil
}

func TestCopyThatBeginsAfterItsCancellationIsCanceled(t *testing.T) {
	here, there := net.Pipe()
	d := &lateDisks{began: make(chan struct{}), canceled: make(chan struct{})}
	server := rpc.NewServer()
	if err := server.RegisterName(wire.Service, d); err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() { defer close(served); server.ServeCodec(jsonrpc.NewServerCodec(there)) }() // ended by h.Client.Close
	h := &netns.Service{Client: jsonrpc.NewClient(here)}
	defer func() { h.Client.Close(); <-served }()
	c := New(Config{})
	c.current = h
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Prefetch(ctx, sandbox.NewID(), "s", nil) }()
	<-d.began
	cancel()
	if err := testkit.Receive(t, "the end of the copy", ended); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
