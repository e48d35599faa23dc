package audit

import "slices"

// ring holds the latest entries. It grows as they come.
type ring struct {
	slots []Entry
	first int // the oldest one's slot
	n     int
	bytes int
}

// at returns the i-th oldest entry.
func (r *ring) at(i int) *Entry { return &r.slots[(r.first+i)%len(r.slots)] }

// push adds an entry, in the place of the oldest if there are so many.
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

// resize makes room for so many entries, which are at least those that there are.
func (r *ring) resize(room int) {
	slots := make([]Entry, room)
	for i := range r.n {
		slots[i] = *r.at(i)
	}
	r.slots, r.first = slots, 0
}

// fit gives back room of which less than half is used.
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

// trim removes the oldest entries until the others have no more than so many
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
