package audit

import "slices"

// ring holds the latest entries. It grows on demand.
type ring struct {
	slots []Entry
	first int // slot of the oldest entry
	n     int
	bytes int
}

// at returns the i-th oldest entry.
func (r *ring) at(i int) *Entry { return &r.slots[(r.first+i)%len(r.slots)] }

// push adds an entry. It replaces the oldest if the ring has most entries.
func (r *ring) push(e *Entry, most int) {
	if r.n == most {
		r.pop()
	}
	if r.n == len(r.slots) {
		r.resize(min(max(8, 2*r.n), most))
	}
	r.n++
	*r.at(r.n - 1) = *e
	r.bytes += e.size()
}

// resize changes the capacity to room entries, which must be at least r.n.
func (r *ring) resize(room int) {
	slots := make([]Entry, room)
	for i := range r.n {
		slots[i] = *r.at(i)
	}
	r.slots, r.first = slots, 0
}

// fit shrinks the ring to its entries if less than half of it is used.
func (r *ring) fit() {
	if r.n < len(r.slots)/2 {
		r.resize(r.n)
	}
}

// pop removes the oldest entry.
func (r *ring) pop() {
	e := r.at(0)
	r.bytes -= e.size()
	*e = Entry{}
	r.first = (r.first + 1) % len(r.slots)
	r.n--
}

// trim removes the oldest entries until the remaining ones take at most the given
// bytes.
func (r *ring) trim(bytes int) {
	for r.n > 0 && r.bytes > bytes {
		r.pop()
	}
}

// matching returns copies of the entries that f matches, oldest first.
func (r *ring) matching(f *Filter) []Entry {
	var found []Entry
	for i := r.n - 1; i >= 0 && (f.Limit <= 0 || len(found) < f.Limit); i-- {
		if e := r.at(i); f.match(e) {
			found = append(found, *e)
		}
	}
	slices.Reverse(found)
	return found
}
