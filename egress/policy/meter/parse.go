package meter

import (
	"errors"
	"fmt"
	"slices"
)

// Sections, in the order in which a module has them.
const (
	customSection   = 0
	typeSection     = 1
	importSection   = 2
	functionSection = 3
	tableSection    = 4
	memorySection   = 5
	globalSection   = 6
	exportSection   = 7
	startSection    = 8
	elementSection  = 9
	codeSection     = 10
	dataSection     = 11
	countSection    = 12 // of data segments
)

var order = []byte{typeSection, importSection, functionSection, tableSection, memorySection, globalSection,
	exportSection, startSection, elementSection, countSection, codeSection, dataSection}

type parser struct {
	memoryPages uint32
	sections    [countSection + 1][]byte
	names       []byte // content of the custom section "name"

	types      []Signature
	functions  []uint32 // types of functions, imported ones first
	imported   uint32   // functions
	tableSlots int      // in tables and in segments for them
	empty      map[uint32]bool

	tick uint32 // index of the added import
	fuel uint32 // index of the added global, which follows the module's globals
	work int

	result Module
}

// moved returns the index of a function after the import was added.
func (m *parser) moved(f uint32) uint32 {
	if f >= m.imported {
		return f + 1
	}
	return f
}

func (m *parser) module(data []byte) (*Module, error) {
	if err := m.split(data); err != nil {
		return nil, err
	}
	for _, id := range []byte{typeSection, importSection, globalSection} { // get one element more
		if len(m.sections[id]) == 0 {
			m.sections[id] = []byte{0}
		}
	}
	m.result.Exports = map[string]Exported{}
	out := [countSection + 1][]byte{}
	for _, s := range []struct {
		id      byte
		name    string
		rewrite func(*reader) []byte
	}{
		{typeSection, "types", m.rewriteTypes},
		{importSection, "imports", m.rewriteImports},
		{functionSection, "functions", m.readFunctions},
		{tableSection, "tables", m.rewriteTables},
		{memorySection, "memory", m.rewriteMemory},
		{globalSection, "globals", m.rewriteGlobals},
		{startSection, "start", func(r *reader) []byte { return appendU32(nil, m.moved(r.u32())) }},
		{elementSection, "elements", m.rewriteElements},
		{codeSection, "code", m.rewriteCode},
		{exportSection, "exports", m.rewriteExports}, // after the code: it knows the empty functions
		{dataSection, "data", m.joinData},
		{countSection, "data", func(r *reader) []byte { r.u32(); return r.data }},
	} {
		if len(m.sections[s.id]) == 0 {
			continue
		}
		r := &reader{data: m.sections[s.id]}
		out[s.id] = s.rewrite(r)
		if r.err == nil && r.left() > 0 {
			r.fail(errors.New("there is something after its end"))
		}
		if r.err != nil {
			return nil, fmt.Errorf("section of %s: %w", s.name, r.err)
		}
	}
	if len(m.functions) > int(m.imported) && len(out[codeSection]) == 0 {
		return nil, fmt.Errorf("section of code: %w", errTruncated)
	}
	const header = "\x00asm\x01\x00\x00\x00"
	size := len(header) + 2*len(m.names)
	for _, section := range out {
		size += len(section) + 6 // its id, and its length
	}
	binary := append(make([]byte, 0, size), header...)
	for _, id := range order {
		if len(out[id]) > 0 {
			binary = appendSection(binary, id, out[id])
		}
	}
	m.result.Binary = m.appendNames(binary)
	return &m.result, nil
}

func appendSection(b []byte, id byte, content []byte) []byte {
	return append(appendU32(append(b, id), uint32(len(content))), content...)
}

func (m *parser) split(data []byte) error {
	r := &reader{data: data}
	position := -1
	for r.left() > 0 && r.err == nil {
		id := r.byte()
		content := r.next(r.u32())
		if r.err != nil {
			break
		}
		if id == customSection {
			c := &reader{data: content}
			if c.name() == "name" && c.err == nil {
				m.names = content[c.at:]
			}
			continue
		}
		at := slices.Index(order, id)
		switch {
		case at < 0:
			return fmt.Errorf("section %d is not of WebAssembly 2.0: build without extensions", id)
		case at <= position:
			return fmt.Errorf("section %d is duplicate or out of order", id)
		}
		position = at
		m.sections[id] = content
	}
	return r.err
}

