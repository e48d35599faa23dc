package policy

import (
	"strings"

	. "github.com/doze-run/doze/egress/internal/wat"
)

// imported returns the imports of a guest, by name. Their order defines the function
// indexes.
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
	none = End                                      // body of a function without results
	trap = Code(Unreachable, End)
)

// after returns the body of a response handler. It is not empty, because the host does not
// call empty handlers.
func after(code []byte) []byte { return Code(I32Const(0), Drop, code, End) }
