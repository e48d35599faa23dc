package policy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/tetratelabs/wazero/api"

	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/problem"
)

// phase of a call: what a guest may do depends on it.
type phase int

const (
	starting phase = iota
	beforeNext
	afterNext
)

// Features that a guest may enable. The first three are those of http-wasm.
const (
	bufferRequest  = 1 << 0
	bufferResponse = 1 << 1
	trailers       = 1 << 2
	// requestOnly is ours: handle_response needs not be called, and the instance
	// is free for others as soon as handle_request has returned.
	requestOnly = 1 << 16

	allFeatures = bufferRequest | bufferResponse | trailers | requestOnly
)

// call is what host functions know of the exchange that an instance is part of.
// It is the context of the guest's functions; wazero hands it on as it is.
type call struct {
	instance *instance
	memory   api.Memory
	found    context.Context // what Value finds; nil: nothing
	phase    phase
	features uint32

	limit time.Duration
	spent time.Duration // of limit
	last  time.Time     // to which spent is known
	calls uint32        // of host functions

	chain     *Chain
	secrets   secret.Source
	namespace string
	writer    http.ResponseWriter
	r         *http.Request
	denied    *Denial
	header    guard     // of the request, and of the response
	body      body      // of the request
	own       answer    // the guest's, before next
	signs     int       // that were made or tried
	buffer    *recorder // of the upstream's answer; nil: it streams
}

// Deadline, Done, Err and Value make a call a context that never ends. Its values
// are what wazero looks for when an instance is made.
func (c *call) Deadline() (time.Time, bool) { return time.Time{}, false }
func (c *call) Done() <-chan struct{}       { return nil }
func (c *call) Err() error                  { return nil }

func (c *call) Value(key any) any {
	if c.found == nil {
		return nil
	}
	return c.found.Value(key)
}

func (c *call) begin(i *instance, limit time.Duration) {
	*c = call{instance: i, features: i.features, limit: limit, secrets: noSecrets{}}
}

// run starts the clock of a phase.
func (c *call) run(p phase) {
	c.phase = p
	c.spent, c.last = 0, time.Now()
}

// maxBetween is the longest time between two ticks that counts as the guest's.
// Ticks come every 100 µs or so while a guest runs: what takes longer was the
// node's, which had no processor for it, and is no reason to deny anything.
const maxBetween = time.Millisecond

// enter is called for each host function. Guests that do nothing but call them
// come here before they come to a tick of their own.
func (c *call) enter() {
	if c.calls++; c.calls%16 == 0 { // the clock costs as much as a small function
		c.tick()
	}
}

// tick ends the guest when its time is used up.
func (c *call) tick() {
	now := time.Now()
	c.spent += min(now.Sub(c.last), maxBetween)
	c.last = now
	if c.spent > c.limit {
		fail("it took longer than %v", c.limit)
	}
}

// wait runs f, whose time is not the guest's.
func (c *call) wait(f func()) {
	c.tick()
	defer func() { c.last = time.Now() }()
	f()
}

// failure ends a guest from within a host function.
type failure struct {
	reason string
	code   problem.Code // of the refusal
}

func (f *failure) Error() string { return f.reason }

// fail ends the guest, which did something that it may not do.
func fail(format string, args ...any) { failWith(problem.PolicyFailed, format, args...) }

// failWith ends the guest with the code of the refusal.
func failWith(code problem.Code, format string, args ...any) {
	panic(&failure{fmt.Sprintf(format, args...), code})
}

// exited is a guest that ended itself.
type exited struct{ code uint32 }

func (e *exited) Error() string { return fmt.Sprintf("it ended itself with code %d", e.code) }

const (
	maxReason = 512     // bytes
	maxDetail = 6 << 10 // bytes
)

// denial of the exchange because the guest failed.
func (i *instance) denial(err error) *Denial {
	i.output.flush(i.call.chain)
	d := &Denial{Policy: i.policy.name, Code: problem.PolicyFailed}
	f := (*failure)(nil)
	switch {
	case errors.As(err, &f) && f.code == problem.SecretNotAllowed:
		d.Reason, d.Code = f.reason, f.code
	case f != nil:
		d.Reason, d.Code = "the policy was stopped: "+f.reason, f.code
	default:
		d.Reason = "the policy failed: " + firstLine(err.Error())
		if said := i.output.reason(); said != "" {
			d.Reason += ": " + said
		}
	}
	d.Reason = printable(d.Reason, maxReason)
	detail := err.Error()
	if len(i.output.tail) > 0 {
		detail += "\nlast output:\n" + string(i.output.tail)
	}
	d.Detail = strings.ToValidUTF8(detail[:min(len(detail), maxDetail)], "\uFFFD")
	return d
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	line = strings.TrimSuffix(line, " (recovered by wazero)")
	return line
}

// inExchange ends a guest that asks for what does not exist yet.
func (c *call) inExchange() {
	if c.phase == starting {
		fail("it asked for a request while it was starting")
	}
}

// bytes of the guest's memory, valid until the guest goes on.
func (c *call) bytes(at, n uint64) []byte {
	if uint32(n) == 0 {
		return nil
	}
	b, ok := c.memory.Read(uint32(at), uint32(n))
	if !ok {
		fail("it passed a pointer that is not in its memory")
	}
	return b
}

// string of the guest's memory. Of one that is longer than limit there is one byte
// more than that: so much shows that it is too long, and costs nothing.
func (c *call) string(at, n uint64, limit int) string {
	b := c.bytes(at, n)
	return string(b[:min(len(b), limit+1)])
}

// maxStep is how many bytes of a guest's memory a function of the host works on
// before it looks at the clock: they take some 100 µs.
const maxStep = 64 << 10

// steps calls f with parts of b, and counts the time.
func (c *call) steps(b []byte, f func(part []byte)) {
	for part := range slices.Chunk(b, maxStep) {
		f(part)
		c.tick()
	}
}

// give writes a value if it fits, and returns its length either way.
func (c *call) give(v string, at, limit uint64) uint64 {
	if len(v) > 0 && uint64(len(v)) <= uint64(uint32(limit)) && !c.memory.WriteString(uint32(at), v) {
		fail("it passed a pointer that is not in its memory")
	}
	return uint64(len(v))
}

// give for bytes.
func (c *call) giveBytes(v []byte, at, limit uint64) uint64 {
	if len(v) > 0 && uint64(len(v)) <= uint64(uint32(limit)) && !c.memory.Write(uint32(at), v) {
		fail("it passed a pointer that is not in its memory")
	}
	return uint64(len(v))
}

// giveList writes strings with a NUL after each, and returns count<<32 | length.
func (c *call) giveList(list []string, at, limit uint64) uint64 {
	length := len(list)
	for _, s := range list {
		length += len(s)
	}
	if length > 0 && uint64(length) <= uint64(uint32(limit)) {
		b := c.bytes(at, uint64(length))
		for _, s := range list {
			n := copy(b, s)
			b[n] = 0
			b = b[n+1:]
		}
	}
	return uint64(len(list))<<32 | uint64(uint32(length))
}

// fill reads until the buffer is full or the body ends.
func (c *call) fill(b []byte, r io.Reader) (n int, err error) {
	c.wait(func() {
		// io.ReadFull returns the same error at the end of the body and for a body that breaks off.
		for n < len(b) && err == nil {
			var more int
			more, err = r.Read(b[n:])
			n += more
		}
	})
	return n, err
}
