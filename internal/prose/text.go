package main

import (
	"regexp"
	"strings"
)

// Kind is a kind of text. Kinds are combined as bits.
type Kind uint

const (
	Comment  Kind = 1 << iota // of Go, shell, make, Caddyfiles, units
	String                    // a string of Go or shell that has words
	Error                     // the format of fmt.Errorf or the text of errors.New
	Log                       // the message of a log record
	Doc                       // Markdown
	TestName                  // in words: TestThatItHolds is "that it holds"
	Name                      // a declared name: of a package's level, a method, a field
	Local                     // a name declared in a function
	File                      // a file's name
)

// Prose is what people read as sentences.
const Prose = Comment | String | Error | Log | Doc

// unit is a text that rules are applied to: a paragraph, a string, a name.
type unit struct {
	path    string
	kind    Kind
	text    string // with paragraphs joined to one line
	heading bool

	offsets []int // at which the lines begin
	numbers []int
}

// line returns the number of the line that has an offset of the text.
func (u *unit) line(offset int) int {
	n := 0
	for i, o := range u.offsets {
		if o <= offset {
			n = u.numbers[i]
		}
	}
	return n
}

// single returns a unit that is of one line.
func single(path string, kind Kind, line int, text string) *unit {
	return &unit{path: path, kind: kind, text: text, offsets: []int{0}, numbers: []int{line}}
}

// paragraphs joins lines.
type paragraphs struct {
	path    string
	kind    Kind
	units   []*unit
	current *unit
}

// add adds a line to the current paragraph, or begins one.
func (p *paragraphs) add(number int, text string) {
	text = strings.TrimSpace(text)
	if text == "" {
		p.flush()
		return
	}
	if p.current == nil {
		p.current = &unit{path: p.path, kind: p.kind}
	} else {
		p.current.text += " "
	}
	p.current.offsets = append(p.current.offsets, len(p.current.text))
	p.current.numbers = append(p.current.numbers, number)
	p.current.text += text
}

func (p *paragraphs) flush() {
	if p.current != nil {
		p.current.text = blankCode(p.current.text)
		p.units = append(p.units, p.current)
	}
	p.current = nil
}

var (
	codeSpan = regexp.MustCompile("``.+?``|`[^`]+`")
	linkURL  = regexp.MustCompile(`\]\([^)]*\)|https?://\S+`)
)

// blankCode replaces code spans by a word of the same length, and URLs by spaces.
func blankCode(s string) string {
	s = codeSpan.ReplaceAllStringFunc(s, func(m string) string { return strings.Repeat("x", len(m)) })
	return linkURL.ReplaceAllStringFunc(s, func(m string) string {
		if strings.HasPrefix(m, "]") {
			return "]" + strings.Repeat(" ", len(m)-1)
		}
		return strings.Repeat("x", len(m))
	})
}

var (
	listItem  = regexp.MustCompile(`^([-*+]|\d+[.)]) `)
	tableRule = regexp.MustCompile(`^[\s|:-]+$`)
)

// Generated parts of documents are checked where they come from; the part of CONTRIBUTING.md
// that is generated from the rules quotes what they forbid.
const (
	generatedBegin = "<!-- begin generated: "
	generatedEnd   = "<!-- end generated: "
)

