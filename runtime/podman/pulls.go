package podman

import (
	"bytes"
	"context"
	"errors"
	"sync"
)

// pulls shares one pull among all callers that wait for the same image.
type pulls struct {
	mu     sync.Mutex
	byRef  map[string]*pull
	closed bool
	group  sync.WaitGroup
}

// pull is a running pull. It is canceled when no caller waits for it any longer.
type pull struct {
	cancel  context.CancelFunc
	waiters int // guarded by pulls.mu
	lines   *lines
	done    chan struct{}
	err     error // valid once done is closed
}

// join waits for the pull of ref, and starts it with run unless it is running. It calls
// progress, if that is not nil, in the caller's goroutine with each line of the pull's
// output, from the first one on.
func (p *pulls) join(ctx context.Context, ref string, progress func(line string), run func(context.Context, *lines) error) error {
	one, err := p.addWaiter(ref, run)
	if err != nil {
		return err
	}
	defer p.removeWaiter(ref, one)
	for seen := 0; ; {
		added, changed := one.lines.after(seen)
		seen += len(added)
		if progress != nil {
			for _, line := range added {
				progress(line)
			}
		}
		select {
		case <-changed:
		case <-one.done:
			if added, _ := one.lines.after(seen); len(added) > 0 {
				continue
			}
			return one.err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// addWaiter returns the pull of ref, which it starts unless it is running. The caller calls
// removeWaiter.
func (p *pulls) addWaiter(ref string, run func(context.Context, *lines) error) (*pull, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errors.New("the engine is closed")
	}
	if one := p.byRef[ref]; one != nil {
		one.waiters++
		return one, nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	one := &pull{cancel: cancel, waiters: 1, lines: newLines(), done: make(chan struct{})}
	if p.byRef == nil {
		p.byRef = make(map[string]*pull)
	}
	p.byRef[ref] = one
	p.group.Go(func() { // ends with the pull, which removeWaiter and close cancel
		one.err = run(ctx, one.lines)
		p.mu.Lock()
		if p.byRef[ref] == one {
			delete(p.byRef, ref)
		}
		p.mu.Unlock()
		cancel()
		close(one.done)
	})
	return one, nil
}

// removeWaiter cancels the pull if no other caller waits for it. The next caller starts a
// new one.
func (p *pulls) removeWaiter(ref string, one *pull) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if one.waiters--; one.waiters > 0 {
		return
	}
	one.cancel()
	if p.byRef[ref] == one {
		delete(p.byRef, ref)
	}
}

// close ends all pulls and waits for them.
func (p *pulls) close() {
	p.mu.Lock()
	p.closed = true
	for _, one := range p.byRef {
		one.cancel()
	}
	p.mu.Unlock()
	p.group.Wait()
}

// maxLines bounds the lines of a pull that are stored for later callers; further lines are
// dropped. An image has at most 127 layers, with a line or two each.
const maxLines = 500

// lines stores the lines that are written, for readers at their own pace.
type lines struct {
	mu      sync.Mutex
	all     []string
	partial []byte
	changed chan struct{} // closed at the next line
}

func newLines() *lines { return &lines{changed: make(chan struct{})} }

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	grown := false
	for part := range bytes.Lines(b) {
		l.partial = append(l.partial, part[:min(len(part), maxLine)]...)
		if !bytes.HasSuffix(part, []byte("\n")) {
			break
		}
		if line := bytes.TrimSpace(l.partial); len(line) > 0 && len(l.all) < maxLines {
			l.all = append(l.all, string(line[:min(len(line), maxLine)]))
			grown = true
		}
		l.partial = l.partial[:0]
	}
	l.partial = l.partial[:min(len(l.partial), maxLine)]
	if grown {
		close(l.changed)
		l.changed = make(chan struct{})
	}
	return len(b), nil
}

// after returns the lines from number n on, and a channel that is closed when more lines
// are written.
func (l *lines) after(n int) ([]string, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all[n:len(l.all):len(l.all)], l.changed
}