func (m *parser) rewriteTypes(r *reader) []byte {
	n := r.count("types", maxTypes)
	start := r.at
	for range n {
		if form := r.byte(); form != 0x60 && r.err == nil {
			r.fail(fmt.Errorf("type %#02x is not a type of a function", form))
		}
		params := r.next(r.u32())
		results := r.next(r.u32())
		if len(params) > maxLocals || len(results) > maxLocals {
			r.fail(fmt.Errorf("a function has %d parameters and %d results; use at most %d", len(params), len(results), maxLocals))
		}
		m.types = append(m.types, Signature{params, results})
	}
	out := appendU32(nil, uint32(n+1))
	out = append(out, r.data[start:r.at]...)
	return append(out, 0x60, 0, 0) // of the tick, the last
}

func (m *parser) signature(r *reader, index uint32) Signature {
	if uint64(index) >= uint64(len(m.types)) {
		r.fail(fmt.Errorf("there is no type %d", index))
		return Signature{}
	}
	return m.types[index]
}

func (m *parser) rewriteImports(r *reader) []byte {
	n := r.count("imports", maxImports)
	start := r.at
	for range n {
		i := Imported{Module: r.name(), Name: r.name()}
		if r.byte() != Function {
			r.fail(fmt.Errorf("it imports %.80q of %.80q, which is not a function: nothing else is offered", i.Name, i.Module))
		}
		index := r.u32()
		i.Signature = m.signature(r, index)
		m.functions = append(m.functions, index)
		m.imported++
		m.result.Imports = append(m.result.Imports, i)
	}
	m.tick = m.imported
	out := appendU32(nil, uint32(n+1))
	out = append(out, r.data[start:r.at]...)
	out = appendName(out, Import)
	out = appendName(out, Tick)
	out = append(out, Function)
	return appendU32(out, uint32(len(m.types)))
}

func appendName(b []byte, name string) []byte {
	return append(appendU32(b, uint32(len(name))), name...)
}

func (m *parser) readFunctions(r *reader) []byte {
	for range r.count("functions", maxFunctions) {
		index := r.u32()
		m.signature(r, index)
		m.functions = append(m.functions, index)
	}
	return r.data
}

// limits reads the sizes of a table or a memory, the larger at most bound.
func (r *reader) limits(bound uint32) (low, high uint32) {
	flag := r.byte()
	if flag > 1 {
		r.fail(fmt.Errorf("limits of kind %d: build without shared or 64-bit memory", flag))
	}
	if low, high = r.u32(), bound; flag == 1 {
		high = min(r.u32(), bound)
	}
	return low, high
}

// rewriteTables bounds each table, because guests may grow unbounded ones.
func (m *parser) rewriteTables(r *reader) []byte {
	n := r.count("tables", maxTables)
	out := appendU32(nil, uint32(n))
	for range n {
		kind := r.byte()
		low, high := r.limits(maxTable)
		if m.tableSlots += int(low); m.tableSlots > maxTable {
			r.fail(fmt.Errorf("its tables have %d slots; use at most %d", m.tableSlots, maxTable))
		}
		out = append(out, kind, 1)
		out = appendU32(out, low)
		out = appendU32(out, high)
	}
	return out
}

func (m *parser) rewriteMemory(r *reader) []byte {
	if r.count("memories", 1) == 0 {
		return r.data
	}
	low, high := r.limits(m.memoryPages)
	if low > m.memoryPages {
		r.fail(fmt.Errorf("it wants %d KiB from the beginning: at most %d KiB fit", uint64(low)*64, uint64(m.memoryPages)*64))
	}
	out := appendU32([]byte{1, 1}, low)
	return appendU32(out, high)
}

func (m *parser) rewriteGlobals(r *reader) []byte {
	n := r.count("globals", maxGlobals)
	m.fuel = uint32(n)
	out := appendU32(nil, uint32(n+1))
	for range n {
		out = append(out, r.next(2)...) // type, mutable
		out = m.constant(r, out)
	}
	out = append(out, I32, 1, 0x41)
	out = appendConst(out, quantum)
	return append(out, 0x0b)
}

