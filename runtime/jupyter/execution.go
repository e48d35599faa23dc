package jupyter

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// Kind of an Event.
type Kind int

const (
	Stdout   Kind = iota + 1 // Text
	Stderr                   // Text
	Result                   // Result
	Clear                    // the output so far is to be removed, now or, with Wait, before the next one
	Failed                   // Error: the code raised an exception
	Complete                 // Count: the code has ended
)

// Event is one thing that the execution of code produced.
type Event struct {
	Kind   Kind
	Text   string
	Result *Rich
	Wait   bool
	Error  *Exception
	Count  int // of executions of this kernel, from 1; 0 if unknown
	// Truncated, with Complete: output was dropped.
	Truncated bool
}

// Rich is a value in every form that it offers.
type Rich struct {
	// Data by MIME type: a JSON string, with base64 for binary types, or any JSON value for types
	// of JSON.
	Data     map[string]json.RawMessage
	Metadata map[string]json.RawMessage
	// Main: it is the value of the last expression.
	Main bool
	// DisplayID names a value that an Event with Update replaces later.
	DisplayID string
	Update    bool
}

// Exception is an error of the code.
type Exception struct {
	Name, Message string
	Traceback     []string // without colors
}

// Bounds of what one event holds.
const (
	maxForms     = 64       // MIME types, or entries of metadata, of one value
	maxName      = 256      // bytes of a MIME type, a display id, or the name of an exception
	maxMessage   = 64 << 10 // bytes of the message of an exception
	maxTraceback = 1000     // lines
	maxTraced    = 256 << 10
	// eventCost is what an event without content counts: its memory.
	eventCost = 128
)

// Execution is code that a kernel executes.
type Execution struct {
	k     *Kernel
	id    string
	flush string // id of the request that flushes the output, and type of what it publishes; "" if there is none
	limit int
	done  chan struct{} // closed when it has ended

	mu          sync.Mutex // guards:
	queue       []Event
	held        int           // bytes in queue
	changed     chan struct{} // holds one element after a change of the queue or the end
	discard     bool          // the caller reads no more
	truncated   bool
	interrupted bool
	// interrupting counts the interrupts that are being sent. They must not reach the next
	// execution, which begins after them.
	interrupting int
	failed       bool // an exception was published
	succeeded    bool // according to the reply
	replied      bool
	idle         bool // after the last request
	flushed      bool
	complete     Event
	timer        *time.Timer // after the first of the messages that end it
}

// Options of an execution.
type Options struct {
	// Silent: the code has no results and does not count as an execution.
	Silent bool
	// Limit of the bytes that wait to be read by Next. More output is dropped, so that a slow
	// reader does not stall the kernel.
	Limit int
	// Flush returns code that publishes a message of that type and raises no exception. It is for
	// a kernel that publishes all output in order, but perhaps after it is idle, and perhaps with
	// the next request as its parent: this message is then the last. Nil: the kernel publishes output
	// before it is idle.
	Flush func(messageType string) string
}

// FlushDeno is Options.Flush of Deno: a task publishes output and values while others reply and
// publish that the kernel is idle (cli/js/jupyter_kernel.js of Deno 2.9, iopubDrainer).
func FlushDeno(messageType string) string {
	return fmt.Sprintf("try { globalThis.Deno.jupyter.broadcast(%q, {}) } catch {}", messageType)
}

// Execute sends code to the kernel. It waits until the kernel has executed the code before it,
// or ctx ends. The caller reads the events with Next, or calls Discard.
func (k *Kernel) Execute(ctx context.Context, code string, o Options) (*Execution, error) {
	select {
	case k.slot <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-k.done:
		return nil, k.lost()
	}
	x := &Execution{k: k, id: rand.Text(), limit: o.Limit, done: make(chan struct{}), changed: make(chan struct{}, 1)}
	x.complete.Kind = Complete
	if x.flushed = o.Flush == nil; !x.flushed {
		x.flush = rand.Text()
	}
	k.mu.Lock()
	k.current = x
	k.mu.Unlock()
	err := k.requestExecution(ctx, x.id, code, o.Silent)
	if err == nil && o.Flush != nil {
		err = k.requestExecution(ctx, x.flush, o.Flush(x.flush), true)
	}
	if err != nil {
		x.end()
		return nil, err
	}
	return x, nil
}

