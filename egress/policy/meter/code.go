package meter

import (
	"errors"
	"fmt"
)

// body rewrites one function. Byte offsets of branches do not exist in
// WebAssembly, so that code may be put between instructions.
type body struct {
	reader
	m      *parser
	out    []byte
	copied int // bytes of data that are already in out

	params  int
	locals  int
	blocks  int
	scratch uint32 // index of an added local, for instructions on many bytes
	bulk    bool   // scratch is needed

	open []scope
	// lead is the loop that begins the function, if any. It also pays for the code after
	// it.
	lead scope
}

// scope is a block that is not closed yet.
type scope struct {
	// price is the position in out of the price of an iteration; 0: the enclosing block
	// pays for this one.
	price  int
	began  int // in data
	nested int // bytes that loops inside account for
}

// copy appends to out what was read since the last copy.
func (b *body) copy() {
	b.out = append(b.out, b.data[b.copied:b.at]...)
	b.copied = b.at
}

// rewrite reads a function without its length, and appends the new one with its length.
func (b *body) rewrite(out []byte) []byte {
	groups, declared := b.declarations()
	code := b.at
	b.copied = code
	b.scratch = uint32(b.locals)

	// A function that begins with a loop pays there: Go's functions do, and have hardly any
	// code after it.
	entry := scope{began: code}
	if b.left() == 0 || b.data[code] != 0x03 {
		entry.price = b.charge()
	}
	b.open = append(b.open, entry)
	for len(b.open) > 0 && b.err == nil {
		b.instruction()
	}
	switch {
	case b.err != nil:
		return out
	case b.left() > 0:
		b.fail(errors.New("a function has code after its end"))
		return out
	}
	b.copy()
	work := (b.locals + 1) * (b.blocks + 1)
	if b.m.work += work; work > maxWork || b.m.work > maxTotal {
		b.fail(fmt.Errorf("a function with %d locals and %d blocks is too large to compile; split it", b.locals, b.blocks))
		return out
	}
	if b.bulk {
		groups++
	}
	head := append(appendU32(nil, uint32(groups)), declared...)
	if b.bulk {
		head = append(head, 1, I32)
	}
	out = appendU32(out, uint32(len(head)+len(b.out)))
	out = append(out, head...)
	return append(out, b.out...)
}

// declarations reads the declarations of locals.
func (b *body) declarations() (groups int, declared []byte) {
	groups = b.count("groups of locals", maxLocals)
	start := b.at
	total := uint64(b.params)
	for range groups {
		total += uint64(b.u32())
		b.byte()
		if total > maxLocals {
			b.fail(fmt.Errorf("a function has %d locals; use at most %d", total, maxLocals))
		}
	}
	b.locals = int(total)
	return groups, b.data[start:max(start, b.at)]
}

// charge appends the payment for code whose length is not known yet, and returns the
// position of its price.
func (b *body) charge() int {
	b.emit(0x23, b.m.fuel)      // global.get
	b.out = append(b.out, 0x41) // i32.const
	price := len(b.out)
	b.out = appendConst(b.out, 0)
	b.pay()
	return price
}

// pay appends code that subtracts the price on top of the stack from the counter below it,
// and calls the host when the counter is used up.
func (b *body) pay() {
	b.out = append(b.out, 0x6b)                               // i32.sub
	b.emit(0x24, b.m.fuel)                                    // global.set
	b.emit(0x23, b.m.fuel)                                    // global.get
	b.out = append(b.out, 0x41, 0x00, 0x48, 0x04, 0x40, 0x41) // i32.const 0, i32.lt_s, if, i32.const
	b.out = appendConst(b.out, quantum)
	b.emit(0x24, b.m.fuel)      // global.set
	b.emit(0x10, b.m.tick)      // call
	b.out = append(b.out, 0x0b) // end
}

// emit appends an instruction with an index.
func (b *body) emit(op byte, index uint32) { b.out = appendU32(append(b.out, op), index) }

// instruction reads one. Those that are not named here stay as they are.
func (b *body) instruction() {
	switch op := b.byte(); {
	case op == 0x02, op == 0x04: // block, if
		b.blocks++
		b.skipSigned(5)
		b.open = append(b.open, scope{})
	case op == 0x03: // loop
		b.blocks++
		b.skipSigned(5)
		b.copy()
		s := scope{price: b.charge(), began: b.at}
		if len(b.open) == 1 && b.open[0].price == 0 && b.lead.price == 0 {
			b.lead = s
		}
		b.open = append(b.open, s)
	case op == 0x0b: // end
		b.closeBlock()
	case op == 0x10, op == 0xd2: // call, ref.func
		b.index()
	case op == 0xfc:
		b.miscellaneous()
	case op == 0xfd:
		b.vector()
	default:
		b.immediates(op)
	}
}

