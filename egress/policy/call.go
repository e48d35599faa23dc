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

// phase is the phase of a call. It decides which operations a guest may perform.
type phase int

const (
	starting phase = iota
	beforeNext
	afterNext
)

// Features that a guest may enable. http-wasm defines the first three.
const (
	bufferRequest  = 1 << 0
	bufferResponse = 1 << 1
	trailers       = 1 << 2
	// requestOnly is doze's own: handle_response need not be called, and the instance
	// can serve other exchanges as soon as handle_request has returned.
	requestOnly = 1 << 16

	allFeatures = bufferRequest | bufferResponse | trailers | requestOnly
)

// call holds the state that host functions need of an instance's current exchange.
// It is the context of the guest's functions, which wazero passes on unchanged.
type call struct {
	context.Context // never ends; wazero reads its values when it makes an instance
	instance        *instance
	memory          api.Memory
	phase           phase
	features        uint32

	limit time.Duration
	spent time.Duration // of limit
	last  time.Time     // time up to which spent is counted
	calls uint32        // of host functions

	chain     *Chain
	secrets   secret.Source
	namespace string
	writer    http.ResponseWriter
	r         *http.Request
	denied    *Denial
	weights   [4]weight // by kind of header, of the phase
	body      body      // of the request
	own       response  // the guest's own response, before next
	signs     int       // signatures made or attempted
	buffer    *recorder // of the upstream's response; nil: it streams
}

func (c *call) begin(i *instance, limit time.Duration) {
	*c = call{Context: context.Background(), instance: i, features: i.features, limit: limit}
}

// run starts a phase, with its clock.
func (c *call) run(p phase) {
	c.phase, c.weights = p, [4]weight{} // a response that was buffered has another header
	c.spent, c.last = 0, time.Now()
}

// maxBetween is the longest time between two ticks that counts as the guest's. Ticks come
// every 100 µs or so while a guest runs. A longer gap means that the node had no
// processor for the guest, which must not deny the request.
const maxBetween = time.Millisecond

// enter is called for each host function. Guests that only call host functions get here
// before they reach a tick of their own.
func (c *call) enter() {
	if c.calls++; c.calls%16 == 0 { // reading the clock costs as much as a small function
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

// wait runs f without counting its time as the guest's.
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

// fail ends the guest because of a forbidden operation.
func fail(format string, args ...any) { failWith(problem.PolicyFailed, format, args...) }

// failWith ends the guest with the code of the refusal.
func failWith(code problem.Code, format string, args ...any) {
	panic(&failure{fmt.Sprintf(format, args...), code})
}

// exited is the error of a guest that ended itself.
type exited struct{ code uint32 }

func (e *exited) Error() string { return fmt.Sprintf("it ended itself with code %d", e.code) }

const (
	maxReason = 512     // bytes
	maxDetail = 6 << 10 // bytes
)

// denial returns the denial of an exchange whose guest failed with err.
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
		if output := i.output.reason(); output != "" {
			d.Reason += ": " + output
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
	return strings.TrimSuffix(line, " (recovered by wazero)")
}

// inExchange ends a guest that accesses the exchange while it starts.
func (c *call) inExchange() {
	if c.phase == starting {
		fail("it accessed a request while it was starting")
	}
}

// bytes returns a part of the guest's memory, valid until the guest continues.
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

// string returns a copy of a string in the guest's memory, truncated to limit+1 bytes:
// the extra byte shows that it is too long, without copying all of it.
func (c *call) string(at, n uint64, limit int) string {
	b := c.bytes(at, n)
	return string(b[:min(len(b), limit+1)])
}

// steps calls f with parts of b of at most size bytes, and counts the time. f should take
// 100 µs or so for a part.
func (c *call) steps(b []byte, size int, f func(part []byte)) {
	for part := range slices.Chunk(b, size) {
		f(part)
		c.tick()
	}
}

// write writes a value to the guest's memory if it fits, and returns its length either way.
func write[T string | []byte](c *call, v T, at, limit uint64) uint64 {
	if uint64(len(v)) <= uint64(uint32(limit)) {
		copy(c.bytes(at, uint64(len(v))), v)
	}
	return uint64(len(v))
}

// writeList writes strings with a NUL after each, and returns count<<32 | length.
func (c *call) writeList(list []string, at, limit uint64) uint64 {
	length := len(list)
	for _, s := range list {
		length += len(s)
	}
	if uint64(length) <= uint64(uint32(limit)) {
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
