package server

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/netns/link"
	"github.com/doze-run/doze/runtime/sockets"
)

// The kernel reports no event when a socket begins to listen, so its list of listening
// sockets is polled, which takes 40 µs. The pauses are short while a request waits for a port, and
// double from firstPause to maxPause after a command was started or a process has ended. So
// a port is found after at most twice the time that its server took to start. Without a process
// in the sandbox there are no polls: hundreds of sandboxes may run idle.
const (
	waitingPause = 2 * time.Millisecond
	// patientPause replaces waitingPause patientAfter the last wait began.
	patientPause = 4 * time.Millisecond
	patientAfter = 10 * time.Second
	firstPause   = 5 * time.Millisecond
	maxPause     = time.Second
	// tablePause replaces shorter pauses on kernels without sock_diag, where a poll takes
	// up to some milliseconds.
	tablePause = 25 * time.Millisecond
	// reportPause is the least time between two events with the ports.
	reportPause = 50 * time.Millisecond
	// A poll that is late by thawed is put off by afterThaw: the sandbox was frozen, and the
	// request that woke it comes first.
	thawed    = 200 * time.Millisecond
	afterThaw = 50 * time.Millisecond

	// maxDiagFailures in a row mean that the kernel has no sock_diag, or forbids its use.
	maxDiagFailures = 3

	// maxPortWait bounds how long one request waits for a port.
	maxPortWait = time.Hour
)

// ports are the TCP ports on which processes of the sandbox listen.
type ports struct {
	server *Server
	kicked chan struct{} // holds one element when the pauses begin again with the shortest

	polling sync.Mutex // held during a poll; guards the fields up to mu
	diag    *sockets.Diag
	failed  int  // polls in a row for which diag failed
	noDiag  bool // it does not work, or the server has ended
	last    []sockets.Listener
	spare   []sockets.Listener // memory for the next poll
	owners  map[uint32]owner   // by inode

	mu      sync.Mutex // guards:
	found   []listener
	changed chan struct{} // closed at the next change of found
	waits   int           // requests that wait for a port
	unsent  bool          // the last change of found is not in an event
	sent    time.Time     // when the last event was sent
}

// listener is a socket that listens.
type listener struct {
	sockets.Listener
	owner owner
}

func newPorts(s *Server) *ports {
	return &ports{server: s, kicked: make(chan struct{}, 1), owners: map[uint32]owner{}, changed: make(chan struct{})}
}

// kick makes the next polls come soon: processes may begin or cease to listen.
func (ps *ports) kick() {
	select {
	case ps.kicked <- struct{}{}:
	default:
	}
}

// follow makes the polls come soon when a request that may run a command begins and ends.
func (ps *ports) follow(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost && r.URL.Path != guest.RouteTrim {
			ps.kick()
			defer ps.kick()
		}
		next.ServeHTTP(w, r)
	})
}

// run polls until ctx ends.
func (ps *ports) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var due time.Time // of the next poll; zero: after the next kick
	arm := func(in time.Duration) {
		due = time.Now().Add(in)
		timer.Reset(in)
	}
	pause, kicked := firstPause, time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ps.kicked:
			pause, kicked = firstPause, time.Now()
			if next := ps.pause(pause, kicked); due.IsZero() || time.Until(due) > next {
				arm(next)
			}
			continue
		case <-timer.C:
		}
		switch {
		case time.Since(due) > thawed && !due.IsZero():
			arm(afterThaw)
		case !ps.active():
			due = time.Time{}
		default:
			alone := ps.server.reaper.alone() // before the poll, which has to see the end of the last process
			ps.poll()
			ps.report()
			if alone && ps.idle() {
				due = time.Time{}
				continue
			}
			arm(ps.pause(pause, kicked))
			pause = min(2*pause, maxPause)
		}
	}
}

// active reports whether there is a reader for what a poll finds.
func (ps *ports) active() bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return ps.server.cfg.ReportPorts || ps.waits > 0
}

// idle reports whether no request waits for a port and no change is to be reported.
func (ps *ports) idle() bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return ps.waits == 0 && !ps.unsent
}

// pause returns the time until the next poll. Without a request that waits it is idle.
func (ps *ports) pause(idle time.Duration, kicked time.Time) time.Duration {
	ps.polling.Lock()
	least := time.Duration(0)
	if ps.noDiag {
		least = tablePause
	}
	ps.polling.Unlock()
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if ps.unsent {
		idle = min(idle, reportPause)
	}
	switch {
	case ps.waits > 0 && time.Since(kicked) < patientAfter:
		idle = min(idle, waitingPause)
	case ps.waits > 0:
		idle = min(idle, patientPause)
	}
	return max(idle, least)
}

