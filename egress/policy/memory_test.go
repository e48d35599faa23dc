package policy

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	. "github.com/doze-run/doze/egress/internal/wat"
)

func TestMemoryGrowsInPlace(t *testing.T) {
	var m memory
	b := m.Allocate(pageSize, 16<<20).Reallocate(pageSize)
	b[0], b[pageSize-1] = 1, 2
	grown := m.Reallocate(3 * pageSize)
	if len(grown) != 3*pageSize || &grown[0] != &b[0] || grown[pageSize-1] != 2 {
		t.Errorf("it grew to %d bytes, elsewhere, or changed", len(grown))
	}
	if rest := grown[pageSize:]; !bytes.Equal(rest, make([]byte, len(rest))) {
		t.Error("new memory is not zero")
	}
	if m.Reallocate(16<<20) == nil || m.Reallocate(16<<20+1) != nil {
		t.Error("its limit is not where it should be")
	}
	m.Free()
	m.Free()
	if m.Reallocate(1) != nil {
		t.Error("it can be used after its end")
	}
	none := new(memory)
	if b := none.Allocate(0, 0).Reallocate(0); len(b) > 0 || none.mapped != nil || none.Reallocate(1) != nil {
		t.Error("a memory of nothing has something")
	}
}

// If memory is exhausted, the guest fails, not the node.
func TestWhatHasNoMemoryDoesNotStart(t *testing.T) {
	defer func() {
		if f, ok := recover().(*failure); !ok || !strings.Contains(f.reason, "no memory") {
			t.Errorf("got %v", f)
		}
	}()
	new(memory).Allocate(1, 1<<62)
	t.Error("there were 4 EiB")
}

// The memory of an instance whose start fails must be released, too: wazero does not
// release it.
func TestMemoryIsReleased(t *testing.T) {
	h := newHost(t, nil)
	starts := compile(t, h, "responder", responder())
	fails := compile(t, h, "hostile", Assembly{Pages: 1, Start: 1, Funcs: []Func{
		{Export: "handle_request", Results: []byte{I64}, Body: pass},
		{Body: trap},
		{Export: "handle_response", Params: []byte{I32, I32}, Body: none},
	}}.Binary())
	before := mapped(t)
	const times = 1000
	for range times {
		p, err := starts.Configure(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		p.Release()
		if p, err := fails.Configure(t.Context(), nil); err == nil {
			p.Release()
			t.Fatal("it starts")
		}
	}
	if grown := mapped(t) - before; grown > times/4*h.config.MemoryLimit {
		t.Errorf("%d starts have left %d MiB", 2*times, grown>>20)
	}
}

// A guest that starts while its host is closed retains its memory until it ends.
func TestHostIsClosedWhileAGuestStarts(t *testing.T) {
	runs := make(lines, 1)
	h := newHost(t, func(c *Config) {
		c.StartLimit = 100 * time.Millisecond
		c.Log = slog.New(slog.NewTextHandler(runs, nil))
	})
	m := Handler(imported("log"), "x", pass, none)
	m.Funcs = append(m.Funcs, Func{Export: "_initialize", Body: Code(
		I32Const(1), I32Const(0), I32Const(1), Call(0),
		Loop, I32Const(0), I32Const(7), I32Const(60000), Fill, Br(0), End, End)})
	slow := compile(t, h, "slow", m.Binary())
	configured := make(chan error, 1)
	go func() {
		_, err := slow.Configure(t.Context(), nil)
		configured <- err
	}()
	<-runs
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	var failed *StartError
	if err := <-configured; !errors.As(err, &failed) {
		t.Errorf("got %v", err)
	}
}

// lines receives log lines, and drops them when it is full.
type lines chan []byte

func (l lines) Write(b []byte) (int, error) {
	select {
	case l <- b:
	default:
	}
	return len(b), nil
}

// mapped returns the size of the process's address space, in bytes.
func mapped(t *testing.T) int {
	t.Helper()
	statm, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	size, _, _ := strings.Cut(string(statm), " ")
	pages, err := strconv.Atoi(size)
	if err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize()
}