// constant copies an expression that is evaluated at the start.
func (m *parser) constant(r *reader, out []byte) []byte {
	b := &body{reader: reader{data: r.data, at: r.at, err: r.err}, m: m, copied: r.at, open: []scope{{}}}
	for b.err == nil && len(b.open) > 0 {
		switch op := b.byte(); op {
		case 0x0b:
			b.open = nil
		case 0x23, 0x41, 0x42, 0x43, 0x44, 0xd0:
			b.immediates(op)
		case 0xd2:
			b.index()
		case 0xfd:
			b.vector()
		default:
			b.fail(fmt.Errorf("instruction %#02x in a constant", op))
		}
	}
	if b.err != nil {
		r.fail(b.err)
		return out
	}
	b.copy()
	r.at = b.at
	return append(out, b.out...)
}

// rewriteElements rewrites the contents of tables. The bits of a segment's flag: 1 it is
// passive or declared, 2 it names its table or is declared, 4 it has expressions.
func (m *parser) rewriteElements(r *reader) []byte {
	n := r.count("segments for tables", maxSegments)
	out := appendU32(nil, uint32(n))
	for range n {
		flag := r.u32()
		if flag > 7 {
			r.fail(fmt.Errorf("a segment of kind %d", flag))
			break
		}
		out = appendU32(out, flag)
		if flag&1 == 0 {
			if flag&2 != 0 {
				out = appendU32(out, r.u32())
			}
			out = m.constant(r, out)
		}
		if flag&3 != 0 {
			out = append(out, r.byte()) // kind or type of its elements
		}
		elements := r.count("elements of a segment", maxTable)
		if m.tableSlots += elements; m.tableSlots > 2*maxTable {
			r.fail(fmt.Errorf("its segments for tables have too many elements; use at most %d", maxTable))
		}
		out = appendU32(out, uint32(elements))
		for range elements {
			if flag&4 != 0 {
				out = m.constant(r, out)
			} else {
				out = appendU32(out, m.moved(r.u32()))
			}
		}
		if r.err != nil {
			break
		}
	}
	return out
}

func (m *parser) rewriteCode(r *reader) []byte {
	defined := m.functions[m.imported:]
	n := r.count("functions", maxFunctions)
	if n != len(defined) {
		r.fail(fmt.Errorf("%d functions are declared and %d defined", len(defined), n))
		return nil
	}
	m.empty = map[uint32]bool{}
	out := make([]byte, 0, len(r.data)+len(r.data)/2)
	out = appendU32(out, uint32(n))
	var last body // its buffers serve the next one
	for i := range n {
		size := r.u32()
		if size > maxBody {
			r.fail(fmt.Errorf("a function has %d bytes; use at most %d", size, maxBody))
		}
		code := r.next(size)
		if r.err != nil {
			return nil
		}
		if size == 2 && code[0] == 0 && code[1] == 0x0b {
			m.empty[m.imported+uint32(i)] = true
		}
		b := &body{reader: reader{data: code}, m: m, out: last.out[:0], open: last.open[:0], params: len(m.types[defined[i]].Params)}
		out = b.rewrite(out)
		last = *b
		if b.err != nil {
			r.fail(fmt.Errorf("function %d: %w", m.imported+uint32(i), b.err))
			return nil
		}
	}
	return out
}

func (m *parser) rewriteExports(r *reader) []byte {
	n := r.count("exports", maxExports)
	out := appendU32(nil, uint32(n))
	for range n {
		name := r.name()
		kind := r.byte()
		index := r.u32()
		e := Exported{Kind: kind}
		if kind == Function {
			if uint64(index) >= uint64(len(m.functions)) {
				r.fail(fmt.Errorf("there is no function %d", index))
				break
			}
			e.Signature, e.Empty = m.types[m.functions[index]], m.empty[index]
			index = m.moved(index)
		}
		m.result.Exports[name] = e
		out = appendName(out, name)
		out = append(out, kind)
		out = appendU32(out, index)
	}
	return out
}

// appendNames appends the names of functions, for the traces of traps. It omits
// unreadable names, which mean nothing to the guest.
func (m *parser) appendNames(binary []byte) []byte {
	const ofFunctions = 1
	r := &reader{data: m.names}
	for r.left() > 0 && r.err == nil {
		id, content := r.byte(), r.next(r.u32())
		if id != ofFunctions || r.err != nil {
			continue
		}
		c := &reader{data: content}
		n := c.count("names", maxFunctions+maxImports)
		entries := appendU32(nil, uint32(n))
		for range n {
			entries = appendU32(entries, m.moved(c.u32()))
			entries = appendName(entries, c.name())
		}
		if c.err != nil || c.left() > 0 {
			break
		}
		return appendSection(binary, customSection, appendSection(appendName(nil, "name"), ofFunctions, entries))
	}
	return binary
}