func (k *Kernel) requestExecution(ctx context.Context, id, code string, silent bool) error {
	return k.request(ctx, id, typeExecute, map[string]any{
		"code": code, "silent": silent, "store_history": !silent, "user_expressions": struct{}{}, "allow_stdin": false, "stop_on_error": false,
	})
}

// Next returns the next event. After Complete it must not be called. Errors: ctx's, ErrLost.
func (x *Execution) Next(ctx context.Context) (Event, error) {
	for {
		if ev, ok := x.dequeue(); ok {
			return ev, nil
		}
		select {
		case <-x.changed:
		case <-ctx.Done():
			return Event{}, ctx.Err()
		case <-x.k.done:
			if ev, ok := x.dequeue(); ok {
				return ev, nil
			}
			return Event{}, x.k.lost()
		}
	}
}

// dequeue removes the first event from the queue. The last is Complete.
func (x *Execution) dequeue() (Event, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.queue) > 0 {
		ev := x.queue[0]
		x.queue = x.queue[1:]
		x.held -= ev.size()
		return ev, true
	}
	select {
	case <-x.done:
		x.complete.Truncated = x.truncated
		return x.complete, true
	default:
		return Event{}, false
	}
}

// Done is closed when the kernel has executed the code.
func (x *Execution) Done() <-chan struct{} { return x.done }

// Discard drops all further output: the caller does not call Next again.
func (x *Execution) Discard() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.discard, x.queue, x.held = true, nil, 0
}

// Interrupt makes the kernel interrupt the code, as Ctrl-C does, and returns when it has received
// the request. When the code has ended, it does nothing.
func (x *Execution) Interrupt(ctx context.Context) error {
	x.mu.Lock()
	if x.hasEnded() {
		x.mu.Unlock()
		return nil
	}
	x.interrupted = true
	x.interrupting++
	x.mu.Unlock()
	err := Interrupt(ctx, x.k.connection, x.k.dial, x.k.limits)
	x.mu.Lock()
	x.interrupting--
	last := x.interrupting == 0 && x.hasEnded()
	x.mu.Unlock()
	if last {
		<-x.k.slot
	}
	return err
}

func (x *Execution) hasEnded() bool {
	select {
	case <-x.done:
		return true
	default:
		return false
	}
}

func (x *Execution) truncate() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.truncated = true
}

// end ends the execution; the kernel accepts the next. Only the first call does anything.
func (x *Execution) end() {
	x.mu.Lock()
	if x.hasEnded() {
		x.mu.Unlock()
		return
	}
	if x.interrupted && !x.failed && !x.succeeded && !x.discard { // some kernels report no exception
		x.queue = append(x.queue, Event{Kind: Failed, Error: &Exception{Name: "Interrupted", Message: "the code was interrupted", Traceback: []string{}}})
	}
	close(x.done)
	if x.timer != nil {
		x.timer.Stop()
	}
	interrupting := x.interrupting > 0
	x.mu.Unlock()
	x.notify()
	x.k.mu.Lock()
	x.k.current = nil
	x.k.mu.Unlock()
	if !interrupting {
		<-x.k.slot
	}
}

func (x *Execution) notify() {
	select {
	case x.changed <- struct{}{}:
	default:
	}
}

// settle ends the execution when the kernel has replied, has flushed its output and has
// published that it is idle. One of these messages may be lost.
func (x *Execution) settle() {
	x.mu.Lock()
	all := x.replied && x.flushed && x.idle
	if !all && x.timer == nil {
		x.timer = time.AfterFunc(lastMessage, x.endIncomplete)
	}
	x.mu.Unlock()
	if all {
		x.end()
	}
}

// endIncomplete ends the execution without its last messages.
func (x *Execution) endIncomplete() {
	x.mu.Lock()
	x.truncated = x.truncated || !x.idle || !x.flushed
	x.mu.Unlock()
	x.end()
}

