// Pictures draws each *.txt of this folder as an SVG of the same name: `make pictures`.
//
// The first line of a source is the picture's title, the rest is the drawing, in the
// syntax of https://github.com/bep/goat. An SVG contains the SHA-256 of its source.
package main

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"fmt"
	"html"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/bep/goat"
)

func main() {
	sources, err := filepath.Glob("*.txt")
	if err != nil {
		log.Fatal(err)
	}
	for _, source := range sources {
		if err := draw(source); err != nil {
			log.Fatalf("draw %s: %v", source, err)
		}
	}
}

func draw(source string) error {
	text, err := os.ReadFile(source)
	if err != nil {
		return err
	}
	title, drawing, ok := strings.Cut(string(text), "\n")
	if !ok {
		return fmt.Errorf("no drawing after the title")
	}
	picture := goat.BuildSVG(strings.NewReader(protect(drawing)))
	lines, words := split(picture.Body)
	var b bytes.Buffer
	fmt.Fprintf(&b, prologue, source, sha256.Sum256(text), picture.Width+2*margin, picture.Height+2*margin, html.EscapeString(title), margin+columnWidth, margin+rowHeight)
	for _, line := range lines {
		fmt.Fprintln(&b, line)
	}
	for _, word := range words {
		fmt.Fprintf(&b, "<text x=\"%d\" y=\"%d\" textLength=\"%d\">%s</text>\n", word.x, word.y, columnWidth*word.columns, html.EscapeString(unprotect(html.UnescapeString(word.text))))
	}
	b.WriteString("</g>\n</svg>\n")
	return os.WriteFile(strings.TrimSuffix(source, ".txt")+".svg", b.Bytes(), 0o644)
}

// In pixels. The drawing has goat's column at its left and its row at its top, too.
const (
	margin      = 4
	columnWidth = 8
	rowHeight   = 16
)

// prologue of an SVG. An image in a page cannot know the page's colors, only the reader's
// preference, so it has a background of its own. A font's glyph is 0.6 em wide:
// 13.3 px fill a column of goat's.
const prologue = `<!-- Made from %s by make pictures. SHA-256 of the source: %x -->
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %[3]d %[4]d" width="%[3]d" height="%[4]d" role="img">
<title>%[5]s</title>
<style>
svg { color: #1f2328; font: 13.3px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }
.background { fill: #ffffff }
text { fill: currentColor }
@media (prefers-color-scheme: dark) {
svg { color: #d1d7e0 }
.background { fill: #151b23 }
}
</style>
<rect class="background" width="100%%" height="100%%" rx="6"/>
<g transform="translate(%[6]d %[7]d)">
`

// lineCharacters draw lines, arrows and circles in goat, and also occur in words.
const lineCharacters = `ov-_./\()'*+<>^`

// protected is added to a character of a word so that goat draws it as text.
const protected = 0xE000

// protect marks line characters that touch a letter or a digit in their row:
// they are part of a word. Leave a space between a line and a word.
func protect(drawing string) string {
	rows := strings.Split(drawing, "\n")
	for i, row := range rows {
		before := []rune(row)
		after := slices.Clone(before)
		for x, r := range before {
			if strings.ContainsRune(lineCharacters, r) && (x > 0 && inWord(before[x-1]) || x+1 < len(before) && inWord(before[x+1])) {
				after[x] = r + protected
			}
		}
		rows[i] = string(after)
	}
	return strings.Join(rows, "\n")
}

func inWord(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }

func unprotect(text string) string {
	return strings.Map(func(r rune) rune {
		if r > protected && r < protected+unicode.MaxASCII {
			return r - protected
		}
		return r
	}, text)
}

// word is adjacent characters in one row. The text is escaped for XML.
type word struct {
	x, y, columns int
	text          string
}

var character = regexp.MustCompile(`^<text text-anchor='middle' x='(\d+)' y='(\d+)' [^>]*>(.*)</text>$`)

// split returns the lines of goat's drawing, and its texts. Each text of goat's is one
// character; split joins them to words, so that a picture can be searched and is small.
func split(body string) (lines []string, words []word) {
	for line := range strings.Lines(body) {
		line = strings.TrimSpace(line)
		match := character.FindStringSubmatch(line)
		if match == nil {
			if line != "" && !strings.HasPrefix(line, "<g") && line != "</g>" {
				lines = append(lines, line)
			}
			continue
		}
		x, _ := strconv.Atoi(match[1])
		y, _ := strconv.Atoi(match[2])
		words = append(words, word{x - columnWidth/2, y, 1, match[3]})
	}
	slices.SortFunc(words, func(a, b word) int { return cmp.Or(a.y-b.y, a.x-b.x) })
	joined := words[:0]
	for _, next := range words {
		if n := len(joined) - 1; n >= 0 && joined[n].y == next.y && joined[n].x+columnWidth*joined[n].columns == next.x {
			joined[n].columns++
			joined[n].text += next.text
			continue
		}
		joined = append(joined, next)
	}
	return lines, joined
}
