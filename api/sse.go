package api

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
)

const eventStreamType = "text/event-stream"

// wantsEvents reports whether a request accepts server-sent events.
func wantsEvents(r *http.Request) bool {
	for _, accept := range r.Header.Values("Accept") {
		for part := range strings.SplitSeq(accept, ",") {
			kind, _, _ := strings.Cut(part, ";")
			if strings.EqualFold(strings.TrimSpace(kind), eventStreamType) {
				return true
			}
		}
	}
	return false
}

// eventStream sends server-sent events. Its ctx ends when the client disconnects, when
// a write fails, when the node shuts down, and when the stream is closed. Code that
// waits for the next event must also wait for ctx.
type eventStream struct {
	ctx    context.Context
	cancel context.CancelFunc
	api    *API

	mu      sync.Mutex // guards the writer
	w       http.ResponseWriter
	control *http.ResponseController
	buf     bytes.Buffer
	beat    *time.Timer // calls heartbeat
}

// respondEvents acquires the slot of a stream and returns the response that send writes.
func (a *API) respondEvents(ctx context.Context, x Exchange, send func(*eventStream)) (*huma.StreamResponse, error) {
	if err := a.streams.acquire(ctx, 1); err != nil {
		return nil, err
	}
	return &huma.StreamResponse{Body: func(huma.Context) { a.serveEvents(x, send) }}, nil
}

// serveEvents opens a stream, which ends when send returns. A response to HEAD has no events.
func (a *API) serveEvents(x Exchange, send func(*eventStream)) {
	h := x.w.Header()
	h.Set("Content-Type", eventStreamType)
	h.Set("X-Accel-Buffering", "no") // nginx would hold events back
	x.w.WriteHeader(http.StatusOK)
	s := &eventStream{api: a, w: x.w, control: http.NewResponseController(x.w)}
	s.ctx, s.cancel = context.WithCancel(x.r.Context())
	s.mu.Lock()
	s.beat = time.AfterFunc(a.cfg.Limits.Heartbeat, s.heartbeat)
	s.flush()
	s.mu.Unlock()
	defer s.close()
	if x.r.Method != http.MethodHead {
		send(s)
	}
}

// heartbeat keeps a silent stream open, and detects disconnected clients that the server
// does not. Each write sets its timer again.
func (s *eventStream) heartbeat() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() == nil {
		s.buf.Reset()
		s.buf.WriteString(":\n\n")
		s.write()
	}
}

// send sends one event without buffering it. id may be empty. A failure ends ctx.
func (s *eventStream) send(event, id string, data any) error {
	return s.sendAll(1, func(int) (string, string, any) { return event, id, data })
}

// sendAll sends n events in one write.
func (s *eventStream) sendAll(n int, at func(i int) (event, id string, data any)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buf.Reset()
	// JSON has no raw newline, so the data is one line.
	enc := json.NewEncoder(&s.buf)
	enc.SetEscapeHTML(false)
	for i := range n {
		event, id, data := at(i)
		if id != "" {
			s.buf.WriteString("id: " + id + "\n")
		}
		s.buf.WriteString("event: " + event + "\ndata: ")
		if err := enc.Encode(data); err != nil {
			s.cancel()
			return err
		}
		s.buf.WriteByte('\n')
	}
	return s.write()
}

// write sends the buffer. The caller holds the lock.
func (s *eventStream) write() error {
	if clientGone(s.ctx) {
		return s.ctx.Err()
	}
	if _, err := s.w.Write(s.buf.Bytes()); err != nil {
		s.cancel()
		return err
	}
	return s.flush()
}

func (s *eventStream) flush() error {
	if err := s.control.Flush(); err != nil {
		s.cancel()
		return err
	}
	s.beat.Reset(s.api.cfg.Limits.Heartbeat)
	return nil
}

// fail sends the problem with which the stream ends, unless the client has disconnected.
func (s *eventStream) fail(err error) {
	if !clientGone(s.ctx) {
		s.send("problem", "", s.api.refuse(s.ctx, err))
	}
}

// close ends the stream and waits for a heartbeat that is being written.
func (s *eventStream) close() {
	s.cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.beat.Stop()
}
