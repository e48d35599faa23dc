package server

import (
	"bytes"
	"context"
	"encoding/binary"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// settled is how long the end of the output stays without a newline until it counts as
// a line, as prompts do.
const settled = 100 * time.Millisecond

// logBuffers are for reads of logs.
var logBuffers = sync.Pool{New: func() any { return new([4 * ringRecord]byte) }}

// logCondition: a line of the output since the process was last started matches.
type logCondition struct {
	ctx        context.Context // ends the search
	log        *processLog
	read       func(from logPosition, b []byte) logPart // log.read
	expression *regexp.Regexp

	started bool
	run     int64 // position at which the output of the run begins
	next    logPosition
	lines   [2]line // of stdout and stderr
	changed time.Time
}

func newLogCondition(ctx context.Context, log *processLog, expression *regexp.Regexp) *logCondition {
	return &logCondition{ctx: ctx, log: log, read: log.read, expression: expression}
}

func (c *logCondition) close() {}

func (c *logCondition) holds(p watchedProcess, r *guest.WaitResult) (bool, <-chan struct{}, time.Duration) {
	if !c.started || c.run != p.logStart {
		c.started, c.run, c.next, c.lines = true, p.logStart, logPosition{at: p.logStart}, [2]line{}
	}
	r.Detail = "no line of its output matches"
	buf := logBuffers.Get().(*[4 * ringRecord]byte)
	defer logBuffers.Put(buf)
	var again <-chan struct{}
	_, written := c.log.span()
	for {
		part := c.read(c.next, buf[:0])
		c.next, again = part.next, part.changed
		if part.skipped > 0 {
			c.lines = [2]line{} // their ends are lost
		}
		if len(part.frames) == 0 {
			break
		}
		c.changed = time.Now()
		if c.search(part.frames, r) {
			return true, nil, 0
		}
		// Lines from before the end of the wait count. A process that writes quickly
		// would have more without an end.
		if c.next.at >= written && c.ctx.Err() != nil {
			return false, nil, 0
		}
	}
	if c.lines[0].empty() && c.lines[1].empty() {
		return false, again, 0
	}
	left := settled - time.Since(c.changed)
	if left > 0 && p.State == guest.ProcessRunning {
		return false, again, left
	}
	for _, l := range c.lines {
		if !l.empty() && c.match(l.text, r) {
			return true, nil, 0
		}
	}
	return false, again, 0
}

// search searches the lines that frames complete.
func (c *logCondition) search(frames []byte, r *guest.WaitResult) bool {
	for len(frames) > 0 {
		kind, data := guest.FrameType(frames[0]), frames[guest.FrameHeader:]
		length := binary.BigEndian.Uint32(frames[1:])
		data, frames = data[:length], data[length:]
		l := &c.lines[0]
		if kind == guest.FrameStderr {
			l = &c.lines[1]
		}
		if l.add(data, func(text []byte) bool { return c.match(text, r) }) {
			return true
		}
	}
	return false
}

// match searches a line and completes the result.
func (c *logCondition) match(text []byte, r *guest.WaitResult) bool {
	shown := plain(text)
	found := c.expression.FindStringSubmatch(shown)
	if found == nil {
		return false
	}
	r.Line, r.Match = shown, found[:min(len(found), guest.MaxWaitGroups)]
	return true
}

// line is the beginning of a line of output, at most guest.MaxWaitLine bytes.
type line struct{ text []byte }

func (l *line) empty() bool { return len(l.text) == 0 }

// add appends output. It calls each with every line that this completes, until each returns
// true, and returns the last result.
func (l *line) add(output []byte, each func(text []byte) bool) bool {
	for {
		part, rest, complete := bytes.Cut(output, []byte{'\n'})
		l.text = append(l.text, part[:min(len(part), guest.MaxWaitLine-len(l.text))]...)
		if !complete {
			return false
		}
		if each(l.text) {
			return true
		}
		l.text, output = l.text[:0], rest
	}
}

// plain returns a line as a terminal would show it: without escape sequences, such as colors,
// which may be in the middle of a word, and without the carriage return at its end.
func plain(text []byte) string {
	if bytes.IndexByte(text, 0x1B) >= 0 {
		var state escapes
		shown := make([]byte, 0, len(text))
		for _, b := range text {
			before := state
			if state = state.next(b); before == escNone && state == escNone {
				shown = append(shown, b)
			}
		}
		text = shown
	}
	return strings.ToValidUTF8(string(bytes.TrimRight(text, "\r")), "?")
}
