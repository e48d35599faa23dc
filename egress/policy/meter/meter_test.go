package meter_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"

	. "github.com/doze-run/doze/egress/internal/wat"
	"github.com/doze-run/doze/egress/policy/meter"
)

var errTick = errors.New("ticked enough")

// run calls the function `run` of a rewritten module, and ends it at a tick.
func run(t *testing.T, binary []byte, atTick int) (ticks int, result []uint64, err error) {
	t.Helper()
	m, err := meter.Instrument(binary, 256)
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	r := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfig().WithMemoryLimitPages(256))
	defer r.Close(ctx)
	_, err = r.NewHostModuleBuilder(meter.Import).NewFunctionBuilder().WithFunc(func() {
		if ticks++; ticks >= atTick {
			panic(errTick)
		}
	}).Export(meter.Tick).Instantiate(ctx)
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.NewHostModuleBuilder("env").NewFunctionBuilder().WithFunc(func(v int32) int32 { return v + 1 }).Export("increment").Instantiate(ctx)
	if err != nil {
		t.Fatal(err)
	}
	mod, err := r.Instantiate(ctx, m.Binary)
	if err != nil {
		return ticks, nil, err
	}
	result, err = mod.ExportedFunction("run").Call(ctx)
	return ticks, result, err
}

func TestEndlessCodeTicks(t *testing.T) {
	module := func(funcs ...Func) []byte {
		funcs[0].Export = "run"
		return Assembly{Pages: 256, Funcs: funcs}.Binary()
	}
	fill := Code(I32Const(0), I32Const(1), I32Const(256*65536), Fill)
	tests := map[string][]byte{
		"loop":          module(Func{Body: Code(Loop, Br(0), End, End)}),
		"empty loops":   module(Func{Body: Code(Loop, Loop, End, Br(0), End, End)}),
		"loop in block": module(Func{Body: Code(Block, Loop, Block, Br(1), End, End, End, End)}),
		// f(n) calls f(n-1) twice: 2^40 calls, at most 40 deep, and no loop.
		"recursion": module(
			Func{Body: Code(I32Const(40), Call(1), End)},
			Func{Params: []byte{I32}, Body: Code(LocalGet(0), If,
				LocalGet(0), I32Const(1), Sub, Call(1), LocalGet(0), I32Const(1), Sub, Call(1), End, End)},
		),
		// The same by way of a table.
		"indirect recursion": Assembly{Table: []int{1}, Funcs: []Func{
			{Export: "run", Body: Code(I32Const(40), Call(1), End)},
			{Params: []byte{I32}, Body: Code(LocalGet(0), If,
				LocalGet(0), I32Const(1), Sub, I32Const(0), CallIndirect(1), LocalGet(0), I32Const(1), Sub, Call(1), End, End)},
		}}.Binary(),
		// A loop stands for what its function pays, and may be the least of it.
		"code behind a loop": module(
			Func{Body: Code(bytes.Repeat(Call(1), 20), End)},
			Func{Body: Code(Loop, End, bytes.Repeat(Code(I32Const(0), Drop), 100_000), End)}),
		"code in a block behind a loop": module(
			Func{Body: Code(bytes.Repeat(Call(1), 20), End)},
			Func{Body: Code(Loop, Loop, End, End, Block, bytes.Repeat(Code(I32Const(0), Drop), 100_000), End, End)}),
		"fills in a row": module(Func{Body: append(Code(fill, fill, fill, fill, fill, fill, fill, fill), End...)}),
	}
	for name, binary := range tests {
		t.Run(name, func(t *testing.T) {
			if _, _, err := run(t, binary, 3); !errors.Is(err, errTick) {
				t.Fatalf("it ended: %v", err)
			}
		})
	}
}

