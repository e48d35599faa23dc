package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// progress is one line on a terminal that is written over. Elsewhere it is silent.
type progress struct {
	w    *os.File // nil: silent
	mu   sync.Mutex
	last time.Time
	open bool // the line has something on it
	done bool
}

func newProgress(w io.Writer) *progress {
	if f, ok := w.(*os.File); ok && isTerminal(f) {
		return &progress{w: f}
	}
	return &progress{}
}

// progressEvery bounds how often the line is written.
const progressEvery = 100 * time.Millisecond

func (p *progress) show(text string) { p.showAfter(progressEvery, text) }

// showAfter shows text unless the line was written less than a time ago.
func (p *progress) showAfter(wait time.Duration, text string) {
	if p.w == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done || time.Since(p.last) < wait {
		return
	}
	p.last, p.open = time.Now(), true
	width, _ := sizeOf(p.w)
	fmt.Fprintf(p.w, "\r\x1b[K%s", cutTo(clean(text), width-1))
}

// slow is the time after which a command prints what it waits for.
const slow = time.Second

// waiting shows on a terminal what a command waits for, and for how long already, until
// the returned function is called.
func (a *app) waiting(what string) (done func()) {
	p := newProgress(a.err)
	if p.w == nil {
		return func() {}
	}
	began := time.Now()
	tick := time.NewTicker(slow)
	ended := make(chan struct{})
	go func() { // ends with done
		for {
			select {
			case <-ended:
				return
			case <-tick.C:
				p.show(fmt.Sprintf("%s… %s", what, age(time.Since(began))))
			}
		}
	}()
	return func() {
		tick.Stop()
		close(ended)
		p.clear()
	}
}

// clear removes the line permanently. It is idempotent.
func (p *progress) clear() {
	p.mu.Lock()
	p.done = true
	p.mu.Unlock()
	p.wipe()
}

// wipe makes room for another line.
func (p *progress) wipe() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.open = false
	}
}
