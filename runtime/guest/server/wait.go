package server

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// crashLoop is how often a process is restarted before a request no longer waits for it.
// With the backoff that is 0.7 s.
const crashLoop = 3

// condition is what a request waits for.
type condition interface {
	// holds reports whether the condition holds, and then completes the result. Otherwise
	// it sets the result's Detail and returns a channel that is closed when it has to
	// be called again, and the time after which it has to be called at the latest; 0: any.
	holds(p watchedProcess, r *guest.WaitResult) (met bool, again <-chan struct{}, latest time.Duration)
	// close releases the resources of holds, after its context has ended.
	close()
}

// watchedProcess is a process at a moment.
type watchedProcess struct {
	guest.Process
	logStart int64           // position of its output since it was last started
	final    bool            // it is not restarted
	changed  <-chan struct{} // closed at the next change
}

func (s *Server) waitProcess(r *http.Request) (any, error) {
	p, err := s.procs.find(r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	var w guest.Wait
	if err := readJSON(r, &w); err != nil {
		return nil, err
	}
	if w.Timeout < 0 || w.Timeout > guest.MaxWait {
		return nil, refuse(guest.CodeInvalid, "timeout %s is out of range; it is at most %s", w.Timeout, guest.MaxWait)
	}
	ctx, cancel := context.WithTimeout(r.Context(), w.Timeout)
	defer cancel()
	c, err := s.condition(ctx, p, w)
	if err != nil {
		return nil, err
	}
	defer c.close()
	defer cancel()
	return s.procs.await(ctx, p, c), nil
}

// condition returns the condition of a wait that ends with ctx.
func (s *Server) condition(ctx context.Context, p *process, w guest.Wait) (condition, error) {
	set := 0
	for _, isSet := range []bool{w.Port != 0, w.Log != "", w.Exit, w.HTTP != nil} {
		if isSet {
			set++
		}
	}
	switch {
	case set != 1:
		return nil, refuse(guest.CodeInvalid, "%d conditions are set; set one of port, log, exit and http", set)
	case w.Port != 0:
		return s.newPortCondition(p, w.Port), nil
	case w.HTTP != nil:
		return &httpCondition{port: s.newPortCondition(p, w.HTTP.Port), ctx: ctx, request: *w.HTTP}, nil
	case w.Exit:
		return exitCondition{}, nil
	}
	expression, err := regexp.Compile(w.Log)
	if err != nil {
		return nil, refuse(guest.CodeInvalid, "log is not a regular expression: %v", err)
	}
	return newLogCondition(ctx, p.log, expression), nil
}

// await waits until the condition holds, the process has ended, or ctx ends.
func (ps *processes) await(ctx context.Context, p *process, c condition) guest.WaitResult {
	var r guest.WaitResult
	restarts := ps.watch(p).RestartCount
	for {
		// The process first: all that it wrote until its end is in the log by then.
		now := ps.watch(p)
		r.Process = now.Process
		met, again, latest := c.holds(now, &r)
		switch ended := now.State == guest.ProcessExited; {
		case met:
			ps.server.ports.report() // first, so that a client that reads the ports next finds this one
			r.Outcome, r.Detail = guest.WaitMet, ""
			return r
		case ended && (now.final || now.RestartCount-restarts >= crashLoop):
			r.Outcome = guest.WaitExited
			return r
		}
		var timer <-chan time.Time
		if latest > 0 {
			timer = time.After(latest)
		}
		select {
		case <-now.changed:
		case <-again:
		case <-timer:
		case <-ctx.Done():
			r.Outcome = guest.WaitExpired
			return r
		}
	}
}

// watch returns the process as it is now.
func (ps *processes) watch(p *process) watchedProcess {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	final := p.spec.Restart != guest.RestartAlways || p.restart.Err() != nil
	return watchedProcess{Process: p.view, logStart: p.logStart, final: final, changed: p.changed}
}

// exitCondition: the process has ended.
type exitCondition struct{}

func (exitCondition) close() {}

func (exitCondition) holds(p watchedProcess, r *guest.WaitResult) (bool, <-chan struct{}, time.Duration) {
	r.Detail = "it runs"
	return p.State == guest.ProcessExited, nil, 0
}

// portCondition: the process, or one that it started, listens on a port.
type portCondition struct {
	ports   *ports
	process string
	port    uint16
	endWait func()
}

func (s *Server) newPortCondition(p *process, port uint16) portCondition {
	return portCondition{ports: s.ports, process: s.procs.viewOf(p).ID, port: port, endWait: s.ports.wait()}
}

func (c portCondition) close() { c.endWait() }

func (c portCondition) holds(_ watchedProcess, r *guest.WaitResult) (bool, <-chan struct{}, time.Duration) {
	_, again := c.listening(r)
	return r.Listening != nil, again, 0
}

// listening sets the result's Listening, and returns the sockets.
func (c portCondition) listening(r *guest.WaitResult) (own []listener, again <-chan struct{}) {
	r.Listening = nil
	found, again := c.ports.on(c.port)
	r.Detail = fmt.Sprintf("nothing listens on port %d", c.port)
	for _, l := range found {
		if l.owner.process == c.process || l.owner.process == "" && !l.owner.foreign {
			own = append(own, l)
			continue
		}
		r.Detail = fmt.Sprintf("another process listens on port %d: %s, with the pid %d", c.port, l.owner.program, l.owner.pid)
	}
	if len(own) > 0 {
		view := describe(own)
		r.Listening = &view
	}
	return own, again
}
