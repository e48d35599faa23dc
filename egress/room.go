package egress

import "sync/atomic"

// maxHeld and maxHeldAll are how many bytes of bodies are in memory because
// placeholders are looked for in them, of one sender and of all. The largest has
// 1 MiB, what becomes of it 2.
const (
	maxHeld    = 16 << 20
	maxHeldAll = 128 << 20
)

// room is how much there is of something that is bounded.
type room struct{ used atomic.Int64 }

// take takes n, unless there would be more than limit.
func (r *room) take(n, limit int64) bool {
	if r.used.Add(n) > limit {
		r.used.Add(-n)
		return false
	}
	return true
}

func (r *room) give(n int64) { r.used.Add(-n) }

// load is what requests tie up, of a sender or of all.
type load struct {
	held room // bytes of bodies
}

// hold says whether there is room for a body in memory. It has it until letGo.
func (x *exchange) hold(bytes int64) bool {
	if !x.m.load.held.take(bytes, maxHeld) {
		return false
	}
	if !x.m.e.load.held.take(bytes, maxHeldAll) {
		x.m.load.held.give(bytes)
		return false
	}
	x.held += bytes
	return true
}

func (x *exchange) letGo() {
	x.m.load.held.give(x.held)
	x.m.e.load.held.give(x.held)
}
