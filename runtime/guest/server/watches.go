package server

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// A watch without a client is kept for retentionSteps times retentionStep, so that its client
// can resume it. A timer that is due fires once when a frozen sandbox wakes, so the time
// asleep counts as one step at most.
const (
	retentionStep  = 5 * time.Second
	retentionSteps = 12
)

// watches are the watches of a sandbox.
type watches struct {
	server      *Server
	directories atomic.Int64 // that are watched, of all watches
	running     sync.WaitGroup

	mu     sync.Mutex
	all    map[string]*watch // by id; nil after close
	starts int               // watches that are being started
}

func newWatches(s *Server) *watches { return &watches{server: s, all: map[string]*watch{}} }

// close ends all watches and their streams.
func (ws *watches) close() {
	ws.mu.Lock()
	all := ws.all
	ws.all = nil
	ws.mu.Unlock()
	for _, w := range all {
		w.forget()
	}
	ws.running.Wait()
}

// open resumes the watch of a cursor, or starts a new one.
func (ws *watches) open(ctx context.Context, spec guest.WatchSpec) (*watchReader, error) {
	since := spec.Since
	spec.Since = guest.WatchCursor{}
	if r := ws.resume(spec, since); r != nil {
		return r, nil
	}
	if err := ws.reserve(); err != nil {
		return nil, err
	}
	w, err := startWatch(ctx, ws, spec)
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.starts--
	if err != nil {
		return nil, err
	}
	if ws.all == nil {
		w.queue.close()
		return nil, errWatchesClosed
	}
	ws.all[w.id] = w
	r := w.attach(0)
	r.expired = since != guest.WatchCursor{}
	ws.running.Go(w.run)
	return r, nil
}

// errWatchesClosed ends the watches when the guest ends.
var errWatchesClosed = errors.New("the sandbox is being stopped")

// resume returns nil if the events after the cursor are not known, or not of this watch.
func (ws *watches) resume(spec guest.WatchSpec, since guest.WatchCursor) *watchReader {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	w := ws.all[since.Watch]
	if w == nil || w.spec.Path != spec.Path || w.spec.Recursive != spec.Recursive ||
		!slices.Equal(w.spec.Include, spec.Include) || !slices.Equal(w.spec.Exclude, spec.Exclude) {
		return nil
	}
	r := w.attach(since.Seq)
	if r != nil {
		r.resumed = true
	}
	return r
}

// reserve permits one more watch. If there are as many as may be, it forgets the one that
// has been without a client for longest.
func (ws *watches) reserve() error {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.all == nil {
		return errWatchesClosed
	}
	if len(ws.all)+ws.starts >= guest.MaxWatches {
		var oldest *watch
		for _, w := range ws.all {
			if since := w.idleSince(); !since.IsZero() && (oldest == nil || since.Before(oldest.idleSince())) {
				oldest = w
			}
		}
		if oldest == nil {
			return refuse(guest.CodeWatchLimit, "the sandbox has %d watches; close one first", guest.MaxWatches)
		}
		delete(ws.all, oldest.id)
		oldest.forget()
	}
	ws.starts++
	return nil
}

// remove forgets a watch that no client has resumed.
func (ws *watches) remove(w *watch) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.all[w.id] == w && !w.idleSince().IsZero() {
		delete(ws.all, w.id)
		w.forget()
	}
}

// addDirectory counts one more directory, unless there are as many as may be.
func (ws *watches) addDirectory() bool {
	if ws.directories.Add(1) > guest.MaxWatchedDirectories {
		ws.directories.Add(-1)
		return false
	}
	return true
}

// streamWatch streams the events of a watch: lines of guest.WatchLine.
func (s *Server) streamWatch(w http.ResponseWriter, r *http.Request) error {
	var spec guest.WatchSpec
	if err := readJSON(r, &spec); err != nil {
		return err
	}
	reader, err := s.watches.open(r.Context(), spec)
	if err != nil {
		return err
	}
	defer reader.close()
	rc := http.NewResponseController(w)
	lines := json.NewEncoder(w)
	w.Header().Set("Content-Type", "application/x-ndjson")
	line := guest.WatchLine{Started: reader.started()}
	for lines.Encode(line) == nil && rc.Flush() == nil {
		events, err := reader.next(r.Context(), line.Events[:0])
		if err != nil {
			return nil // the client is gone, or the guest ends
		}
		line = guest.WatchLine{Events: events}
	}
	return nil
}

// watchReader is the position of a client in the events of a watch.
type watchReader struct {
	watch   *watch
	at      uint64 // Seq of the last event that was read; guarded by watch.mu
	resumed bool
	expired bool // the client's cursor is unknown
	ended   bool // the last event was read
}

func (r *watchReader) started() *guest.WatchStarted {
	w := r.watch
	w.mu.Lock()
	defer w.mu.Unlock()
	return &guest.WatchStarted{
		Watch: w.id, Seq: r.at, Resumed: r.resumed && r.at+1 >= w.log.first(), Directories: int(w.watched.Load()), Unreadable: int(w.unreadable.Load()),
	}
}

// next appends the next events to batch, and waits for them. It fails when ctx ends, after
// the last event, and when the watch is forgotten.
func (r *watchReader) next(ctx context.Context, batch []guest.WatchEvent) ([]guest.WatchEvent, error) {
	w := r.watch
	for !r.ended {
		if r.expired {
			r.expired = false
			return append(batch, guest.WatchEvent{Seq: r.at, Type: guest.WatchOverflow, Reason: guest.WatchCursorExpired}), nil
		}
		w.mu.Lock()
		batch = w.log.read(r.at, batch)
		n, changed, forgotten := len(batch), w.changed, w.forgotten
		if n > 0 {
			r.at = batch[n-1].Seq
			w.release()
		}
		w.mu.Unlock()
		if n > 0 {
			r.ended = batch[n-1].Type == guest.WatchStopped
			return batch, nil
		}
		if forgotten {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return nil, errWatchesClosed
}

// close ends the stream of a client. The watch stays for a while.
func (r *watchReader) close() {
	w := r.watch
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.readers, r)
	if len(w.readers) == 0 && !w.forgotten {
		w.idle, w.steps = time.Now(), 0
		w.retention = time.AfterFunc(w.step(), w.expire)
	}
}
