// Package wat assembles the small WebAssembly modules of tests.
package wat

import (
	"bytes"
	"encoding/binary"
)

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

// Code concatenates parts of code.
func Code(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

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

func MemoryInit(s uint32) []byte { return Code([]byte{0xfc, 8}, unsigned(s), []byte{0}) }
func DataDrop(s uint32) []byte   { return append([]byte{0xfc, 9}, unsigned(s)...) }
func LocalGet(local int) []byte  { return append([]byte{0x20}, unsigned(uint32(local))...) }
func LocalSet(local int) []byte  { return append([]byte{0x21}, unsigned(uint32(local))...) }
func Load(offset uint32) []byte  { return append([]byte{0x28, 2}, unsigned(offset)...) }
func Store(offset uint32) []byte { return append([]byte{0x36, 2}, unsigned(offset)...) }

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
		code = append(code, vector(append(locals, f.Body...)))
		if f.Export != "" {
			exports = append(exports, Code(text(f.Export), []byte{0}, unsigned(uint32(len(m.Imports)+n))))
		}
	}
	var memory, table, elements, data [][]byte
	if m.Pages > 0 {
		memory = [][]byte{Code([]byte{0}, unsigned(m.Pages))}
		exports = append(exports, Code(text("memory"), []byte{2, 0}))
	}
	if len(m.Table) > 0 {
		var refs [][]byte
		for _, f := range m.Table {
			refs = append(refs, unsigned(uint32(f)))
		}
		table = [][]byte{Code([]byte{0x70, 0}, unsigned(uint32(len(m.Table))))}
		elements = [][]byte{Code([]byte{0}, I32Const(0), End, list(refs))}
	}
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
	out := []byte("\x00asm\x01\x00\x00\x00")
	section := func(id byte, content []byte) { out = Code(out, []byte{id}, vector(content)) }
	vectorSection := func(id byte, items [][]byte) {
		if len(items) > 0 {
			section(id, list(items))
		}
	}
	vectorSection(1, types)
	vectorSection(2, imports)
	vectorSection(3, funcs)
	vectorSection(4, table)
	vectorSection(5, memory)
	vectorSection(7, exports)
	if m.Start > 0 {
		section(8, unsigned(uint32(m.Start)))
	}
	vectorSection(9, elements)
	if len(m.Segments) > 0 {
		section(12, unsigned(uint32(len(data))))
	}
	vectorSection(10, code)
	vectorSection(11, data)
	return out
}

func list(items [][]byte) []byte {
	return append(unsigned(uint32(len(items))), Code(items...)...)
}

func vector(b []byte) []byte { return append(unsigned(uint32(len(b))), b...) }
func text(s string) []byte   { return vector([]byte(s)) }

// unsigned is LEB128, which is also the encoding of Go's varints.
func unsigned(v uint32) []byte { return binary.AppendUvarint(nil, uint64(v)) }

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
