package guest

import (
	"errors"
	"path"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestPatternsMatch(t *testing.T) {
	for _, tt := range []struct {
		pattern, path string
		want          bool
	}{
		{"*.go", "main.go", true},
		{"*.go", "cmd/doze/main.go", true},
		{"*.go", "main.gob", false},
		{"node_modules", "node_modules", true},
		{"node_modules", "web/node_modules", true},
		{"node_modules", "web/node_modules/a/b.js", true}, // below a match
		{"node_modules", "node_modules2", false},
		{"/build", "build", true},
		{"/build", "build/out.o", true},
		{"/build", "web/build", false},
		{"build/", "web/build", true},
		{"src/*.ts", "src/a.ts", true},
		{"src/*.ts", "src/a/b.ts", false},
		{"src/*.ts", "web/src/a.ts", false},
		{"src/**/*.ts", "src/a.ts", true},
		{"src/**/*.ts", "src/a/b/c.ts", true},
		{"src/**/*.ts", "src/a/b/c.js", false},
		{"src/**", "src", false},
		{"src/**", "src/a", true},
		{"src/**", "src/a/b", true},
		{"**/test/**", "test", false},
		{"**/test/**", "a/test/b", true},
		{"**/a/b", "a/x/a/b", true},
		{"**/a/**/b", "a/x/a/y/b", true},
		{"**/a/**/b", "b/a", false},
		{"**", "anything/at/all", true},
		{"a?c", "abc", true},
		{"a?c", "a/c", false},
		{"[a-c]*", "bee", true},
		{"[^a-c]*", "bee", false},
		{`\*.go`, "*.go", true},
		{`\*.go`, "a.go", false},
		{"a?c", "a\xffc", true},
		{"*", "new\nline", true},
		{".git", ".gitignore", false},
	} {
		p, err := ParsePatterns([]string{"never/ever/this", tt.pattern})
		if err != nil {
			t.Fatalf("%s: %v", tt.pattern, err)
		}
		if got := p.Match(tt.path); got != tt.want {
			t.Errorf("%q matches %q: %v, want %v", tt.pattern, tt.path, got, tt.want)
		}
	}
	if (Patterns{}).Match("a") || !(Patterns{}).Empty() {
		t.Error("no patterns match a path")
	}
}

func TestPatternsThatDependOnThePlaceAreAnchored(t *testing.T) {
	for pattern, want := range map[string]bool{"*.go": false, "node_modules": false, "**/a": false, "/a": true, "a/b": true, "**/a/b": true, "a/**": true, "**": true} {
		p, err := ParsePatterns([]string{pattern})
		if err != nil || p.Anchored() != want {
			t.Errorf("%s: %v, %v", pattern, p.Anchored(), err)
		}
	}
}

func TestInvalidPatternsAreRefused(t *testing.T) {
	for _, tt := range []struct{ pattern, hint string }{
		{"", "empty component"},
		{"/", "empty component"},
		{"a//b", "empty component"},
		{"../a", "relative to the watched directory"},
		{"./a", "relative to the watched directory"},
		{"a**/b", "a whole component"},
		{"**/**", "use it once"},
		{"[a", "incomplete"},
		{`a\`, "incomplete"},
		{"a\x00", "not text"},
		{"\xff", "not UTF-8"},
		{strings.Repeat("a", MaxPattern+1), "at most 256"},
	} {
		_, err := ParsePatterns([]string{"*.go", tt.pattern})
		var invalid *PatternError
		if !errors.As(err, &invalid) || invalid.Index != 1 || !strings.Contains(err.Error(), tt.hint) {
			t.Errorf("%q: %v, want a mention of %q", tt.pattern, err, tt.hint)
		}
	}
	if _, err := ParsePatterns(make([]string, MaxPatterns+1)); err == nil {
		t.Error("too many patterns are accepted")
	}
}

// expression translates a parsed pattern into a regular expression.
func expression(t *testing.T, components []string) *regexp.Regexp {
	var b strings.Builder
	b.WriteString(`^`)
	for i, c := range components {
		switch {
		case c == anyPath && i == len(components)-1:
			b.WriteString(`[^/]*`)
		case c == anyPath:
			b.WriteString(`(?:[^/]*/)*`)
			continue
		default:
			for _, r := range c {
				switch r {
				case '*':
					b.WriteString(`[^/]*`)
				case '?':
					b.WriteString(`[^/]`)
				default:
					b.WriteString(regexp.QuoteMeta(string(r)))
				}
			}
		}
		if i < len(components)-1 {
			b.WriteString(`/`)
		}
	}
	b.WriteString(`(?:/|$)`)
	return regexp.MustCompile(`(?s)` + b.String())
}

func FuzzPatterns(f *testing.F) {
	f.Add("src/**/*.ts", "src/a/b/c.ts")
	f.Add("**/a/**/b", "a/x/a/y/b/c")
	f.Add("[a-z]*", "x\xff")
	f.Add(strings.Repeat("a/**/", 50)+"b", strings.Repeat("a/", 2000)+"c")
	f.Fuzz(func(t *testing.T, pattern, name string) {
		p, err := ParsePatterns([]string{pattern})
		if err != nil {
			var invalid *PatternError
			if !errors.As(err, &invalid) || invalid.Want == "" || len(err.Error()) > 1000 {
				t.Fatalf("unhelpful error %v", err)
			}
			return
		}
		got := p.Match(name)
		for _, c := range p.parsed[0] {
			if _, err := path.Match(c, name); err != nil {
				t.Fatalf("%q was accepted: %v", c, err)
			}
		}
		if strings.ContainsAny(pattern, `[\`) || !utf8.ValidString(name) || len(name) > 4096 {
			return // the translation has no classes
		}
		if want := expression(t, p.parsed[0]).MatchString(name); got != want {
			t.Fatalf("%q matches %q: %v, want %v", pattern, name, got, want)
		}
	})
}
