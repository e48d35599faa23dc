package scrub

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// naive does what Text does, without a filter or a tree: each pattern is compared
// at each place in each reading, as far as its key or all of it.
func naive(values [][]byte, text string, whole bool) string {
	var patterns []pattern
	spaces := false
	for _, v := range values {
		if v = bytes.TrimSpace(v); len(v) >= shortest {
			patterns = append(patterns, encodings(v)...)
			spaces = spaces || bytes.IndexByte(v, ' ') >= 0
		}
	}
	out := []byte(text)
	for i := range patterns {
		for r := plain; r < howMany; r++ {
			if r == form && !spaces {
				continue
			}
			for start := range len(text) {
				if end := occurrence(&patterns[i], r, text, start, whole); end > 0 {
					for j := start; j < end; j++ {
						out[j] = '*'
					}
				}
			}
		}
	}
	return string(out)
}

// occurrence returns the end of the occurrence that begins at start, or 0.
func occurrence(p *pattern, r reading, text string, start int, whole bool) (end int) {
	next, broken := 0, true
	for at := start; at < len(text); {
		u := r.unit([]byte(text[at:]))
		if u.width == 0 || u.n == 0 && broken && next < min(maxKey, p.length) {
			break
		}
		broken = u.n == 0
		for i := uint8(0); i < u.n && next < p.length; i++ {
			if u.byte(i) != p.at(next) {
				return end
			}
			next++
		}
		if at += int(u.width); next >= min(maxKey, p.length) {
			end = at
		}
		if next == p.length || end > 0 && !whole {
			break
		}
	}
	return end
}

func FuzzScrubberAgainstNaive(f *testing.F) {
	f.Add("abcdefgh", "efghijkl", "abcdefghijkl %61bcdefgh a\nbcd\\u0065fgh YWJjZGVmZ2g=", []byte{1, 200, 3})
	f.Add(`\\\\`, "%25%25", `\\\\\\\\\\\\ %25%25%2525`, []byte{7})
	f.Add("a b c d", "&amp;&lt;", "a+b+c%20d &amp;amp;&amp;lt;", []byte{2})
	f.Add(strings.Repeat("ab", 200), "", strings.Repeat("ab", 300)+strings.Repeat("61", 300), []byte{100})
	f.Fuzz(func(t *testing.T, a, b, text string, sizes []byte) {
		if len(a)+len(b) > 1000 || len(text) > 2000 { // naive takes its time
			return
		}
		agree(t, values(a, b), text, sizes)
	})
}

// TestScrubberAgreesWithNaive on what fuzzing does not come across soon: texts
// of parts of values, escaped in all ways, side by side.
func TestScrubberAgreesWithNaive(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	pick := func(s []string) string { return s[r.IntN(len(s))] }
	characters := []string{"a", "b", "A", "0", "%", "\\", "&", "+", " ", "/", "\n", "\r", "é", "😀", "#", ";", "u", "x", "6", "1", "\xff"}
	for range 300 {
		var vs []string
		for range 1 + r.IntN(3) {
			var v strings.Builder
			for v.Len() < 4+r.IntN(20) {
				v.WriteString(strings.Repeat(pick(characters[:2+r.IntN(len(characters)-1)]), 1+r.IntN(3)*r.IntN(3)))
			}
			if vs = append(vs, v.String()); r.IntN(10) == 0 {
				vs = append(vs, strings.Repeat(v.String(), maxKey/v.Len()+r.IntN(3)))
			}
		}
		var text strings.Builder
		for range r.IntN(8) {
			part := pick(vs)
			if r.IntN(2) == 0 {
				part = part[r.IntN(len(part)):]
			}
			if r.IntN(2) == 0 {
				part = part[:r.IntN(len(part))+1]
			}
			if part = forms[pick(formNames)](part); r.IntN(3) == 0 {
				part = part[r.IntN(len(part)):]
			}
			text.WriteString(part)
			text.WriteString(pick(append(characters, "", "", "")))
		}
		sizes := make([]byte, 1+r.IntN(3))
		for i := range sizes {
			sizes[i] = byte(1 + r.IntN(40))
		}
		if agree(t, values(vs...), text.String(), sizes); t.Failed() {
			t.Fatalf("values %q, text %q, pieces %d", vs, text.String(), sizes)
		}
	}
}

// agree checks a Scrubber of these values with naive. Of long values that repeat
// themselves not each occurrence is followed to its end.
func agree(t *testing.T, vs [][]byte, text string, sizes []byte) {
	t.Helper()
	s := New(vs)
	least, most := naive(vs, text, false), naive(vs, text, true)
	for how, got := range map[string]string{
		"in one piece": s.Text(text),
		"in pieces":    read(t, s.Body(inPieces(text, ints(sizes)...))),
	} {
		if len(got) != len(text) {
			t.Fatalf("%s: %d bytes of %q became %d", how, len(text), text, len(got))
		}
		missed := 0
		for i := range got {
			switch {
			case got[i] == text[i] && least[i] != text[i]:
				missed++
			case got[i] != text[i] && most[i] != got[i]:
				t.Fatalf("%s: %q became %q, not %q", how, text, got, most)
			default:
				missed = 0
			}
			// In pieces, up to three characters may have gone out before.
			if missed > 0 && how == "in one piece" || missed > minHeld*(len(`\ud83d\ude00`)+4) {
				t.Fatalf("%s: %q became %q, not %q", how, text, got, least)
			}
		}
	}
}

func ints(b []byte) []int {
	sizes := make([]int, 0, len(b)+1)
	for _, n := range b {
		sizes = append(sizes, int(n))
	}
	if len(sizes) == 0 {
		return []int{1}
	}
	return sizes
}

var formNames = func() (names []string) {
	for name := range forms {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}()

// FuzzNoEncodingGetsThrough: whatever surrounds a value, and however it is split,
// it is not in what comes out.
func FuzzNoEncodingGetsThrough(f *testing.F) {
	for i := range formNames {
		f.Add(token, "before ", " after", uint8(i), []byte{3, 1, 40})
		f.Add("%25%25%25%25", "%2", "5%", uint8(i), []byte{1})
	}
	f.Fuzz(func(t *testing.T, value, before, after string, form uint8, sizes []byte) {
		value = strings.TrimSpace(value)
		name := formNames[int(form)%len(formNames)]
		// A value that is cut off is another value; an asterisk is its own replacement.
		if len(value) < 8 || len(value) > maxKey || len(before)+len(after) > 5000 || strings.Contains(value, "*") || !utf8.ValidString(value) {
			return
		}
		encoded := forms[name](value)
		if strings.HasPrefix(name, "JSON") && strings.Contains(encoded, `\ufffd`) {
			return
		}
		if name == "HTML" && strings.Contains(value, "\x00") {
			return // html.EscapeString does not keep it
		}
		text := before + encoded + after
		s := New(values(value))
		core := encoded
		if strings.HasPrefix(name, "base64") { // without the bits that neighbors share
			core = strings.TrimRight(core, "=%3D")
			core = core[min(len(core), 4):]
			core = core[:max(0, len(core)-4)]
			if len(core) < 8 {
				return
			}
		}
		for how, got := range map[string]string{
			"in one piece": s.Text(text),
			"in pieces":    read(t, s.Body(inPieces(text, ints(sizes)...))),
		} {
			if len(got) != len(text) {
				t.Fatalf("%d bytes became %d", len(text), len(got))
			}
			if strings.Contains(got, core) {
				t.Fatalf("%s, %s: %q is in %q", name, how, core, got)
			}
		}
	})
}
