// Package gitignore matches paths against patterns in the syntax of gitignore(5). The patterns may be hostile: the
// time of a match is polynomial in the lengths of pattern and path, which are bounded.
package gitignore

import (
	"bytes"
	"errors"
	"strings"

	"github.com/bmatcuk/doublestar/v4"
)

const (
	// MaxFile is the maximum size of a file with patterns in bytes. The .gitignore files of large projects have 10 KiB.
	MaxFile = 64 << 10
	// MaxPattern is the maximum length of a pattern in bytes.
	MaxPattern = 1 << 10
	// MaxPath is the maximum length of a path in bytes, which is git's. No pattern matches longer ones.
	MaxPath = 4096
	// MaxPatterns is the maximum number of patterns of a file.
	MaxPatterns = 1000
)

// Pattern is a line of a .gitignore file.
type Pattern struct {
	glob       string // for doublestar
	negated    bool   // the pattern includes what an earlier one ignores
	folderOnly bool
	anywhere   bool // glob is for the last name of a path
}

// Patterns are the lines of a .gitignore file. The last matching pattern decides.
type Patterns []Pattern

// Parse parses a line. The error completes a sentence that begins with the line, such as "is a comment".
func Parse(line string) (Pattern, error) {
	var p Pattern
	if len(line) > MaxPattern {
		return p, errors.New("is too long")
	}
	if strings.HasPrefix(line, "#") {
		return p, errors.New("is a comment")
	}
	line = trimSpaces(line)
	line, p.negated = strings.CutPrefix(line, "!")
	line, p.folderOnly = strings.CutSuffix(line, "/")
	anchored, hasSlash := strings.CutPrefix(line, "/")
	if anchored == "" {
		return p, errors.New("is empty")
	}
	p.anywhere = !hasSlash && !strings.Contains(anchored, "/")
	glob, slash, err := translate(anchored)
	if err != nil {
		return p, err
	}
	if slash && !p.anywhere {
		return p, errors.New("has a class of characters with a slash")
	}
	if inner, ok := strings.CutSuffix(glob, "/**"); ok { // git matches what the folder contains, not the folder
		glob = inner + "/**/*"
	}
	if !doublestar.ValidatePattern(glob) {
		return p, errors.New("is not a valid pattern")
	}
	p.glob = glob
	return p, nil
}

// trimSpaces removes trailing spaces, except one that a backslash quotes.
func trimSpaces(line string) string {
	trimmed := strings.TrimRight(line, " ")
	escapes := len(trimmed) - len(strings.TrimRight(trimmed, `\`))
	if escapes%2 == 1 && len(trimmed) < len(line) {
		return trimmed + " "
	}
	return trimmed
}

// translate converts a pattern of git to one of doublestar, which also has alternatives in braces, and requires that
// a bracket in a class is quoted. slash reports whether a class contains a slash, which a class of git never matches.
func translate(pattern string) (glob string, slash bool, err error) {
	var out strings.Builder
	for i := 0; i < len(pattern); i++ {
		switch c := pattern[i]; c {
		case '\\':
			if i++; i == len(pattern) {
				return "", false, errors.New("ends with a backslash")
			}
			out.WriteByte('\\')
			out.WriteByte(pattern[i])
		case '{', '}':
			out.WriteByte('\\')
			out.WriteByte(c)
		case '[':
			length, contains, err := translateClass(&out, pattern[i:])
			if err != nil {
				return "", false, err
			}
			slash = slash || contains
			i += length - 1
		default:
			out.WriteByte(c)
		}
	}
	return out.String(), slash, nil
}

// translateClass converts the class of characters at the beginning of pattern, and returns its length.
func translateClass(out *strings.Builder, pattern string) (length int, slash bool, err error) {
	begin := out.Len()
	out.WriteByte('[')
	i := 1
	negated := i < len(pattern) && (pattern[i] == '!' || pattern[i] == '^')
	if negated {
		out.WriteString("^/")
		i++
	}
	for first := i; i < len(pattern); i++ {
		switch c := pattern[i]; {
		case c == ']' && i > first:
			out.WriteByte(']')
			slash = !negated && doublestar.MatchUnvalidated(out.String()[begin:], "/")
			return i + 1, slash, nil
		case c == '[' && i+1 < len(pattern) && pattern[i+1] == ':':
			return 0, false, errors.New("has a named class of characters such as [[:digit:]]")
		case c == '\\' && i+1 < len(pattern):
			i++
			out.WriteByte('\\')
			out.WriteByte(pattern[i])
		case c == '[' || c == ']' || c == '!' || c == '^' || c == '{' || c == '}':
			out.WriteByte('\\')
			out.WriteByte(c)
		default:
			out.WriteByte(c)
		}
	}
	return 0, false, errors.New("has a bracket that is not closed")
}

// ParseFile parses a .gitignore file. Like git, it skips comments, empty lines and invalid patterns. A file with more
// than MaxFile bytes or MaxPatterns patterns has none, because a part of them could ignore files that the whole file
// includes.
func ParseFile(content []byte) Patterns {
	if len(content) > MaxFile {
		return nil
	}
	var patterns Patterns
	for line := range bytes.Lines(bytes.TrimPrefix(content, []byte("\ufeff"))) {
		line = bytes.TrimSuffix(line, []byte("\n"))
		p, err := Parse(string(bytes.TrimSuffix(line, []byte("\r"))))
		if err != nil {
			continue
		}
		if len(patterns) == MaxPatterns {
			return nil
		}
		patterns = append(patterns, p)
	}
	return patterns
}

// Match matches a path that is relative to the folder of the patterns. matched reports whether a pattern decides, and
// ignored what it decides. The caller matches the folders that contain the path before, because patterns cannot include
// a path in an ignored folder.
func (all Patterns) Match(path string, folder bool) (ignored, matched bool) {
	if len(path) > MaxPath {
		return false, false
	}
	name := path[strings.LastIndexByte(path, '/')+1:]
	for i := len(all) - 1; i >= 0; i-- {
		p := &all[i]
		if p.folderOnly && !folder {
			continue
		}
		subject := path
		if p.anywhere {
			subject = name
		}
		if doublestar.MatchUnvalidated(p.glob, subject) {
			return !p.negated, true
		}
	}
	return false, false
}