// markdown returns the paragraphs, items, cells and headings outside of code.
func markdown(path, src string) []*unit {
	p := &paragraphs{path: path, kind: Doc}
	fence, comment, generated, blank, inList := "", false, false, true, false
	for i, line := range strings.Split(src, "\n") {
		trimmed := strings.TrimSpace(line)
		number, wasBlank := i+1, blank
		blank = trimmed == ""
		switch {
		case generated:
			generated = !strings.HasPrefix(trimmed, generatedEnd)
			continue
		case strings.HasPrefix(trimmed, generatedBegin):
			p.flush()
			generated = true
			continue
		case fence != "":
			if strings.HasPrefix(trimmed, fence) {
				fence = ""
			}
			continue
		case strings.HasPrefix(trimmed, "```") || strings.HasPrefix(trimmed, "~~~"):
			p.flush()
			fence = trimmed[:3]
			continue
		case comment || strings.HasPrefix(trimmed, "<!--"):
			p.flush()
			comment = !strings.Contains(trimmed, "-->")
			continue
		case blank:
			p.flush()
			continue
		case (strings.HasPrefix(line, "    ") || strings.HasPrefix(line, "\t")) && !inList && (wasBlank || p.current == nil):
			blank = true // so that the next line is code, too
			continue
		}
		switch {
		case strings.HasPrefix(trimmed, "#"):
			p.flush()
			p.add(number, strings.TrimLeft(trimmed, "# "))
			if p.current != nil {
				p.current.heading = true
			}
			p.flush()
			inList = false
		case strings.HasPrefix(trimmed, "|"):
			p.flush()
			if !tableRule.MatchString(trimmed) {
				for cell := range strings.SplitSeq(blankCode(trimmed), "|") {
					p.add(number, cell)
					p.flush()
				}
			}
		case listItem.MatchString(trimmed):
			p.flush()
			inList = true
			p.add(number, listItem.ReplaceAllString(trimmed, ""))
		default:
			if wasBlank && !strings.HasPrefix(line, " ") {
				inList = false
			}
			p.add(number, strings.TrimPrefix(trimmed, "> "))
		}
	}
	p.flush()
	return p.units
}

// shellComment finds the comment of a line, with a rough idea of quotes.
func shellComment(line string) (text string, ok bool) {
	var quote rune
	before := ' '
	for i, r := range line {
		switch {
		case quote != 0:
			if r == quote {
				quote = 0
			}
		case r == '"' || r == '\'':
			if before != '\\' {
				quote = r
			}
		case r == '#' && (before == ' ' || before == '\t'):
			return strings.TrimLeft(line[i:], "# "), true
		}
		before = r
	}
	return "", false
}

var (
	printed     = regexp.MustCompile(`(?:^|[\s;&|(@{])(?:echo|printf|die|fail|say|holds)\s`)
	shellString = regexp.MustCompile(`"(?:[^"\\]|\\.)*"|'[^']*'`)
)

// shell returns the comments of a shell script, Makefile, Caddyfile, Containerfile or
// unit, and the strings that its commands print.
func shell(path, src string) []*unit {
	p := &paragraphs{path: path, kind: Comment}
	for i, line := range strings.Split(src, "\n") {
		if i == 0 && strings.HasPrefix(line, "#!") {
			continue
		}
		comment, ok := shellComment(line)
		whole := strings.HasPrefix(strings.TrimSpace(line), "#")
		if !whole {
			p.flush()
			if printed.MatchString(line) {
				for _, s := range shellString.FindAllString(line, -1) {
					if s = s[1 : len(s)-1]; hasWords(s) {
						p.units = append(p.units, single(path, String, i+1, s))
					}
				}
			}
		}
		if ok {
			p.add(i+1, comment)
			if !whole {
				p.flush()
			}
		}
	}
	p.flush()
	return p.units
}

var twoWords = regexp.MustCompile(`[A-Za-z]{2,}[,;:.]? (?:\S+ )*?[a-z]{2,}`)

// hasWords reports whether a string has at least two words.
func hasWords(s string) bool { return twoWords.MatchString(s) }

var (
	upperThenWord  = regexp.MustCompile(`([A-Z])([A-Z][a-z])`)
	lowerThenUpper = regexp.MustCompile(`([a-z])([A-Z])`)
	notLetters     = regexp.MustCompile(`[^A-Za-z]+`)
)

// words splits a name into its words, in lower case: "HTTPServer2" is "http server".
func words(name string) []string {
	name = lowerThenUpper.ReplaceAllString(upperThenWord.ReplaceAllString(name, "$1 $2"), "$1 $2")
	return strings.Fields(strings.ToLower(notLetters.ReplaceAllString(name, " ")))
}
