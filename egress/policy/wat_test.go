package policy

import (
	"strings"

	. "github.com/doze-run/doze/egress/internal/wat"
)

// Imports of the tests' guests, by name; the order decides the indices.
func imported(names ...string) []Import {
	var list []Import
	for _, full := range names {
		module, name, found := strings.Cut(full, ".")
		if !found {
			module, name = handlerModule, full
		}
		for _, f := range hostModules[module] {
			if f.name == name {
				list = append(list, Import{Module: module, Name: name, Params: f.params, Results: f.results})
			}
		}
	}
	if len(list) != len(names) {
		panic("unknown import")
	}
	return list
}

var (
	pass = Code(I64Const(1), End)                   // to the next handler
	stay = Code(I64Const(0), End)                   // a response of its own
	busy = Code(Loop, Br(0), End, Unreachable, End) // endless
	none = End                                      // of a function without results
	trap = Code(Unreachable, End)
)

// after is a response handler that is not the empty one, which is never called.
func after(code []byte) []byte { return Code(I32Const(0), Drop, code, End) }
