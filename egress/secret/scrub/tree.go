package scrub

import "slices"

// tree holds keys by their characters. Whatever their number, a place in a text
// is compared with all of them in one walk of at most maxKey steps.
type tree struct {
	root  [256]position // by the first character
	nodes []node
	chars []byte // of the edge that leads to the node
	keys  []key
}

// node has its children side by side. Where keys no longer branch there are none:
// the rest is compared with their text.
type node struct {
	first, last int32 // children are nodes first to last-1
	// The keys that end here, from key to until-1; or, with text, the keys that have
	// this text.
	key, until int32
	text       string
}

// position is how far into the tree a text leads.
type position struct {
	node  int32 // or nowhere
	depth int32 // characters
}

const nowhere = -1

func newTree(keys []key) *tree {
	t := &tree{keys: keys, nodes: []node{{}}, chars: []byte{0}}
	t.branch(0, 0, 0, len(keys))
	for c := range t.root {
		t.root[c].node = nowhere
	}
	for n := t.nodes[0].first; n < t.nodes[0].last; n++ {
		t.root[t.chars[n]] = position{n, 1}
	}
	return t
}

// grow gives a node of this depth its keys, lo to hi-1.
func (t *tree) grow(n int32, depth, lo, hi int) {
	if t.keys[lo].text == t.keys[hi-1].text {
		t.nodes[n] = node{key: int32(lo), until: int32(hi), text: t.keys[lo].text}
		return
	}
	t.branch(n, depth, lo, hi)
}

func (t *tree) branch(n int32, depth, lo, hi int) {
	end := lo
	for end < hi && len(t.keys[end].text) == depth {
		end++
	}
	t.nodes[n] = node{key: int32(lo), until: int32(end), first: int32(len(t.nodes))}
	var parts []int
	for i := end; i < hi; i++ {
		if c := t.keys[i].text[depth]; i == end || c != t.keys[i-1].text[depth] {
			parts = append(parts, i)
			t.nodes = append(t.nodes, node{})
			t.chars = append(t.chars, c)
		}
	}
	t.nodes[n].last = int32(len(t.nodes))
	first := t.nodes[n].first
	for i, part := range parts {
		next := hi
		if i+1 < len(parts) {
			next = parts[i+1]
		}
		t.grow(first+int32(i), depth+1, part, next)
	}
}

// step leads from a place on by c. ended are the keys that end there, if any.
func (t *tree) step(p position, c byte) (next position, ended []key) {
	n := &t.nodes[p.node]
	switch {
	case p.depth == 0:
		next = t.root[c]
	case n.text != "":
		if int(p.depth) == len(n.text) || n.text[p.depth] != c {
			return position{node: nowhere}, nil
		}
		next = position{p.node, p.depth + 1}
	default:
		i, found := slices.BinarySearch(t.chars[n.first:n.last], c)
		if !found {
			return position{node: nowhere}, nil
		}
		next = position{n.first + int32(i), p.depth + 1}
	}
	if next.node == nowhere {
		return next, nil
	}
	if n = &t.nodes[next.node]; len(n.text) == 0 || int(next.depth) == len(n.text) {
		ended = t.keys[n.key:n.until]
	}
	return next, ended
}

// descend leads on by as many characters of text as there are in the keys without a
// branch, up to the last of a key, and to those that stop does not have.
func (t *tree) descend(p position, text []byte, stop *[256]readings, in readings) position {
	rest := t.nodes[p.node].text
	if int(p.depth) >= len(rest) {
		return p
	}
	rest = rest[p.depth : len(rest)-1]
	text = text[:min(len(text), len(rest))]
	i := 0
	for i < len(text) && text[i] == rest[i] && stop[text[i]]&in == 0 {
		i++
	}
	p.depth += int32(i)
	return p
}

// ends reports whether nothing goes on from a place.
func (t *tree) ends(p position) bool {
	n := &t.nodes[p.node]
	return n.first == n.last && int(p.depth) == len(n.text)
}
