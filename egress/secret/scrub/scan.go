package scrub

// minHeld is how many characters of a key have to be there at the end of what
// has arrived for it to be held back. With less, one message in some dozens would
// wait for the next (a secret that begins with "e", a message that ends with
// "done"), and a peer that waits for a message would wait indefinitely. So of an
// occurrence whose first characters came alone, those up to three get through.
const minHeld = 4

// scan searches for occurrences in one piece of text.
type scan struct {
	s     *Scrubber
	text  []byte
	final bool // nothing comes after text

	spans spans // to be replaced
	// tails are long patterns that are followed beyond their keys.
	tails []tail
	until int // how far they were followed
	// If not final: retain is the first place where an occurrence may begin
	// that the text does not hold whole; held the first from which on
	// bytes must not go out. Both are len(text) without.
	retain, held int
}

// run finds all occurrences that begin in text from a place on, up to held.
func (x *scan) run(from int) {
	n, f := len(x.text), x.s.filter
	x.retain, x.held = n, n
	x.follow()
	// Samples do not find an occurrence that begins in the last window, or before a \r
	// that may be half a line break. If nothing comes after it, it is too short.
	rest := n
	if !x.final {
		rest = max(from, n-f.window)
	}
	unescaped, escaped := -1, [len(escapes)]escaped{}
	for pos := from; ; {
		if unescaped < pos {
			unescaped = f.unescaped(x.text, pos)
		}
		next := min(unescaped, rest)
		for i := range escaped {
			e := &escaped[i]
			if x.s.special[escapes[i].char] == 0 {
				continue
			}
			start, ok := e.first(pos)
			for !ok && e.end < n {
				*e = f.escape(x.text, max(pos, e.end), i)
				start, ok = e.first(pos)
			}
			if ok {
				next = min(next, start)
			}
		}
		if pos = max(pos, next); pos >= n {
			return
		}
		if x.match(pos); x.held < n {
			return
		}
		pos++
	}
}

// match searches for occurrences that begin at start, in all readings.
func (x *scan) match(start int) {
	var p position
	var ended []key
	unread := ^readings(0)
	for at := start; at < len(x.text); at++ {
		c := x.text[at]
		// The text before it is the same in all readings.
		for more := x.s.special[c] & unread; more != 0; more = more.withoutFirst() {
			x.read(more.first(), start, at, p)
		}
		unread &^= x.s.special[c]
		if p, ended = x.s.tree.step(p, c); p.node == nowhere {
			return
		}
		if len(ended) > 0 {
			x.found(ended, plain, start, at+1)
			continue
		}
		before := p.depth
		p = x.s.tree.descend(p, x.text[at+1:], &x.s.special, unread)
		at += int(p.depth - before)
	}
	x.more(p, start)
}

// read goes on with match in another reading.
func (x *scan) read(r reading, start, at int, p position) {
	var ended []key
	broken := at == start // no line break at the beginning, nor two in a row
	for at < len(x.text) {
		u := r.unit(x.text[at:])
		if u.width == 0 {
			break
		}
		if u.n == 0 && broken {
			return
		}
		broken = u.n == 0
		at += int(u.width)
		for i := range u.n {
			if p, ended = x.s.tree.step(p, u.byte(i)); p.node == nowhere {
				return
			}
			if len(ended) > 0 {
				x.found(ended, r, start, at)
			}
		}
		if !broken {
			before := p.depth
			p = x.s.tree.descend(p, x.text[at:], &x.s.special, set(r))
			at += int(p.depth - before)
		}
	}
	x.more(p, start)
}

// more: the text ended within what may become an occurrence.
func (x *scan) more(p position, start int) {
	if x.final || x.s.tree.ends(p) {
		return
	}
	x.retain = min(x.retain, start)
	if p.depth >= minHeld {
		x.held = start
	}
}

// found notes the keys that end at a place.
func (x *scan) found(keys []key, r reading, start, end int) {
	x.spans.add(start, end)
	if end < x.until { // within a long one: following each would be quadratic
		return
	}
	for _, k := range keys {
		if k.of.length > len(k.text) {
			x.tails = append(x.tails, tail{k.of, len(k.text), r, end})
		}
	}
	x.follow()
}

// tail is the rest of a pattern whose key was found.
type tail struct {
	of   *pattern
	next int // character
	in   reading
	at   int // place in text
}

// follow replaces what goes on as it should, and keeps the tails that the end of
// text cut off.
func (x *scan) follow() {
	live := x.tails[:0]
	for _, t := range x.tails {
		from := t.at
		if x.goesOn(&t) && !x.final {
			live = append(live, t)
		}
		x.spans.add(from, t.at)
		x.until = max(x.until, t.at)
	}
	x.tails = live
}

// goesOn moves a tail on as far as it matches, and reports whether the text ended.
func (x *scan) goesOn(t *tail) bool {
	for t.next < t.of.length {
		if t.at == len(x.text) {
			return true
		}
		u := t.in.unit(x.text[t.at:])
		if u.width == 0 {
			return true
		}
		for i := uint8(0); i < u.n && t.next < t.of.length; i++ {
			if u.byte(i) != t.of.at(t.next) {
				return false
			}
			t.next++
		}
		t.at += int(u.width)
	}
	return false
}
