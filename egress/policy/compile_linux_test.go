package policy

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/doze-run/doze/egress/internal/wat"
	"github.com/doze-run/doze/testkit"
)

// hostileModules returns modules of some 100 kB that are expensive to compile, each for a
// different reason.
func hostileModules() map[string]Assembly {
	const n = 20_000
	repeat := func(code []byte, times int) []byte { return bytes.Repeat(code, times) }
	i32s := func(n int) []byte { return repeat([]byte{I32}, n) }
	function := func(f Func) Assembly {
		m := Handler(nil, "", pass, none)
		m.Funcs = append(m.Funcs, f)
		return m
	}
	condition := Code(LocalGet(0), BrIf(0))
	wide := Handler(nil, "", pass, none)
	wide.Funcs = append(wide.Funcs, Func{Params: i32s(1000), Results: i32s(1000), Body: Code(func() (all []byte) {
		for i := range 1000 {
			all = append(all, LocalGet(i)...)
		}
		return all
	}(), repeat(Call(2), 5000), End)})
	types := Handler(nil, "", pass, none)
	for range 90 {
		types.Funcs = append(types.Funcs, Func{Params: i32s(5000), Body: End})
	}
	many := Handler(nil, "", pass, none)
	for range 9000 {
		many.Funcs = append(many.Funcs, Func{Params: i32s(1), Body: Code(repeat(Code(Block, condition, End), 10), End)})
	}
	return map[string]Assembly{
		"nested blocks":            function(Func{Params: i32s(1), Body: Code(repeat(Block, 5*n), repeat(End, 5*n), End)}),
		"nested blocks with exits": function(Func{Params: i32s(1), Body: Code(repeat(Code(Block, condition), n), repeat(End, n), End)}),
		"nested loops":             function(Func{Params: i32s(1), Body: Code(repeat(Code(Loop, condition), n), repeat(End, n), End)}),
		"nested conditions":        function(Func{Params: i32s(1), Body: Code(repeat(Code(LocalGet(0), If), n), repeat(End, n), End)}),
		"exits to the outermost": function(Func{Params: i32s(1), Body: Code(repeat(Block, n),
			repeat(Code(LocalGet(0), BrIf(n-1)), n), repeat(End, n), End)}),
		"values that live across blocks": function(Func{Params: i32s(1), Results: i32s(1), Body: Code(
			repeat(Code(LocalGet(0), Load(0)), n), repeat(Code(Block, condition, End), n), repeat(Add, n-1), End)}),
		"one expression":         function(Func{Params: i32s(1), Results: i32s(1), Body: Code(repeat(LocalGet(0), 5*n), repeat(Add, 5*n-1), End)}),
		"a table of branches":    function(Func{Params: i32s(1), Body: Code(repeat(Block, n), LocalGet(0), BrTable(n), repeat(End, n), End)}),
		"calls with many values": wide,
		"types of many values":   types,
		"many functions":         many,
	}
}

// refused are the modules that exceed the compiler's limits. Each would take minutes, or
// more memory than is available.
var refused = []string{"nested blocks", "nested blocks with exits", "nested loops", "exits to the outermost", "values that live across blocks", "calls with many values"}

func TestCompilingIsBoundedInTimeAndMemory(t *testing.T) {
	h := newHost(t, func(c *Config) { c.CacheDir, c.CompileLimit, c.CompileMemory = "", 2*time.Second, 256<<20 })
	for name, m := range hostileModules() {
		t.Run(name, func(t *testing.T) {
			wasm := m.Binary()
			c, err := h.Compile(t.Context(), "hostile", wasm)
			if err == nil {
				c.Release()
			}
			var unusable *CompileError
			switch {
			case err != nil && (!errors.As(err, &unusable) || !strings.Contains(err.Error(), "compiling it takes more than")):
				t.Errorf("%d bytes: got %v", len(wasm), err)
			case err == nil && slices.Contains(refused, name):
				t.Errorf("%d bytes: it was compiled", len(wasm))
			}
		})
	}
}

// A refused module is refused again without the compiler.
func TestRefusedModulesAreNotCompiledAgain(t *testing.T) {
	h := newHost(t, nil)
	wasm := Handler(nil, "", Code(I32Const(1), End), none).Binary() // of another type than its result
	_, first := h.Compile(t.Context(), "first", wasm)
	ended, cancel := context.WithCancel(t.Context()) // ends a compiler
	cancel()
	_, second := h.Compile(ended, "second", wasm)
	if first == nil || second == nil || strings.ReplaceAll(first.Error(), "first", "second") != second.Error() {
		t.Errorf("got %v, then %v", first, second)
	}
}

func TestCancelingCompileEndsTheCompiler(t *testing.T) {
	h := newHost(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error)
	go func() { // ends with ctx
		_, err := h.Compile(ctx, "hostile", hostileModules()["nested blocks"].Binary())
		ended <- err
	}()
	testkit.Eventually(t, "a compiler to run", func() bool { return len(h.compiling) > 0 })
	// Other modules compile meanwhile.
	compile(t, h, "other", responder()).Release()
	select {
	case err := <-ended:
		t.Errorf("it was compiled before the other: %v", err)
	default:
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	}
	if n := len(h.compiling); n != 0 {
		t.Errorf("%d compilers run", n)
	}
}

// Two concurrent pushes of the same module compile it once. The second must not fail if
// the first is canceled.
func TestTheSameBytesAreCompiledOnceAtATime(t *testing.T) {
	h := newHost(t, nil)
	wasm := hostileModules()["nested blocks"].Binary()
	first, cancelFirst := context.WithCancel(t.Context())
	second, cancelSecond := context.WithCancel(t.Context())
	ended := make(chan error)
	for _, ctx := range []context.Context{first, second} {
		go func() { // ends with ctx
			_, err := h.Compile(ctx, "hostile", wasm)
			ended <- err
		}()
	}
	testkit.Eventually(t, "a compiler to run", func() bool { return len(h.compiling) > 0 })
	if n := len(h.compiling); n != 1 {
		t.Errorf("%d compilers run", n)
	}
	cancelFirst()
	<-ended
	cancelSecond()
	<-ended
	compile(t, h, "other", responder()).Release()
}
