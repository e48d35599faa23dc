package guest

import (
	"fmt"
	"path"
	"strings"
	"unicode/utf8"
)

// Bounds of Patterns. With a path of the kernel's maximum length a match takes less than a
// millisecond.
const (
	MaxPatterns = 32
	MaxPattern  = 256 // bytes of one
)

// anyPath is the component of a pattern that matches any number of components.
const anyPath = "**"

// Patterns select paths below a directory. The components of a pattern are as in path.Match, or
// ** for any number of components. A pattern without a slash matches at any depth, others
// match from the directory on. A pattern that matches a directory matches all below it. The
// zero value matches nothing.
type Patterns struct {
	parsed [][]string
}

// PatternError refuses a pattern.
type PatternError struct {
	Index  int // in the list
	Reason string
	Want   string // the remedy
}

func (e *PatternError) Error() string { return e.Reason + "; " + e.Want }

// ParsePatterns parses a list of patterns. Errors: *PatternError for the first invalid one.
func ParsePatterns(list []string) (p Patterns, err error) {
	if len(list) > MaxPatterns {
		return Patterns{}, &PatternError{MaxPatterns, fmt.Sprintf("the list has %d patterns", len(list)), fmt.Sprintf("use at most %d", MaxPatterns)}
	}
	for i, text := range list {
		components, reason, want := parsePattern(text)
		if reason != "" {
			return Patterns{}, &PatternError{i, fmt.Sprintf("pattern %q %s", Shorten(text, 80), reason), want}
		}
		p.parsed = append(p.parsed, components)
	}
	return p, nil
}

func parsePattern(text string) (components []string, reason, want string) {
	const example = "use a pattern such as *.go, src/**/*.ts or /build"
	switch {
	case len(text) > MaxPattern:
		return nil, fmt.Sprintf("has %d bytes", len(text)), fmt.Sprintf("use at most %d", MaxPattern)
	case !utf8.ValidString(text) || strings.IndexByte(text, 0) >= 0:
		return nil, "is not text", "use ? or * for bytes that are not UTF-8"
	}
	relative := strings.TrimPrefix(strings.TrimSuffix(text, "/"), "/")
	components = strings.Split(relative, "/")
	if len(components) == 1 && relative != anyPath && !strings.HasPrefix(text, "/") {
		components = []string{anyPath, relative}
	}
	for i, c := range components {
		switch _, err := path.Match(c, ""); {
		case c == "":
			return nil, "has an empty component", example
		case c == ".", c == "..":
			return nil, "has the component " + c, "patterns are relative to the watched directory; " + example
		case c != anyPath && strings.Contains(c, anyPath):
			return nil, "has ** within a component", "use ** as a whole component, such as src/**/*.ts"
		case err != nil:
			return nil, "has an incomplete [ or \\", `write [a-z] for a class of characters, and \[ for the character`
		case c == anyPath && i > 0 && components[i-1] == anyPath:
			return nil, "has ** twice in a row", "use it once"
		}
	}
	return components, "", ""
}

// Empty reports whether the list has no patterns.
func (p Patterns) Empty() bool { return len(p.parsed) == 0 }

// Match reports whether a pattern matches a path below the directory, without a leading slash.
func (p Patterns) Match(below string) bool {
	if len(p.parsed) == 0 {
		return false
	}
	parts := strings.Split(below, "/")
	for _, components := range p.parsed {
		if matchComponents(components, parts) {
			return true
		}
	}
	return false
}

// matchComponents reports whether components match the beginning of parts. After a mismatch it
// only tries the next place for the last ** that it has passed: as with stars in a text, no
// earlier place can succeed where that one fails.
func matchComponents(components, parts []string) bool {
	retry, next := -1, 0 // the component after the last **, and its next place
	for i, at := 0, 0; ; {
		if i == len(components) {
			return true
		}
		if components[i] == anyPath {
			if i == len(components)-1 {
				return at < len(parts)
			}
			i++
			retry, next = i, at
			continue
		}
		if at < len(parts) {
			if ok, err := path.Match(components[i], parts[at]); ok && err == nil {
				i, at = i+1, at+1
				continue
			}
		}
		if retry < 0 || next >= len(parts) {
			return false
		}
		next++
		i, at = retry, next
	}
}

// Anchored reports whether a match depends on more than the name of a file or directory.
func (p Patterns) Anchored() bool {
	for _, components := range p.parsed {
		if len(components) != 2 || components[0] != anyPath || components[1] == anyPath {
			return true
		}
	}
	return false
}