func (x *Execution) onReply(m Message) error {
	if m.Parent.ID != x.id {
		return nil
	}
	var reply struct {
		Status string `json:"status"`
		Count  int    `json:"execution_count"`
	}
	if err := decodeContent(m, &reply); err != nil {
		return err
	}
	x.mu.Lock()
	x.complete.Count, x.succeeded, x.replied = max(0, reply.Count), reply.Status == "ok", true
	x.mu.Unlock()
	x.settle()
	return nil
}

func (x *Execution) onPublished(m Message) error {
	if x.flush != "" && m.Header.Type == x.flush {
		x.mu.Lock()
		x.flushed = true
		x.mu.Unlock()
		x.settle()
		return nil
	}
	switch m.Header.Type {
	case typeStatus:
		var status struct {
			State string `json:"execution_state"`
		}
		if err := decodeContent(m, &status); err != nil {
			return err
		}
		if status.State == "idle" && m.Parent.ID == cmp.Or(x.flush, x.id) {
			x.mu.Lock()
			x.idle = true
			x.mu.Unlock()
			x.settle()
		}
	case typeStream:
		var stream struct{ Name, Text string }
		if err := decodeContent(m, &stream); err != nil {
			return err
		}
		kind := Stdout
		if stream.Name == "stderr" {
			kind = Stderr
		}
		if stream.Text != "" {
			x.add(Event{Kind: kind, Text: stream.Text})
		}
	case typeResult, typeDisplay, typeUpdate:
		rich, err := richOf(m)
		if err != nil {
			return err
		}
		x.add(Event{Kind: Result, Result: rich})
	case typeClear:
		var clear struct{ Wait bool }
		if err := decodeContent(m, &clear); err != nil {
			return err
		}
		x.add(Event{Kind: Clear, Wait: clear.Wait})
	case typeError:
		var raised struct {
			Name      string    `json:"ename"`
			Value     string    `json:"evalue"`
			Traceback traceback `json:"traceback"`
		}
		if err := decodeContent(m, &raised); err != nil {
			return err
		}
		x.add(Event{Kind: Failed, Error: exceptionOf(raised.Name, raised.Value, raised.Traceback)})
	}
	return nil
}

// decodeContent decodes the content of a message, with replacements for invalid UTF-8.
func decodeContent(m Message, to any) error {
	content := []byte(m.Content)
	if !utf8.Valid(content) {
		content = bytes.ToValidUTF8(content, []byte("\uFFFD"))
	}
	if err := json.Unmarshal(content, to); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrMalformed, cut(m.Header.Type, maxName), err)
	}
	return nil
}

func richOf(m Message) (*Rich, error) {
	var value struct {
		Data      forms `json:"data"`
		Metadata  forms `json:"metadata"`
		Transient struct {
			DisplayID string `json:"display_id"`
		} `json:"transient"`
	}
	if err := decodeContent(m, &value); err != nil {
		return nil, err
	}
	for mime, data := range value.Data {
		if strings.HasPrefix(mime, "image/") && mime != "image/svg+xml" {
			value.Data[mime] = withoutNewlines(data)
		}
	}
	return &Rich{
		Data: value.Data, Metadata: value.Metadata, Main: m.Header.Type == typeResult,
		DisplayID: cut(value.Transient.DisplayID, maxName), Update: m.Header.Type == typeUpdate,
	}, nil
}

// forms are values by name. Decoding stops at the first beyond the bounds: a message holds
// more entries than fit into memory.
type forms map[string]json.RawMessage

func (f *forms) UnmarshalJSON(b []byte) error {
	return decodeEntries(b, '{', func(d *json.Decoder, n int) error {
		name, err := d.Token()
		if err != nil {
			return err
		}
		text := name.(string) // names of an object are strings
		if n == maxForms || len(text) > maxName {
			return fmt.Errorf("more than %d values, or a name of more than %d bytes", maxForms, maxName)
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return err
		}
		if *f == nil {
			*f = forms{}
		}
		(*f)[text] = value
		return nil
	})
}

// traceback has the first entries of a traceback.
type traceback []string

