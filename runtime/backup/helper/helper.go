// Package helper is the backup helper, a process in Podman's user namespace that stores the files of
// snapshots in a Kopia repository (https://kopia.io/docs/advanced/architecture/). See package backup.
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
	m := &messages{out: json.NewEncoder(out)}
	var request wire.Request
	if err := json.NewDecoder(in).Decode(&request); err != nil {
		return m.send(wire.Message{Error: &wire.Error{Message: "read the request: " + err.Error()}})
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { // ends with the process
		_, _ = io.Copy(io.Discard, in)
		cancel()
	}()
	result, err := serve(ctx, request, m)
	if err != nil {
		return m.send(wire.Message{Error: describe(err)})
	}
	return m.send(wire.Message{Result: &result})
}

// messages writes messages to the node. It is safe for concurrent use.
type messages struct {
	mu  sync.Mutex
	out *json.Encoder
}

// send writes a message. It returns false if the message is an error or cannot be written.
func (m *messages) send(message wire.Message) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.out.Encode(message) == nil && message.Error == nil
}

func serve(ctx context.Context, request wire.Request, m *messages) (wire.Result, error) {
	r, err := open(ctx, request)
	if err != nil {
		return wire.Result{}, err
	}
	defer r.close()
	var result wire.Result
	switch request.Operation {
	case wire.Create:
		result, err = r.backUp(ctx, request, m)
	case wire.Restore:
		result, err = r.restore(ctx, request, m)
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
	stop           context.CancelFunc
	done           chan struct{}
}

// startProgress starts to send progress toward total. The caller must call conclude.
func startProgress(ctx context.Context, m *messages, total wire.Usage) *progress {
	p := &progress{done: make(chan struct{})}
	ctx, p.stop = context.WithCancel(ctx)
	go func() {
		defer close(p.done)
		again := time.NewTicker(progressInterval)
		defer again.Stop()
		for {
			m.send(wire.Message{Progress: &wire.Progress{Done: wire.Usage{Bytes: p.bytes.Load(), Entries: p.entries.Load()}, Total: total}})
			select {
			case <-again.C:
			case <-ctx.Done():
				return
			}
		}
	}()
	return p
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