// Our import moves every function. Calls, tables, exports and the start have to
// move with them.
func TestRewrittenModulesComputeTheSame(t *testing.T) {
	binary := Assembly{
		Imports: []Import{{Module: "env", Name: "increment", Params: []byte{I32}, Results: []byte{I32}}},
		Pages:   1,
		Start:   2,
		Table:   []int{0, 3},
		Funcs: []Func{
			// 1: what start stored, incremented directly and by the table, doubled.
			{Export: "run", Results: []byte{I32}, Body: Code(
				I32Const(0), Load(0), Call(0), I32Const(0), CallIndirect(0), I32Const(1), CallIndirect(0), End)},
			// 2: start
			{Body: Code(I32Const(0), I32Const(19), Store(0), End)},
			// 3: doubles, in a loop that runs once and has a local
			{Params: []byte{I32}, Results: []byte{I32}, Locals: 1, Body: Code(
				LocalGet(0), LocalSet(1), Loop, LocalGet(1), LocalGet(0), Add, LocalSet(1), End,
				I32Const(8), I32Const(0), I32Const(16), Fill, LocalGet(1), Return, End)},
		},
	}.Binary()
	_, result, err := run(t, binary, 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	if result[0] != 42 {
		t.Fatalf("got %d", result[0])
	}
}

// The rewritten module has a global more, which is what is left to spend. A module
// that names it names one that it does not have.
func TestGuestsCannotAccessTheFuel(t *testing.T) {
	const get, set = 0x23, 0x24
	for name, body := range map[string][]byte{
		"set": Code(I32Const(1<<31-1), []byte{set, 0}, End),
		"get": Code([]byte{get, 0}, Drop, End),
	} {
		m, err := meter.Instrument(Assembly{Pages: 1, Funcs: []Func{{Export: "run", Body: body}}}.Binary(), 256)
		if err == nil || !strings.Contains(err.Error(), "unknown global 0") {
			t.Errorf("%s: %v, %v", name, m, err)
		}
	}
}

func TestModulesBeyondALimitAreRefused(t *testing.T) {
	locals := func(groups ...byte) []byte {
		body := append(groups, End...)
		return append([]byte("\x00asm\x01\x00\x00\x00\x01\x04\x01\x60\x00\x00\x03\x02\x01\x00\x0a"),
			append([]byte{byte(len(body) + 2), 1, byte(len(body))}, body...)...)
	}
	tests := map[string]struct {
		binary []byte
		want   string
	}{
		"nothing":    {nil, "not a WebAssembly module"},
		"text":       {[]byte("#!/bin/sh\nexit 0"), "not a WebAssembly module"},
		"component":  {[]byte("\x00asm\x0d\x00\x01\x00"), "component"},
		"version":    {[]byte("\x00asm\x02\x00\x00\x00"), "version 1"},
		"cut":        {[]byte("\x00asm\x01\x00\x00\x00\x01\x40"), "ends too early"},
		"section":    {[]byte("\x00asm\x01\x00\x00\x00\x2a\x00"), "section 42"},
		"twice":      {[]byte("\x00asm\x01\x00\x00\x00\x01\x01\x00\x01\x01\x00"), "duplicate"},
		"memory":     {Assembly{Pages: 257, Funcs: []Func{{Body: End}}}.Binary(), "16448 KiB"},
		"locals":     {locals(1, 0xff, 0xff, 0xff, 0xff, 0x0f, I32), "4294967295 locals"},
		"threads":    {Assembly{Funcs: []Func{{Body: Code([]byte{0xfe, 0x03, 0x00}, End)}}}.Binary(), "not of WebAssembly 2.0"},
		"tail call":  {Assembly{Funcs: []Func{{Body: Code([]byte{0x12, 0x00}, End)}}}.Binary(), "not of WebAssembly 2.0"},
		"no end":     {Assembly{Funcs: []Func{{Body: Block}}}.Binary(), "ends too early"},
		"after end":  {Assembly{Funcs: []Func{{Body: Code(End, End)}}}.Binary(), "after its end"},
		"huge table": {[]byte("\x00asm\x01\x00\x00\x00\x04\x07\x01\x70\x00\x80\x80\x80\x7f"), "slots"},
		"functions":  {[]byte("\x00asm\x01\x00\x00\x00\x03\x05\xff\xff\xff\xff\x0f"), "4294967295 functions"},
		"work": {Assembly{Funcs: []Func{{Locals: 9000, Body: append(Code(repeat(1000, Code(I32Const(0), BrIf(0)))), End...)}}}.Binary(),
			"too large to compile"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := meter.Instrument(tt.binary, 256)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func repeat(n int, code []byte) (all []byte) {
	for range n {
		all = append(all, code...)
	}
	return all
}

func TestTablesAreBounded(t *testing.T) {
	// table.grow by a million places
	binary := []byte("\x00asm\x01\x00\x00\x00\x01\x05\x01\x60\x00\x01\x7f\x03\x02\x01\x00\x04\x04\x01\x70\x00\x00\x07\x07\x01\x03run\x00\x00")
	body := Code([]byte{0}, []byte{0xd0, 0x70}, I32Const(1_000_000), []byte{0xfc, 0x0f, 0x00}, End)
	binary = append(binary, 10, byte(len(body)+2), 1, byte(len(body)))
	_, result, err := run(t, append(binary, body...), 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	if int32(result[0]) != -1 {
		t.Fatalf("it grew from %d", result[0])
	}
}

// goModule is what the Go compiler makes, with all that a real program has.
func goModule(t testing.TB) []byte {
	t.Helper()
	file := filepath.Join(t.TempDir(), "guest.wasm")
	build := exec.Command("go", "build", "-buildmode=c-shared", "-o", file, "../../../policies/bearer")
	build.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "GOFLAGS=-buildvcs=false")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	binary, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return binary
}

func TestGoModulesStayValid(t *testing.T) {
	m, err := meter.Instrument(goModule(t), 256)
	if err != nil {
		t.Fatal(err)
	}
	compiled := validate(t, m.Binary)
	if compiled == nil {
		t.Fatal("it is not valid")
	}
	if compiled.ExportedFunctions()["handle_request"].DebugName() == ".$0" {
		t.Error("the names of functions are lost")
	}
}

func validate(t testing.TB, binary []byte) wazero.CompiledModule {
	ctx := context.Background()
	r := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfigInterpreter().WithMemoryLimitPages(256).WithCoreFeatures(api.CoreFeaturesV2))
	t.Cleanup(func() { _ = r.Close(ctx) })
	m, err := r.CompileModule(ctx, binary)
	if err != nil {
		t.Log(err)
		return nil
	}
	return m
}

func BenchmarkInstrument(b *testing.B) {
	binary := goModule(b)
	b.SetBytes(int64(len(binary)))
	for b.Loop() {
		if _, err := meter.Instrument(binary, 256); err != nil {
			b.Fatal(err)
		}
	}
}

// Whatever the bytes are, rewriting ends without a panic; and what was valid is
// valid afterwards.
func FuzzInstrument(f *testing.F) {
	f.Add(Assembly{Imports: []Import{{Module: "env", Name: "increment", Params: []byte{I32}, Results: []byte{I32}}}, Pages: 1, Table: []int{0, 1}, Data: "data",
		Funcs: []Func{{Export: "run", Locals: 2, Body: Code(Block, Loop, I32Const(1), BrIf(1), Br(0), End, End,
			I32Const(0), I32Const(0), I32Const(9), Fill, I32Const(1), Call(0), Drop, End)}}}.Binary())
	f.Add(Assembly{Pages: 1, Funcs: []Func{{Body: Code(Unreachable, Fill, RefFunc(0), Drop, End)}}}.Binary())
	f.Fuzz(func(t *testing.T, binary []byte) {
		m, err := meter.Instrument(binary, 16)
		if err != nil || len(binary) > 4096 {
			return
		}
		ctx := context.Background()
		r := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfigInterpreter().WithMemoryLimitPages(16))
		defer r.Close(ctx)
		if _, err := r.CompileModule(ctx, binary); err != nil {
			return
		}
		if _, err := r.CompileModule(ctx, m.Binary); err != nil {
			t.Fatalf("%x was valid and became %x: %v", binary, m.Binary, err)
		}
	})
}