// closeBlock sets the price of the block that an end closes, or of the function.
func (b *body) closeBlock() {
	last := len(b.open) - 1
	s := b.open[last]
	b.open = b.open[:last]
	size := b.at - s.began
	switch {
	case s.price != 0:
		b.setPrice(s.price, size-s.nested)
		if s.price == b.lead.price {
			b.lead.nested = size - s.nested // its own costs
		}
		if last > 0 {
			b.open[last-1].nested += size
		}
	case last > 0:
		b.open[last-1].nested += s.nested
	default:
		b.setPrice(b.lead.price, b.lead.nested+size-s.nested)
	}
}

// setPrice writes the price of size bytes of code.
func (b *body) setPrice(at, size int) { putConst(b.out[at:], uint32(1+max(0, size)/unitBytes)) }

// index reads the index of a function, and appends it as moved.
func (b *body) index() {
	b.copy()
	f := b.u32()
	b.out = appendU32(b.out, b.m.moved(f))
	b.copied = b.at
}

// immediates skips the immediate arguments of an instruction of one byte.
func (b *body) immediates(op byte) {
	switch {
	case op == 0x00, op == 0x01, op == 0x05, op == 0x0f, op == 0x1a, op == 0x1b,
		op >= 0x45 && op <= 0xc4, op == 0xd1:
	case op == 0x0c: // br
		b.u32()
	case op == 0x0d: // br_if
		b.blocks++
		b.u32()
	case op == 0x0e: // br_table
		n := b.count("branches of a br_table", maxBody)
		b.blocks += n
		for range n + 1 {
			b.u32()
		}
	case op == 0x11: // call_indirect
		b.u32()
		b.u32()
	case op == 0x1c: // select with a type
		b.next(b.u32())
	case op == 0x23, op == 0x24: // global.get, global.set
		if g := b.u32(); g >= b.m.fuel {
			b.fail(fmt.Errorf("unknown global %d", g)) // until ours is added
		}
	case op >= 0x20 && op <= 0x26: // locals, tables
		b.u32()
	case op >= 0x28 && op <= 0x3e: // loads and stores
		b.u32()
		b.u32()
	case op == 0x3f, op == 0x40: // memory.size, memory.grow
		b.byte()
	case op == 0x41:
		b.skipSigned(5)
	case op == 0x42:
		b.skipSigned(10)
	case op == 0x43:
		b.next(4)
	case op == 0x44:
		b.next(8)
	case op == 0xd0: // ref.null
		b.skipSigned(5)
	default:
		b.fail(fmt.Errorf("instruction %#02x is not of WebAssembly 2.0: build without extensions such as threads, exceptions or tail calls", op))
	}
}

// miscellaneous reads an instruction with the prefix 0xfc. Those on n bytes are charged
// for each byte.
func (b *body) miscellaneous() {
	start := b.at - 1
	op := b.u32()
	switch {
	case op <= 7: // conversions
		return
	case op == 9, op == 13, op == 16: // data.drop, elem.drop, table.size
		b.u32()
		return
	case op == 11, op == 15, op == 17: // memory.fill, table.grow, table.fill
		b.u32()
	case op <= 14: // memory.init, memory.copy, table.init, table.copy
		b.u32()
		b.u32()
	default:
		b.fail(fmt.Errorf("instruction 0xfc %#02x is not of WebAssembly 2.0", op))
		return
	}
	end := b.at
	b.at = start
	b.copy()
	b.bulk = true
	b.emit(0x22, b.scratch) // local.tee: n is on top of the stack
	b.at = end
	b.copy()
	b.emit(0x23, b.m.fuel)                       // global.get
	b.emit(0x20, b.scratch)                      // local.get
	b.out = append(b.out, 0x41, bulkShift, 0x76) // i32.const, i32.shr_u
	b.pay()
}

// vector reads an instruction with the prefix 0xfd.
func (b *body) vector() {
	switch op := b.u32(); {
	case op <= 11, op == 92, op == 93: // loads and stores
		b.u32()
		b.u32()
	case op == 12, op == 13: // v128.const, i8x16.shuffle
		b.next(16)
	case op >= 21 && op <= 34: // lanes
		b.byte()
	case op >= 84 && op <= 91: // loads and stores of lanes
		b.u32()
		b.u32()
		b.byte()
	case op > 255:
		b.fail(fmt.Errorf("vector instruction %#x is not of WebAssembly 2.0: build without relaxed SIMD", op))
	}
}