// poll lists the sockets that listen, and wakes the waiting requests if there are others than
// before. It may be called concurrently.
func (ps *ports) poll() {
	ps.polling.Lock()
	defer ps.polling.Unlock()
	list := slices.DeleteFunc(ps.list(ps.spare[:0]), func(l sockets.Listener) bool { return l.Addr == link.Listener })
	if slices.Equal(list, ps.last) {
		ps.spare = list
		return
	}
	ps.spare, ps.last = ps.last, list
	ps.findOwners(list)
	found := make([]listener, len(list))
	for i, l := range list {
		found[i] = listener{l, ps.owners[l.Inode]}
	}
	slices.SortStableFunc(found, func(a, b listener) int { return cmp.Compare(a.Addr.Port(), b.Addr.Port()) })
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.found, ps.unsent = found, true
	close(ps.changed)
	ps.changed = make(chan struct{})
}

// list appends the sockets that listen. ps.polling is held.
func (ps *ports) list(to []sockets.Listener) []sockets.Listener {
	if ps.noDiag {
		return sockets.Listening(to)
	}
	var err error
	if ps.diag == nil {
		ps.diag, err = sockets.OpenDiag()
	}
	if err == nil {
		var list []sockets.Listener
		if list, err = ps.diag.Listening(to); err == nil {
			ps.failed = 0
			return list
		}
		ps.diag.Close()
		ps.diag = nil
	}
	if ps.failed++; ps.failed == maxDiagFailures {
		ps.noDiag = true
		ps.server.log.Warn("failed to list sockets by sock_diag, reading /proc/net/tcp instead", "error", err)
	}
	return sockets.Listening(to)
}

// findOwners finds the owners of sockets that are new in the list, and forgets those that
// it lacks. ps.polling is held.
func (ps *ports) findOwners(list []sockets.Listener) {
	before := ps.owners
	ps.owners = make(map[uint32]owner, len(list))
	unknown := map[uint32]owner{}
	for _, l := range list {
		if o, ok := before[l.Inode]; ok {
			ps.owners[l.Inode] = o
		} else if len(unknown) < maxOwned {
			unknown[l.Inode] = owner{}
		}
	}
	if len(unknown) == 0 {
		return
	}
	findPIDs(unknown)
	for inode, o := range unknown {
		if o.pid != 0 {
			o.process, o.foreign = ps.server.procs.owning(o.pid)
		}
		ps.owners[inode] = o
	}
}

// on returns the sockets that listen on a port, and a channel that is closed when other
// sockets listen than now.
func (ps *ports) on(port uint16) (found []listener, changed <-chan struct{}) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	for _, l := range ps.found {
		if l.Addr.Port() == port {
			found = append(found, l)
		}
	}
	return found, ps.changed
}

// wait makes the polls frequent until end is called.
func (ps *ports) wait() (end func()) {
	ps.mu.Lock()
	ps.waits++
	ps.mu.Unlock()
	ps.poll() // finds sockets from before
	ps.kick()
	return func() {
		ps.mu.Lock()
		ps.waits--
		ps.mu.Unlock()
	}
}

// report sends an event with the ports if they have changed.
func (ps *ports) report() {
	if !ps.server.cfg.ReportPorts {
		return
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if !ps.unsent || time.Since(ps.sent) < reportPause {
		return
	}
	ps.unsent, ps.sent = false, time.Now()
	ps.server.events.send(ps.event())
}

// event returns the event with the ports. ps.mu is held.
func (ps *ports) event() guest.Event {
	var list []guest.Listening
	for rest := ps.found; len(rest) > 0 && len(list) < guest.MaxListening; {
		n := 1
		for n < len(rest) && rest[n].Addr.Port() == rest[0].Addr.Port() {
			n++
		}
		list = append(list, describe(rest[:n]))
		rest = rest[n:]
	}
	return guest.Event{Type: guest.EventPorts, Ports: list}
}

// describe returns the view of the sockets that listen on one port.
func describe(on []listener) guest.Listening {
	view := guest.Listening{Port: on[0].Addr.Port()}
	for _, l := range on {
		if address := l.Addr.Addr().String(); len(view.Addresses) < guest.MaxListenAddresses && !slices.Contains(view.Addresses, address) {
			view.Addresses = append(view.Addresses, address)
		}
		if view.PID == 0 {
			view.PID, view.Program, view.Process = l.owner.pid, l.owner.program, l.owner.process
		}
	}
	return view
}

// close ends the use of sock_diag.
func (ps *ports) close() {
	ps.polling.Lock()
	defer ps.polling.Unlock()
	ps.noDiag = true
	if ps.diag != nil {
		ps.diag.Close()
		ps.diag = nil
	}
}

func (s *Server) portReady(r *http.Request) (any, error) {
	port, err := strconv.ParseUint(r.URL.Query().Get("port"), 10, 16)
	if err != nil || port == 0 {
		return nil, refuse(guest.CodeInvalid, "port %.20q is unusable; it is a number from 1 to 65535", r.URL.Query().Get("port"))
	}
	wait, err := durationOf(r, "wait", maxPortWait)
	if err != nil {
		return nil, err
	}
	defer s.ports.wait()()
	expired := time.After(wait)
	for {
		found, changed := s.ports.on(uint16(port))
		if len(found) > 0 {
			return struct{}{}, nil
		}
		select {
		case <-changed:
		case <-expired:
			return nil, refuse(guest.CodePortNotReady, "nothing listens on port %d after %s", port, wait)
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
	}
}
