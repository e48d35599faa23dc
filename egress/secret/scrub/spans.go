package scrub

import "slices"

// span is a part of a text: from start to end-1.
type span struct{ start, end int }

// spans are in order, and do not touch.
type spans []span

func (s *spans) add(start, end int) {
	if start >= end {
		return
	}
	// Most come in order: the place is near the end.
	last := len(*s)
	for last > 0 && (*s)[last-1].start > end {
		last--
	}
	first := last
	for first > 0 && (*s)[first-1].end >= start {
		first--
		start, end = min(start, (*s)[first].start), max(end, (*s)[first].end)
	}
	*s = slices.Replace(*s, first, last, span{start, end})
}

// star replaces what the spans cover of text from start to end-1.
func (s spans) star(text []byte, start, end int) {
	for _, span := range s {
		for i := max(span.start, start); i < min(span.end, end); i++ {
			text[i] = '*'
		}
	}
}

// from returns what the spans cover from a place on, which becomes the start.
func (s spans) from(place, origin int) spans {
	rest := s[:0]
	for _, span := range s {
		if span.end > place {
			rest = append(rest, struct{ start, end int }{max(span.start, place) - origin, span.end - origin})
		}
	}
	return rest
}
