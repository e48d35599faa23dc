package server

import "time"

// A viewer that a program waits for delays the program, and the viewers that have read
// everything. One that does so for longer than these bounds is lagging.
const (
	// maxStall bounds one delay without a read. The clients of 100 terminals, which share what
	// the machine carries, are read in bursts (see viewerBuffer): 5 MB in all between two of them.
	maxStall = 2 * time.Second
	// maxDelay bounds the delays of the program by a viewer that reads less than its share of
	// steadyRate, in bytes per second. The terminals of a guest that wait share it: 100 of
	// them lose nothing if the machine carries 4 MiB/s in all.
	maxDelay   = 4 * time.Second
	steadyRate = 4 << 20
	// maxPatience bounds one wait. A sandbox may be frozen in it: then its viewers get another
	// one.
	maxPatience = 125 * time.Millisecond
	// maxLead bounds the delays of faster viewers by one that reads at less than half of their
	// rate.
	maxLead = 250 * time.Millisecond
	// While the program does not wait, the bounds recover by 1/recovery of the time: viewers
	// that are always too slow take no more of it.
	recovery = 16
)

// delays are how long a viewer may still delay others.
type delays struct {
	stall time.Duration // until it reads
	total time.Duration // the program
	lead  time.Duration // the faster viewers
}

var fullDelays = delays{maxStall, maxDelay, maxLead}

// left is how long the program may wait; 0: the viewer is lagging. starved: faster viewers have
// read everything.
func (d delays) left(starved bool) time.Duration {
	if starved {
		return min(d.stall, d.total, d.lead)
	}
	return min(d.stall, d.total)
}

// recover records that the program has not waited for any viewer.
func (d *delays) recover(elapsed time.Duration) {
	d.total = min(d.total+elapsed/recovery, maxDelay)
	d.lead = min(d.lead+elapsed/recovery, maxLead)
}

// use records that the program has waited for the viewer, which has read so many bytes meanwhile,
// as one of waiting terminals.
func (d *delays) use(waited time.Duration, read, waiting int64) {
	if d.stall = max(0, d.stall-waited); read > 0 {
		d.stall = maxStall
	}
	d.total = max(0, min(d.total-waited+time.Duration(waiting*read)*time.Second/steadyRate, maxDelay))
}

// useLead records that the program has waited for any viewer. behind: faster viewers have read
// everything, and this one has not. All viewers that are behind are charged at the same time:
// many slow viewers delay the faster ones no longer than one.
func (d *delays) useLead(waited time.Duration, behind bool) {
	if behind {
		waited = -waited
	}
	d.lead = max(0, min(d.lead+waited, maxLead))
}

// missesOutput reports whether a viewer that keeps up would miss output if n bytes more
// were printed.
func (v *viewer) missesOutput(n int) bool {
	return !v.lagging && v.terminal.screen.end+int64(n)-v.cursor > ringSize
}

// awaitViewers waits for a change if a viewer that keeps up would miss output of n bytes, at most
// until the viewer is lagging. Otherwise it returns false. t.mu is held.
func (t *terminal) awaitViewers(n int) bool {
	slow, starved := false, false
	for v := range t.viewers {
		v.slow, v.from = v.missesOutput(n), v.cursor
		slow = slow || v.slow
		starved = starved || v.waiting && v.cursor == t.screen.end
	}
	if !slow {
		return false
	}
	began := time.Now()
	patience := maxPatience
	for v := range t.viewers {
		v.delays.recover(began.Sub(t.waited))
		if v.slow {
			patience = min(patience, v.delays.left(starved))
		}
	}
	timer := time.AfterFunc(patience, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.changed.Broadcast()
	})
	defer timer.Stop()
	t.held = true
	t.waiting.Add(1)
	t.changed.Wait()
	waiting := t.waiting.Add(-1) + 1
	t.held, t.waited = false, time.Now()
	waited := min(t.waited.Sub(began), patience)
	for v := range t.viewers {
		v.delays.useLead(waited, starved && v.from < t.screen.end)
		if v.slow {
			v.delays.use(waited, v.cursor-v.from, waiting)
			v.lagging = v.delays.left(starved) == 0
		}
	}
	return true
}
