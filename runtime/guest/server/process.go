package server

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// process is a background process over all its restarts. processes.mu guards
// the fields from view on.
type process struct {
	spec    guest.ProcessSpec
	log     *processLog
	restart context.Context // ended when it must not be restarted
	retire  context.CancelFunc
	done    chan struct{} // closed when it has ended and is not restarted

	view guest.Process
	run  *processRun    // the latest
	last syscall.Signal // the last signal that a client had delivered to run

	logStart int64         // where the output of run begins
	changed  chan struct{} // closed at the next change of view; nil while no request waits
}

// notify wakes the requests that wait for a change. processes.mu is held.
func (p *process) notify() {
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}

// processRun is one run of a process, between two restarts.
type processRun struct {
	*running
	drained sync.WaitGroup // until what the process itself wrote is in the log
}

// startRun starts the program.
func (ps *processes) startRun(p *process) (*processRun, error) {
	cmd, err := ps.server.command(p.spec.Command)
	if err != nil {
		return nil, err
	}
	in, err := stdin(nil)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	run := &processRun{}
	run.running, err = ps.server.start(cmd, in)
	return run, err
}

// copy fills the log, also with the output of background processes after the end.
func (ps *processes) copy(run *processRun, pipe *outputPipe, log *processLog, t guest.FrameType) {
	defer pipe.file.Close()
	buf := make([]byte, ringRecord)
	add := func(data []byte) error { log.add(t, data); return nil }
	open, err := pipe.copy(buf, add)
	run.drained.Done()
	for open && err == nil {
		var n int
		n, err = pipe.file.Read(buf)
		if log.add(t, buf[:n]) {
			ps.boundLogs()
		}
	}
}

const (
	// The backoff before a restart begins with firstBackoff and doubles up to maxBackoff:
	// soon enough for a crash, and no load for a loop of them. A run of longRun resets it.
	firstBackoff = 100 * time.Millisecond
	maxBackoff   = 30 * time.Second
	longRun      = 10 * time.Second
)

// supervise restarts a process until its final end.
func (ps *processes) supervise(p *process) {
	run, backoff := p.run, firstBackoff
	for {
		began := time.Now()
		// Once the run is published: the log must not have output of a run before its event.
		run.drained.Add(len(run.outputs))
		for i, pipe := range run.outputs {
			// Ended by the last writer, or by run.close.
			ps.wg.Go(func() { ps.copy(run, pipe, p.log, guest.FrameStdout+guest.FrameType(i)) })
		}
		run.wait()
		ran := time.Since(began)
		run.drained.Wait()
		if !ps.exited(p, run) {
			break
		}
		// Its remaining descendants would hold its ports, as do those that cannot be
		// found (see the package's comment).
		run.tree.kill()
		if ran >= longRun {
			backoff = firstBackoff
		}
		next := ps.restart(p, &backoff)
		if next == nil {
			break
		}
		run.close()
		run = next
	}
	ps.ended(p)
}

// restart starts the process again after backoff, repeatedly until that succeeds. It returns
// nil when the process must not be restarted.
func (ps *processes) restart(p *process, backoff *time.Duration) *processRun {
	for {
		select {
		case <-time.After(*backoff):
		case <-p.restart.Done():
			return nil
		}
		*backoff = min(2**backoff, maxBackoff)
		run, err := ps.startRun(p)
		if err != nil {
			p.log.add(guest.FrameStderr, fmt.Appendf(nil, "doze: restart %s: %v\n", p.view.Name, err))
			continue
		}
		if ps.started(p, run) {
			return run
		}
		run.tree.kill()
		run.close()
		return nil
	}
}
