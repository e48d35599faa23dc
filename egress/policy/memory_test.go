package policy

import (
	"bytes"
	"errors"
	"log/slog"
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
func TestExhaustedMemoryFailsTheGuest(t *testing.T) {
	defer func() {
		if f, ok := recover().(*failure); !ok || !strings.Contains(f.reason, "no memory") {
			t.Errorf("got %v", f)
		}
	}()
	new(memory).Allocate(1, 1<<62)
	t.Error("there were 4 EiB")
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
