package stack

import (
	"sync"
	"time"
)

// deadline of one direction of a Conn.
type deadline struct {
	mu      sync.Mutex
	at      time.Time
	timer   *time.Timer
	changed chan struct{} // closed when it passes or is set anew
}

func (d *deadline) init() { d.changed = make(chan struct{}) }

// set sets the deadline, and makes who waits look at it. The zero time is none.
func (d *deadline) set(t time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	d.at = t
	close(d.changed)
	changed := make(chan struct{})
	d.changed = changed
	if wait := time.Until(t); !t.IsZero() && wait > 0 {
		d.timer = time.AfterFunc(wait, func() { d.pass(changed) })
	}
	return nil
}

// pass wakes who waits for this deadline, unless another was set meanwhile.
func (d *deadline) pass(of chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.changed == of {
		close(of)
		d.changed = make(chan struct{})
	}
}

// passed says whether the deadline is over.
func (d *deadline) passed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !d.at.IsZero() && !d.at.After(time.Now())
}

// wait waits for an event, or for the deadline to pass or to be changed.
func (d *deadline) wait(event <-chan struct{}) {
	d.mu.Lock()
	changed := d.changed
	over := !d.at.IsZero() && !d.at.After(time.Now())
	d.mu.Unlock()
	if over {
		return
	}
	select {
	case <-event:
	case <-changed:
	}
}
