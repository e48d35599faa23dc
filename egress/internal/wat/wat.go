// Package wat assembles the small WebAssembly modules of tests.
package wat

// Types of values.
const (
	I32 = 0x7f
	I64 = 0x7e
)

// Import of a function.
type Import struct {
	Module, Name    string
	Params, Results []byte
}

// Func is a function: its body, without declaration of locals but with End.
type Func struct {
	Export          string // empty: none
	Params, Results []byte
	Locals          int // of type i32
	Body            []byte
}

// Assembly is a module that has functions with the indices of imports first.
type Assembly struct {
	Imports []Import
	Funcs   []Func
	Pages   uint32 // of memory, which is exported as memory
	Data    string // at 0
	// Segments of data, after Data, with their number before the code.
	Segments []Segment
	Start    int   // index of the function that starts an instance; 0: none
	Table    []int // indices of functions
}

// Segment of data.
type Segment struct {
	Offset  int32
	Data    string
	Passive bool // it is for memory.init
}

// Code is code, put together.
func Code(parts ...[]byte) []byte {
	var all []byte
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

// Instructions.
var (
	Unreachable = []byte{0x00}
	Loop        = []byte{0x03, 0x40}
	Block       = []byte{0x02, 0x40}
	If          = []byte{0x04, 0x40}
	End         = []byte{0x0b}
	Return      = []byte{0x0f}
	Drop        = []byte{0x1a}
	Grow        = []byte{0x40, 0x00}
	Fill        = []byte{0xfc, 0x0b, 0x00}
	Add         = []byte{0x6a}
	Sub         = []byte{0x6b}
)

func I32Const(v int32) []byte   { return append([]byte{0x41}, signed(int64(v))...) }
func I64Const(v int64) []byte   { return append([]byte{0x42}, signed(v)...) }
func Call(f int) []byte         { return append([]byte{0x10}, unsigned(uint32(f))...) }
func CallIndirect(t int) []byte { return append(append([]byte{0x11}, unsigned(uint32(t))...), 0) }
func RefFunc(f int) []byte      { return append([]byte{0xd2}, unsigned(uint32(f))...) }
func Br(depth uint32) []byte    { return append([]byte{0x0c}, unsigned(depth)...) }
func BrIf(depth uint32) []byte  { return append([]byte{0x0d}, unsigned(depth)...) }

// BrTable branches to each of so many blocks, the innermost first.
func BrTable(blocks int) []byte {
	code := append([]byte{0x0e}, unsigned(uint32(blocks-1))...)
	for depth := range blocks {
		code = append(code, unsigned(uint32(depth))...)
	}
	return code
}

func MemoryInit(s uint32) []byte  { return Code([]byte{0xfc, 8}, unsigned(s), []byte{0}) }
func DataDrop(s uint32) []byte    { return append([]byte{0xfc, 9}, unsigned(s)...) }
func LocalGet(local int) []byte   { return append([]byte{0x20}, unsigned(uint32(local))...) }
func LocalSet(local int) []byte   { return append([]byte{0x21}, unsigned(uint32(local))...) }
func LocalTee(local int) []byte   { return append([]byte{0x22}, unsigned(uint32(local))...) }
func Load(offset uint32) []byte   { return append([]byte{0x28, 2}, unsigned(offset)...) }
func Store(offset uint32) []byte  { return append([]byte{0x36, 2}, unsigned(offset)...) }
func Store8(offset uint32) []byte { return append([]byte{0x3a, 0}, unsigned(offset)...) }

// Handler is a module with the exports that a policy has.
func Handler(imports []Import, data string, request, response []byte) Assembly {
	return Assembly{Imports: imports, Pages: 1, Data: data, Funcs: []Func{
		{Export: "handle_request", Results: []byte{I64}, Body: request},
		{Export: "handle_response", Params: []byte{I32, I32}, Body: response},
	}}
}

// Binary of the module.
func (m Assembly) Binary() []byte {
	var types, imports, funcs, exports, code [][]byte
	typeOf := func(params, results []byte) []byte {
		types = append(types, Code([]byte{0x60}, vector(params), vector(results)))
		return unsigned(uint32(len(types) - 1))
	}
	for _, i := range m.Imports {
		imports = append(imports, Code(text(i.Module), text(i.Name), []byte{0}, typeOf(i.Params, i.Results)))
	}
	for n, f := range m.Funcs {
		funcs = append(funcs, typeOf(f.Params, f.Results))
		locals := []byte{0}
		if f.Locals > 0 {
			locals = Code([]byte{1}, unsigned(uint32(f.Locals)), []byte{I32})
		}
		body := append(locals, f.Body...)
		code = append(code, append(unsigned(uint32(len(body))), body...))
		if f.Export != "" {
			exports = append(exports, Code(text(f.Export), []byte{0}, unsigned(uint32(len(m.Imports)+n))))
		}
	}
	out := []byte("\x00asm\x01\x00\x00\x00")
	out = section(out, 1, list(types))
	if len(imports) > 0 {
		out = section(out, 2, list(imports))
	}
	out = section(out, 3, list(funcs))
	if len(m.Table) > 0 {
		out = section(out, 4, Code([]byte{1, 0x70, 0}, unsigned(uint32(len(m.Table)))))
	}
	if m.Pages > 0 {
		out = section(out, 5, Code([]byte{1, 0}, unsigned(m.Pages)))
		exports = append(exports, Code(text("memory"), []byte{2, 0}))
	}
	out = section(out, 7, list(exports))
	if m.Start > 0 {
		out = section(out, 8, unsigned(uint32(m.Start)))
	}
	if len(m.Table) > 0 {
		var refs [][]byte
		for _, f := range m.Table {
			refs = append(refs, unsigned(uint32(f)))
		}
		out = section(out, 9, Code([]byte{1, 0}, I32Const(0), End, list(refs)))
	}
	var data [][]byte
	if m.Data != "" {
		data = append(data, Code([]byte{0}, I32Const(0), End, text(m.Data)))
	}
	for _, s := range m.Segments {
		if s.Passive {
			data = append(data, Code([]byte{1}, text(s.Data)))
		} else {
			data = append(data, Code([]byte{0}, I32Const(s.Offset), End, text(s.Data)))
		}
	}
	if len(m.Segments) > 0 {
		out = section(out, 12, unsigned(uint32(len(data))))
	}
	out = section(out, 10, list(code))
	if len(data) > 0 {
		out = section(out, 11, list(data))
	}
	return out
}

func section(out []byte, id byte, content []byte) []byte {
	return Code(out, []byte{id}, unsigned(uint32(len(content))), content)
}

func list(items [][]byte) []byte {
	return append(unsigned(uint32(len(items))), Code(items...)...)
}

func vector(b []byte) []byte { return append(unsigned(uint32(len(b))), b...) }
func text(s string) []byte   { return vector([]byte(s)) }

func unsigned(v uint32) (b []byte) {
	for v >= 0x80 {
		b = append(b, byte(v)|0x80)
		v >>= 7
	}
	return append(b, byte(v))
}

func signed(v int64) (b []byte) {
	for {
		c := byte(v & 0x7f)
		v >>= 7
		if v == 0 && c&0x40 == 0 || v == -1 && c&0x40 != 0 {
			return append(b, c)
		}
		b = append(b, c|0x80)
	}
}
