package server

import (
	"cmp"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// registered is a session or a terminal; V is what clients see of it.
type registered[V any] interface {
	run()         // until it has ended
	ready() error // waits, while it runs, until clients can use it
	hangUp()
	stop(grace time.Duration)
	// shown is what clients see. closed: the registry forgets it.
	shown(closed bool) V
	// outputBytes is the memory of the output that it stores.
	outputBytes() int
}

// registry has the sessions or the terminals of the sandbox by their ids: those that run, and
// the last ones that have ended.
type registry[R registered[V], V any] struct {
	noun         string // in errors
	missing      string // the code of an unknown id
	maxRunning   int    // more are CodeTooMany
	maxEnded     int    // that are remembered
	maxEndedOut  int    // outputBytes of those, except for the last one
	publishEvent func(V)

	wg     sync.WaitGroup // of the goroutines that run them
	mu     sync.Mutex
	known  map[string]*registration[R]
	ended  []*registration[R] // of known, oldest first
	closed bool
}

// registration is a place in a registry. It is guarded by the mutex of the registry.
type registration[R any] struct {
	id        string
	program   R
	startedAt time.Time // zero: it is about to be started
	over      bool      // it has ended
	closing   bool      // close publishes its end
}

// open starts a program under an id. One that cannot be started leaves no trace.
func (l *registry[R, V]) open(id string, start func() (R, error)) (view V, err error) {
	e, err := l.reserve(id)
	if err != nil {
		return view, err
	}
	program, err := start()
	if err != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.forget(e)
		return view, err
	}
	l.wg.Go(func() { // ended by the end of the program
		program.run()
		l.mu.Lock()
		defer l.mu.Unlock()
		e.over = true
		l.retire(e)
	})
	if err = program.ready(); err == nil {
		err = l.add(e, program)
	}
	if err != nil {
		program.stop(0)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.forget(e)
		return view, err
	}
	return program.shown(false), nil
}

// available returns why no program can be opened under an id at present.
func (l *registry[R, V]) available(id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.refusal(id)
}

// refusal is available with l.mu held.
func (l *registry[R, V]) refusal(id string) error {
	old, taken := l.known[id]
	switch {
	case l.closed:
		return errStopping
	case taken && !slices.Contains(l.ended, old):
		return refuse(guest.CodeExists, "the %s %q is open already", l.noun, id)
	case len(l.known)-len(l.ended) >= l.maxRunning:
		return refuse(guest.CodeTooMany, "%d %ss are open already, which is the limit", l.maxRunning, l.noun)
	}
	return nil
}

// reserve takes an id.
func (l *registry[R, V]) reserve(id string) (*registration[R], error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.refusal(id); err != nil {
		return nil, err
	}
	if old := l.known[id]; old != nil {
		l.forget(old)
	}
	e := &registration[R]{id: id}
	l.known[id] = e
	return e, nil
}

// add makes a program that was started known, which may have ended since.
func (l *registry[R, V]) add(e *registration[R], program R) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return errStopping
	}
	e.program, e.startedAt = program, time.Now()
	l.publish(program.shown(false))
	if e.over {
		l.retire(e)
	}
	return nil
}

// forget drops one. l.mu is held.
func (l *registry[R, V]) forget(e *registration[R]) {
	l.ended = slices.DeleteFunc(l.ended, func(other *registration[R]) bool { return other == e })
	delete(l.known, e.id)
}

// retire records the end of a program, unless it is not known yet, or close does. l.mu is held.
func (l *registry[R, V]) retire(e *registration[R]) {
	if e.startedAt.IsZero() || e.closing {
		return
	}
	l.publish(e.program.shown(false))
	l.ended = append(l.ended, e)
	for len(l.ended) > 1 && (len(l.ended) > l.maxEnded || l.endedOutput() > l.maxEndedOut) {
		l.forget(l.ended[0])
	}
}

// endedOutput is the sum of outputBytes of those that have ended. l.mu is held.
func (l *registry[R, V]) endedOutput() (total int) {
	for _, e := range l.ended {
		total += e.program.outputBytes()
	}
	return total
}

// find returns the session or terminal with that id.
func (l *registry[R, V]) find(id string) (program R, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e, err := l.registration(id)
	if err != nil {
		return program, err
	}
	return e.program, nil
}

// registration is find with l.mu held.
func (l *registry[R, V]) registration(id string) (*registration[R], error) {
	if e := l.known[id]; e != nil && !e.startedAt.IsZero() {
		return e, nil
	}
	return nil, refuse(l.missing, "no %s has the id %.70q", l.noun, id)
}

// views are all in the order of their starts. l.mu is held.
func (l *registry[R, V]) views() []V {
	views := make([]V, 0, len(l.known))
	for _, e := range l.started() {
		views = append(views, e.program.shown(false))
	}
	return views
}

// started are those that were started, in that order. l.mu is held.
func (l *registry[R, V]) started() []*registration[R] {
	var list []*registration[R]
	for _, e := range l.known {
		if !e.startedAt.IsZero() {
			list = append(list, e)
		}
	}
	slices.SortFunc(list, func(a, b *registration[R]) int {
		return cmp.Or(a.startedAt.Compare(b.startedAt), cmp.Compare(a.id, b.id))
	})
	return list
}

// close ends a program and forgets it.
func (l *registry[R, V]) close(id string, grace time.Duration) (view V, err error) {
	l.mu.Lock()
	e, err := l.registration(id)
	if err == nil {
		e.closing = true
	}
	l.mu.Unlock()
	if err != nil {
		return view, err
	}
	e.program.stop(grace)
	l.mu.Lock()
	defer l.mu.Unlock()
	view = e.program.shown(true)
	if l.known[id] == e {
		l.forget(e)
		l.publish(view)
	}
	return view, nil
}

// respondClose is close of a request.
func (l *registry[R, V]) respondClose(r *http.Request) (any, error) {
	grace, err := durationOf(r, "grace", maxGrace)
	if err != nil {
		return nil, err
	}
	return l.close(r.PathValue("id"), grace)
}

// publish sends a change to the node. l.mu is held, so that changes arrive in their order. That
// programs end with the sandbox is not a change: the node knows why it stops.
func (l *registry[R, V]) publish(view V) {
	if !l.closed {
		l.publishEvent(view)
	}
}

// refuse lets no program start any more, and hangs up those that run.
func (l *registry[R, V]) refuse() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, e := range l.started() {
		e.program.hangUp()
	}
}

// closeAll ends all programs, after refuse.
func (l *registry[R, V]) closeAll() {
	l.mu.Lock()
	all := l.started()
	l.mu.Unlock()
	var stopping sync.WaitGroup
	for _, e := range all {
		stopping.Go(func() { e.program.stop(0) })
	}
	stopping.Wait()
	l.wg.Wait()
}