func (t *traceback) UnmarshalJSON(b []byte) error {
	err := decodeEntries(b, '[', func(d *json.Decoder, n int) error {
		var entry string
		if err := d.Decode(&entry); err != nil {
			return err
		}
		if *t = append(*t, entry); n+1 == maxTraceback {
			return io.EOF
		}
		return nil
	})
	if err == io.EOF {
		return nil
	}
	return err
}

// decodeEntries calls decode for the entries of an object or an array; null has none. It returns
// the first error of decode.
func decodeEntries(b []byte, begin json.Delim, decode func(d *json.Decoder, n int) error) error {
	d := json.NewDecoder(bytes.NewReader(b))
	switch token, err := d.Token(); {
	case err != nil || token == nil:
		return err
	case token != begin:
		return fmt.Errorf("%v where %v is expected", token, begin)
	}
	for n := 0; d.More(); n++ {
		if err := decode(d, n); err != nil {
			return err
		}
	}
	return nil
}

// withoutNewlines removes the newlines of base64, which kernels add at its end or in each line.
func withoutNewlines(data json.RawMessage) json.RawMessage {
	var text string
	if !bytes.Contains(data, []byte(`\n`)) || json.Unmarshal(data, &text) != nil {
		return data
	}
	b, err := json.Marshal(strings.ReplaceAll(text, "\n", ""))
	if err != nil {
		panic(err) // of a string
	}
	return b
}

// colors are the escape sequences of terminals in tracebacks.
var colors = regexp.MustCompile("\x1b\\[[0-9;]*[A-Za-z]")

func exceptionOf(name, message string, traceback []string) *Exception {
	e := &Exception{Name: cut(name, maxName), Message: cut(message, maxMessage), Traceback: []string{}}
	left := maxTraced
	for _, entry := range traceback {
		for line := range strings.SplitSeq(colors.ReplaceAllString(entry, ""), "\n") {
			if left -= len(line) + 1; left < 0 || len(e.Traceback) == maxTraceback {
				return e
			}
			e.Traceback = append(e.Traceback, strings.Clone(line)) // without the rest of the entry
		}
	}
	return e
}

// cut returns the beginning of s, at most n bytes, without a part of a rune.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.Clone(strings.ToValidUTF8(s[:n], "")) // without the rest of s
}

// Size returns the memory that the value takes, in bytes.
func (r *Rich) Size() int {
	n := eventCost + len(r.DisplayID)
	for _, forms := range []map[string]json.RawMessage{r.Data, r.Metadata} {
		for name, data := range forms {
			n += eventCost + len(name) + len(data)
		}
	}
	return n
}

// size returns what an event counts in the limit.
func (ev *Event) size() int {
	n := eventCost + len(ev.Text)
	if ev.Result != nil {
		n += ev.Result.Size()
	}
	if ev.Error != nil {
		n += len(ev.Error.Name) + len(ev.Error.Message)
		for _, line := range ev.Error.Traceback {
			n += eventCost + len(line)
		}
	}
	return n
}

// errorReserve is what an exception may exceed the limit by, so that the reason is not dropped
// with the output.
const errorReserve = maxName + maxMessage + maxTraced + (maxTraceback+1)*eventCost

// add queues an event, or drops it, whole or in part, if the reader is too far behind.
func (x *Execution) add(ev Event) {
	defer x.notify()
	x.mu.Lock()
	defer x.mu.Unlock()
	x.failed = x.failed || ev.Kind == Failed
	if x.discard {
		return
	}
	limit := x.limit
	if ev.Kind == Failed {
		limit += errorReserve
	}
	if size := ev.size(); x.held+size > limit {
		x.truncated = true
		if room := limit - x.held - eventCost; ev.Text != "" && room > 0 {
			ev.Text = cut(ev.Text, room)
		} else {
			return
		}
	}
	if last := len(x.queue) - 1; ev.Text != "" && last >= 0 && x.queue[last].Kind == ev.Kind && len(x.queue[last].Text)+len(ev.Text) <= maxJoined {
		x.queue[last].Text += ev.Text
		x.held += len(ev.Text)
		return
	}
	x.queue = append(x.queue, ev)
	x.held += ev.size()
}

// maxJoined bounds the text of events that are joined while the reader is behind.
const maxJoined = 64 << 10
