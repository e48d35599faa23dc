package podman

import (
	"bytes"
	"context"
	"errors"
	"sync"
)

// pulls shares one pull among all who wait for the same image.
type pulls struct {
	mu     sync.Mutex
	byRef  map[string]*pull
	closed bool
	group  sync.WaitGroup
}

// pull is one that runs. It goes on while anybody waits for it.
type pull struct {
	cancel  context.CancelFunc
	waiters int // under pulls.mu
	lines   *lines
	done    chan struct{}
	err     error // valid once done is closed
}

// join waits for the pull of ref, starting it with run unless it runs already.
// progress is called in the caller's goroutine, from the pull's first line on.
func (p *pulls) join(ctx context.Context, ref string, progress func(line string), run func(context.Context, *lines) error) error {
	one, err := p.enter(ref, run)
	if err != nil {
		return err
	}
	defer p.leave(ref, one)
	for seen := 0; ; {
		news, changed := one.lines.after(seen)
		seen += len(news)
		if progress != nil {
			for _, line := range news {
				progress(line)
			}
		}
		select {
		case <-changed:
			continue
		default:
		}
		select {
		case <-changed:
		case <-one.done:
			if news, _ := one.lines.after(seen); len(news) > 0 {
				continue
			}
			return one.err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (p *pulls) enter(ref string, run func(context.Context, *lines) error) (*pull, error) {
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
	p.group.Go(func() { // ends with the pull, which leave and close cancel
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

// leave ends the pull when nobody waits for it any more. Whoever comes next
// starts another.
func (p *pulls) leave(ref string, one *pull) {
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

// maxLines of a pull are kept for who joins late; more are dropped. An image has
// at most 127 layers, with a line or two each.
const maxLines = 500

// lines collects what is written, split at newlines, for readers at their own
// pace.
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

// after returns the lines from number n on, and a channel that is closed when
// there are more than these.
func (l *lines) after(n int) ([]string, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all[n:len(l.all):len(l.all)], l.changed
}
