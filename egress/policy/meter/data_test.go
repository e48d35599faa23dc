package meter_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/tetratelabs/wazero"

	. "github.com/doze-run/doze/egress/internal/wat"
	"github.com/doze-run/doze/egress/policy/meter"
)

// begun is the memory of an instance that has started, or why it has not.
func begun(t *testing.T, binary []byte) ([]byte, error) {
	t.Helper()
	ctx := context.Background()
	r := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfigInterpreter())
	t.Cleanup(func() { _ = r.Close(ctx) })
	if _, err := r.NewHostModuleBuilder(meter.Import).NewFunctionBuilder().WithFunc(func() {}).Export(meter.Tick).Instantiate(ctx); err != nil {
		t.Fatal(err)
	}
	m, err := r.Instantiate(ctx, binary)
	if err != nil {
		return nil, err
	}
	memory, _ := m.Memory().Read(0, m.Memory().Size())
	return memory, nil
}

// beginsTheSame returns how many bytes longer a module became.
func beginsTheSame(t *testing.T, a Assembly) int {
	t.Helper()
	given := a.Binary()
	m, err := meter.Instrument(given, 256)
	if err != nil {
		t.Fatalf("%+v: %v", a.Segments, err)
	}
	want, problem := begun(t, given)
	got, err := begun(t, m.Binary)
	if (err == nil) != (problem == nil) || !bytes.Equal(got, want) {
		t.Fatalf("%+v: its memory begins otherwise; %v, %v", a.Segments, problem, err)
	}
	return len(m.Binary) - len(given)
}

// The section is shorter than the length that replaces its own.
func TestModulesMayHaveAnEmptyDataSection(t *testing.T) {
	m, err := meter.Instrument([]byte("\x00asm\x01\x00\x00\x00\x0b\x01\x00"), 16)
	if err != nil {
		t.Fatal(err)
	}
	if validate(t, m.Binary) == nil {
		t.Errorf("%x is not valid", m.Binary)
	}
}

func TestJoinedSegmentsInitializeTheSameMemory(t *testing.T) {
	const last = 65536
	for name, segments := range map[string][]Segment{
		"one":              {{Offset: 8, Data: "a"}},
		"in a row":         {{Offset: 0, Data: "abc"}, {Offset: 3, Data: "def"}, {Offset: 6, Data: "ghi"}},
		"with gaps":        {{Offset: 0, Data: "abc"}, {Offset: 11, Data: "def"}, {Offset: 75, Data: "ghi"}, {Offset: 143, Data: "jkl"}, {Offset: 30000, Data: "m"}},
		"backwards":        {{Offset: 30, Data: "abc"}, {Offset: 20, Data: "def"}, {Offset: 10, Data: "ghi"}},
		"into a gap":       {{Offset: 20, Data: "abc"}, {Offset: 0, Data: "d"}, {Offset: 30, Data: "e"}, {Offset: 10, Data: "f"}},
		"over each other":  {{Offset: 0, Data: "abcdef"}, {Offset: 2, Data: "gh"}, {Offset: 4, Data: "ijkl"}},
		"over the first":   {{Offset: 0, Data: "abcdefghijklmnop"}, {Offset: 4, Data: "q"}, {Offset: 8, Data: "r"}},
		"of nothing":       {{Offset: 0, Data: ""}, {Offset: 9, Data: ""}, {Offset: last, Data: ""}},
		"to the end":       {{Offset: last - 8, Data: "abc"}, {Offset: last - 1, Data: "d"}},
		"beyond the end":   {{Offset: last - 8, Data: "abc"}, {Offset: last - 1, Data: "de"}},
		"nothing beyond":   {{Offset: last - 8, Data: "abc"}, {Offset: last + 1, Data: ""}},
		"far beyond":       {{Offset: 0, Data: "a"}, {Offset: -1, Data: "b"}},
		"for later, alone": {{Data: "abc", Passive: true}},
		"for later, too":   {{Offset: 0, Data: "a"}, {Data: "abc", Passive: true}, {Offset: 1, Data: "b"}},
	} {
		t.Run(name, func(t *testing.T) {
			beginsTheSame(t, Assembly{Pages: 1, Segments: segments})
			beginsTheSame(t, Assembly{Pages: 1, Data: "data", Segments: segments})
		})
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		var segments []Segment
		for range random.IntN(12) {
			segments = append(segments, Segment{Offset: random.Int32N(400), Data: fmt.Sprint(random.Uint64())[:random.IntN(12)]})
		}
		beginsTheSame(t, Assembly{Pages: 1, Segments: segments})
	}
}

