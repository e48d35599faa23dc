// Package meter rewrites WebAssembly modules so that they can be stopped.
//
// A running guest is machine code that Go cannot interrupt: while it loops, the
// garbage collector waits for it, and the whole node waits for the collector. Therefore
// each function and each loop of a rewritten module pays from a counter for the code that
// it is about to run. When the counter is used up, it calls [Tick] of [Import], where the
// host reads its clock and may end the guest.
//
// wazero's own option for this, WithCloseOnContextDone, adds a check to each iteration of
// a loop, which is slow, and none to functions without loops, so that endless recursion is
// not stopped.
//
// Data segments are joined as well: some linkers make one for every few bytes.
//
// The contents of a module are bounded before anything is compiled: a few bytes of a
// module can make a compiler allocate gigabytes.
package meter

import (
	"errors"
	"fmt"
)

const (
	// Import is the module that the host offers to rewritten modules, with the
	// function Tick: () -> ().
	Import = "doze_meter"
	Tick   = "tick"
)

const (
	// quantum is what a guest may spend between two ticks. A unit is 8 bytes of
	// code, 3 instructions or so: ticks come about every 100 µs, and a tick costs
	// 50 ns.
	quantum = 100_000
	// unitBytes of code make a unit.
	unitBytes = 8
	// bulkShift: instructions on n bytes of memory or slots of a table cost
	// n>>bulkShift units: memory is filled with 10 bytes a nanosecond.
	bulkShift = 4
)

// Limits of a module. Programs in Go, Rust and AssemblyScript stay far below;
// a module at all the limits compiles in seconds and within 1 GiB.
const (
	maxTypes     = 10_000
	maxImports   = 1_000
	maxFunctions = 100_000
	maxTables    = 16
	maxTable     = 1 << 17 // slots in all tables, and in all segments for them
	maxGlobals   = 10_000
	maxExports   = 10_000
	maxSegments  = 100_000
	maxBody      = 1 << 20 // bytes of a function
	maxLocals    = 10_000  // of a function, with its parameters
	// maxWork bounds locals × blocks of a function: compilers join each local
	// where branches meet, and take time and memory for each. The largest in a
	// program of Go with net/http are 18 locals × 1,500 blocks.
	maxWork = 512 << 10
	// maxTotal bounds the sum of locals × blocks over all functions; that program
	// has 4 << 20 in its 11 MB.
	maxTotal = 32 << 20
)

// ValueType is the type of a parameter or a result, as WebAssembly writes it.
type ValueType = byte

// Types of values that functions of the host have.
const (
	I32 ValueType = 0x7f
	I64 ValueType = 0x7e
)

// Kinds of exports. There are others.
const (
	Function = 0
	Memory   = 2
)

// Signature of a function.
type Signature struct{ Params, Results []ValueType }

// Imported is a function that a module imports.
type Imported struct {
	Module, Name string
	Signature    Signature
}

// Exported is an export of a module.
type Exported struct {
	Kind      byte
	Signature Signature // of a function
	// Empty means that it is a function that does nothing.
	Empty bool
}

// Module is a rewritten module.
type Module struct {
	Imports []Imported
	Exports map[string]Exported
	// Binary is the rewritten module: with ticks, without debug information, and with
	// fewer segments of data.
	Binary []byte
}

// Instrument rewrites a module whose memory may have at most memoryPages pages. If the
// module is valid, so is the result; a compiler has to check that. Errors name the limit
// that the module exceeds, or an import that is not offered.
func Instrument(module []byte, memoryPages uint32) (*Module, error) {
	if len(module) < 8 || string(module[:4]) != "\x00asm" {
		return nil, errors.New("not a WebAssembly module: a binary begins with the bytes 00 61 73 6d")
	}
	switch version := string(module[4:8]); version {
	case "\x01\x00\x00\x00":
	case "\x0d\x00\x01\x00":
		return nil, errors.New("it is a component: build a core module, for wasip1 and not wasip2")
	default:
		return nil, fmt.Errorf("its version is % x: version 1 is understood", version)
	}
	m := &parser{memoryPages: memoryPages}
	return m.module(module[8:])
}
