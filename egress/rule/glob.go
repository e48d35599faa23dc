package rule

import (
	"fmt"
	"strings"
)

// glob is a compiled pattern in which `**` is anything, and `*` anything but the
// separator. The text before its first star and after its last is compared first,
// which is all that most patterns need.
type glob struct {
	stars          int
	prefix, suffix string  // of a pattern without stars, the prefix is all of it
	inner          []piece // between the first star and the last
	deep           bool    // the last star is `**`
	separator      byte    // that `*` does not match; 0: none
}

// piece is a star and the text that follows it.
type piece struct {
	deep bool
	text string
}

// maxSteps bounds the work for a request, in steps of some nanoseconds each. 2,000
// patterns with four stars each, all of which fit a path of 200 bytes but for the
// middle, take a tenth of it.
const maxSteps = 16 << 20

// effort is the work that is left for a request.
type effort int

// spend returns false if there is not as much left.
func (e *effort) spend(steps int) bool {
	*e = max(-1, *e-effort(steps))
	return *e >= 0
}

func (e *effort) exhausted() bool { return *e < 0 }

// compileGlob compiles a pattern. A separator of 0 makes `*` the same as `**`. The
// error reports that it has too many stars.
func compileGlob(pattern string, separator byte) (*glob, error) {
	g := &glob{separator: separator}
	before, rest, found := strings.Cut(pattern, "*")
	g.prefix = before
	for found {
		if g.stars++; g.stars > MaxStars {
			return nil, fmt.Errorf("too many stars; use at most %d", MaxStars)
		}
		deep := separator == 0 || strings.HasPrefix(rest, "*")
		rest = strings.TrimLeft(rest, "*")
		if before, rest, found = strings.Cut(rest, "*"); found {
			g.inner = append(g.inner, piece{deep, before})
		} else {
			g.suffix, g.deep = before, deep
		}
	}
	return g, nil
}

// match reports whether the whole text fits. The work is bounded by the product of
// the text's length and the pattern's, and by what is left of e: when that is
// exhausted, the result means nothing.
func (g *glob) match(text string, e *effort) bool {
	if !e.spend(1 + (len(g.prefix)+len(g.suffix))/16) {
		return false
	}
	if g.stars == 0 {
		return text == g.prefix
	}
	if len(text) < len(g.prefix)+len(g.suffix) || !strings.HasPrefix(text, g.prefix) || !strings.HasSuffix(text, g.suffix) {
		return false
	}
	text = text[len(g.prefix) : len(text)-len(g.suffix)]
	if len(g.inner) == 0 {
		return g.deep || e.spend(1+len(text)/16) && strings.IndexByte(text, g.separator) < 0
	}
	return g.matchInner(text, e)
}

// matchInner follows all possible matches in parallel: reached has the positions in the text
// up to which the beginning of the pattern matches.
func (g *glob) matchInner(text string, e *effort) bool {
	reached := make([]bool, len(text)+1)
	reached[0] = true
	for _, p := range g.inner {
		if !g.extend(reached, text, p.deep, e) || !advance(reached, text, p.text, e) {
			return false
		}
	}
	return g.extend(reached, text, g.deep, e) && reached[len(text)]
}

// extend adds the positions up to which a star matches after each reached position.
func (g *glob) extend(reached []bool, text string, deep bool, e *effort) bool {
	for i := range len(text) { // bytes
		if reached[i] && (deep || text[i] != g.separator) {
			reached[i+1] = true
		}
	}
	return e.spend(len(reached))
}

// advance moves each reached position behind the text of a piece, or removes it if the text
// differs. It returns false if none is left. It begins with the last position, so that none
// is moved twice.
func advance(reached []bool, text, piece string, e *effort) (found bool) {
	steps := len(reached)
	for i := len(text); i >= 0; i-- {
		if !reached[i] {
			continue
		}
		reached[i] = false
		if steps += len(piece) / 16; strings.HasPrefix(text[i:], piece) {
			reached[i+len(piece)], found = true, true
		}
	}
	return e.spend(steps) && found
}