// Code that names segments finds the same ones.
func TestReferencedSegmentsAreNotJoined(t *testing.T) {
	start := func(body []byte) Assembly {
		return Assembly{Pages: 1, Start: 0, Funcs: []Func{{}, {Export: "run", Results: []byte{I32}, Body: body}}, Segments: []Segment{
			{Offset: 0, Data: "abcd"}, {Offset: 8, Data: "efgh"}, {Data: "ijkl", Passive: true}, {Offset: 16, Data: "mnop"},
		}}
	}
	for name, body := range map[string][]byte{
		"init": Code(I32Const(100), I32Const(0), I32Const(4), MemoryInit(2), I32Const(100), Load(0), End),
		"drop": Code(DataDrop(2), DataDrop(1), I32Const(100), I32Const(0), I32Const(0), MemoryInit(3), I32Const(16), Load(0), End),
	} {
		t.Run(name, func(t *testing.T) {
			a := start(body)
			a.Funcs[0].Body = End
			ctx := context.Background()
			var results []uint64
			m, err := meter.Instrument(a.Binary(), 256)
			if err != nil {
				t.Fatal(err)
			}
			for _, binary := range [][]byte{a.Binary(), m.Binary} {
				r := wazero.NewRuntime(ctx)
				defer r.Close(ctx)
				if _, err := r.NewHostModuleBuilder(meter.Import).NewFunctionBuilder().WithFunc(func() {}).Export(meter.Tick).Instantiate(ctx); err != nil {
					t.Fatal(err)
				}
				m, err := r.Instantiate(ctx, binary)
				if err != nil {
					t.Fatal(err)
				}
				v, err := m.ExportedFunction("run").Call(ctx)
				if err != nil {
					t.Fatal(err)
				}
				results = append(results, v...)
			}
			if len(results) != 2 || results[0] != results[1] || results[0] == 0 {
				t.Errorf("got %x", results)
			}
		})
	}
}

func TestSegmentsAreJoined(t *testing.T) {
	var segments []Segment
	for i := range 1000 {
		segments = append(segments, Segment{Offset: int32(20 * i), Data: "some bytes"})
	}
	// 10 zeros take the place of a kind, an offset and a length of 7 bytes.
	if grown := beginsTheSame(t, Assembly{Pages: 1, Segments: segments}); grown > 3*len(segments)+1000 {
		t.Errorf("it grew by %d bytes", grown)
	}
	m, err := meter.Instrument(goModule(t), 256)
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	r := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfigInterpreter())
	defer r.Close(ctx)
	if _, err := r.CompileModule(ctx, m.Binary); err != nil {
		t.Error(err)
	}
	if n := dataSegments(t, m.Binary); n > 100 {
		t.Errorf("a module of Go has %d segments", n)
	}
}

// dataSegments counts them.
func dataSegments(t *testing.T, binary []byte) (n uint32) {
	t.Helper()
	for rest := binary[8:]; len(rest) > 0; {
		id := rest[0]
		size, used := number(rest[1:])
		rest = rest[1+used:]
		if id == 11 {
			n, _ = number(rest)
			return n
		}
		rest = rest[size:]
	}
	t.Fatal("there is no data")
	return 0
}

func number(b []byte) (v uint32, used int) {
	for {
		v |= uint32(b[used]&0x7f) << (7 * used)
		used++
		if b[used-1] < 0x80 {
			return v, used
		}
	}
}
