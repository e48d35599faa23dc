// Package helper is the backup helper, a process in Podman's user namespace that stores the disks of
// sandboxes in a Kopia repository (https://kopia.io/docs/advanced/architecture/). See package backup.
package helper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/doze-run/doze/runtime/backup/wire"
)

// maxMessage limits the text of an error, which may have a long path, in bytes.
const maxMessage = 1000

// progressInterval is the time between two progress messages.
const progressInterval = 200 * time.Millisecond

// Run reads a request from in, serves it, and writes messages to out. It reports whether the
// request succeeded. Closing in cancels the request.
func Run(in io.Reader, out io.Writer) bool {
	syscall.Umask(0)
	node, messages := newPeer(out), json.NewDecoder(in)
	var request wire.Request
	if err := messages.Decode(&request); err != nil {
		return node.send(wire.Message{Error: &wire.Error{Message: "read the request: " + err.Error()}})
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go node.receive(messages, cancel) // ends with the process
	result, err := serve(ctx, request, node)
	if err != nil {
		return node.send(wire.Message{Error: describe(err)})
	}
	return node.send(wire.Message{Result: &result})
}

// peer is the node, for which the helper works.
type peer struct {
	mu  sync.Mutex
	out *json.Encoder

	orders chan wire.Order
}

// maxOrders is how many Orders a request takes.
const maxOrders = 2

func newPeer(out io.Writer) *peer {
	return &peer{out: json.NewEncoder(out), orders: make(chan wire.Order, maxOrders)}
}

// receive receives orders until the node closes the connection, or sends something else, and then calls cancel. It does
// not wait until an order is taken.
func (n *peer) receive(messages *json.Decoder, cancel func()) {
	defer cancel()
	for range maxOrders {
		var o wire.Order
		if messages.Decode(&o) != nil {
			return
		}
		n.orders <- o
	}
	_ = messages.Decode(new(json.RawMessage))
}

// send writes a message. It returns false if the message is an error or cannot be written. It is safe for concurrent use.
func (n *peer) send(message wire.Message) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.out.Encode(message) == nil && message.Error == nil
}

// stopPrograms asks the node to stop the programs of the sandbox, and returns when they have stopped.
func (n *peer) stopPrograms(ctx context.Context) error {
	n.send(wire.Message{Ready: true})
	_, err := n.order(ctx)
	return err
}

// record waits for the record of the backup of a running sandbox.
func (n *peer) record(ctx context.Context) (json.RawMessage, error) {
	o, err := n.order(ctx)
	return o.Record, err
}

func (n *peer) order(ctx context.Context) (wire.Order, error) {
	select {
	case o := <-n.orders:
		return o, nil
	case <-ctx.Done():
		return wire.Order{}, ctx.Err()
	}
}

func serve(ctx context.Context, request wire.Request, node *peer) (wire.Result, error) {
	r, err := open(ctx, request)
	if err != nil {
		return wire.Result{}, err
	}
	defer r.close()
	var result wire.Result
	switch request.Operation {
	case wire.Create:
		result, err = r.backUp(ctx, request, node)
	case wire.Restore:
		result, err = r.restore(ctx, request, node)
	case wire.List:
		result.Backups, err = r.list(ctx, request.Owner)
	case wire.Delete:
		err = r.delete(ctx, request.IDs)
	case wire.Maintain:
		err = r.maintain(ctx)
	default:
		err = fmt.Errorf("unknown operation %q", request.Operation)
	}
	return result, r.explain(err)
}

// describe converts an error to the form that the node receives.
func describe(err error) *wire.Error {
	text := strings.ToValidUTF8(err.Error(), "?")
	if len(text) > maxMessage {
		text = strings.ToValidUTF8(text[:maxMessage], "") + "…"
	}
	if known, ok := errors.AsType[*wire.Error](err); ok {
		return &wire.Error{Code: known.Code, Message: text}
	}
	e := &wire.Error{Message: text}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		e.Code = wire.Full
	}
	return e
}

// progress counts the bytes and entries that have been read or written, and sends the counts every
// progressInterval.
type progress struct {
	bytes, entries atomic.Int64
	total          atomic.Pointer[wire.Usage]
	sent           wire.Progress // the last one
	stop           context.CancelFunc
	done           chan struct{}
}

// startProgress starts to send progress after the first call of expect. The caller must call conclude.
func startProgress(ctx context.Context, node *peer) *progress {
	p := &progress{done: make(chan struct{})}
	ctx, p.stop = context.WithCancel(ctx)
	go func() {
		defer close(p.done)
		again := time.NewTicker(progressInterval)
		defer again.Stop()
		for {
			p.sendCounts(node)
			select {
			case <-again.C:
			case <-ctx.Done():
				p.sendCounts(node)
				return
			}
		}
	}()
	return p
}

// expect sets the total, also when it changes.
func (p *progress) expect(total wire.Usage) { p.total.Store(&total) }

// sendCounts sends the counts. If files have been read again, the counts end at the total.
func (p *progress) sendCounts(node *peer) {
	total := p.total.Load()
	if total == nil {
		return
	}
	p.sent.Done.Bytes = max(p.sent.Done.Bytes, min(p.bytes.Load(), total.Bytes))
	p.sent.Done.Entries = max(p.sent.Done.Entries, min(p.entries.Load(), total.Entries))
	p.sent.Total = wire.Usage{Bytes: max(total.Bytes, p.sent.Done.Bytes), Entries: max(total.Entries, p.sent.Done.Entries)}
	node.send(wire.Message{Progress: new(p.sent)})
}

// conclude sends no more messages after it returns.
func (p *progress) conclude() {
	p.stop()
	<-p.done
}

// add counts one entry and the bytes of its content.
func (p *progress) add(bytes int64) {
	p.bytes.Add(bytes)
	p.entries.Add(1)
}
