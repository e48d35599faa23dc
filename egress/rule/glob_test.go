package rule

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

// expression is a pattern as a regular expression: what a glob means, said in
// another way.
func expression(pattern string, separator byte) *regexp.Regexp {
	var b strings.Builder
	b.WriteString(`\A(?s:`)
	for rest := pattern; rest != ""; {
		literal, after, found := strings.Cut(rest, "*")
		b.WriteString(regexp.QuoteMeta(literal))
		if !found {
			break
		}
		rest = strings.TrimLeft(after, "*")
		if separator == 0 || strings.HasPrefix(after, "*") {
			b.WriteString(`.*`)
		} else {
			b.WriteString(`[^` + regexp.QuoteMeta(string(separator)) + `]*`)
		}
	}
	return regexp.MustCompile(b.String() + `)\z`)
}

func matchesGlob(t *testing.T, pattern, text string, separator byte) bool {
	t.Helper()
	g, err := compileGlob(pattern, separator)
	if err != nil {
		t.Fatal(err)
	}
	left := effort(maxSteps)
	return g.match(text, &left)
}

func TestGlobsMatchWhatTheirExpressionsDo(t *testing.T) {
	patterns := []string{
		"", "/", "/a", "/a/*", "/a/**", "**", "*", "/*", "/*/b", "/**/b", "/a*b", "/a*b*c", "/a**b*c", "/a*b**c", "*a*a*", "**a/*a**",
		"/a/*/c/**/e", "/a***b", "/aa*aa", "*/b/*", "/a*/b*/c*", "**/a", "a*b",
	}
	texts := []string{""}
	for length := range 6 { // every text of these characters
		for _, prefix := range texts[max(0, len(texts)-pow(4, length)):] {
			for _, c := range "/abc" {
				texts = append(texts, prefix+string(c))
			}
		}
	}
	for _, pattern := range patterns {
		for _, separator := range []byte{'/', 0} {
			want := expression(pattern, separator)
			for _, text := range texts {
				if got := matchesGlob(t, pattern, text, separator); got != want.MatchString(text) {
					t.Fatalf("%q and %q with separator %q: %v", pattern, text, separator, got)
				}
			}
		}
	}
}

func pow(base, exponent int) int {
	n := 1
	for range exponent {
		n *= base
	}
	return n
}

func FuzzGlob(f *testing.F) {
	f.Add("/a/*/c/**/e", "/a/b/c/d/e")
	f.Add("**a*\xffa**", "/a/\xff")
	f.Fuzz(func(t *testing.T, pattern, text string) {
		for _, separator := range []byte{'/', 0} {
			g, err := compileGlob(pattern, separator)
			if countStars(pattern) > MaxStars != (err != nil) {
				t.Fatalf("%q: %v", pattern, err)
			}
			if err != nil || !utf8.ValidString(pattern) || !utf8.ValidString(text) {
				continue // expressions know of characters, globs of bytes
			}
			left := effort(maxSteps)
			if got := g.match(text, &left); got != expression(pattern, separator).MatchString(text) && !left.exhausted() {
				t.Errorf("%q and %q: %v", pattern, text, got)
			}
		}
	})
}

// steps that a table takes for a request.
func steps(l *Layer, r Request) int {
	left := effort(maxSteps)
	for _, c := range l.rules {
		c.matches(&r, readings(r.Path), &left)
	}
	return maxSteps - int(left)
}

// The work for a request grows with its path, and not with its square.
func TestWorkForAPathIsLinear(t *testing.T) {
	for _, pattern := range []string{"/**a*a**a*a**b", "/*a*a*a*a*a*a*a*b", "/" + strings.Repeat("**a", 15) + "/b", "/**" + strings.Repeat("a", 300) + "**b"} {
		l, err := Compile(Node, []Rule{{Name: "a", Paths: []string{pattern}, Action: Deny}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		path := func(n int) Request {
			return Request{Host: "a.example", Port: 443, HTTPS: true, Path: "/" + strings.Repeat("a", n) + "c/b"}
		}
		short, long := steps(l, path(1000)), steps(l, path(10_000))
		if short == 0 || long > 11*short {
			t.Errorf("%.40s: %d steps for 1,000 bytes, %d for 10,000", pattern, short, long)
		}
	}
}

// Most patterns do not fit where they begin or end, whatever is between.
func TestMismatchedPrefixesAndSuffixesCostLittle(t *testing.T) {
	for _, pattern := range []string{"/b/**a**a**", "/**a**a**/b"} {
		l, err := Compile(Node, []Rule{{Name: "a", Paths: []string{pattern}, Action: Deny}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if n := steps(l, Request{Host: "a.example", Port: 443, Path: "/" + strings.Repeat("a", 10_000)}); n > 2 {
			t.Errorf("%s takes %d steps", pattern, n)
		}
	}
}

// starHeavy are as many rules with as many stars as a layer may have.
func starHeavy(action Action) []Rule {
	rules := make([]Rule, MaxRules)
	for i := range rules {
		rules[i] = Rule{Name: fmt.Sprint("r", i), Paths: []string{"/**a*a**b*"}, Action: action}
	}
	return rules
}

func TestWorkForARequestIsBounded(t *testing.T) {
	for _, action := range []Action{Allow, Deny} {
		l, err := Compile(Owner, starHeavy(action), nil)
		if err != nil {
			t.Fatal(err)
		}
		tab := &Table{Default: AllowPublic, Layers: [3]*Layer{nil, l}}
		r := request(t, "GET https://a.example/")
		for _, c := range []struct {
			length int
			reason string
		}{{200, ""}, {100_000, "too long to be compared"}} {
			r.Path = "/" + strings.Repeat("a", c.length)
			d := tab.Decide(r)
			if (d.Verdict == VerdictDeny) != (c.reason != "") || !strings.Contains(d.Reason, c.reason) {
				t.Errorf("%s, %d bytes: got %+v", action, c.length, d)
			}
		}
	}
}

func TestStarsAndLengthOfPatternsAreBounded(t *testing.T) {
	stars := func(n int) string { return "/" + strings.Repeat("*a", n) }
	for name, c := range map[string]struct {
		rules []Rule
		want  string // empty: they fit
	}{
		"as many stars as fit":      {[]Rule{{Name: "a", Paths: []string{stars(MaxStars)}, Action: Allow}}, ""},
		"stars of a path":           {[]Rule{{Name: "a", Paths: []string{stars(MaxStars + 1)}, Action: Allow}}, "rule 1 (a): paths[0]"},
		"stars of a header":         {[]Rule{{Name: "a", Headers: map[string]string{"x-a": stars(MaxStars + 1)}, Action: Allow}}, "rule 1 (a): headers[x-a]"},
		"two stars that are one":    {[]Rule{{Name: "a", Paths: []string{strings.ReplaceAll(stars(MaxStars), "*", "**")}, Action: Allow}}, ""},
		"stars of all rules":        {many(MaxGlobStars/MaxStars+1, stars(MaxStars)), "4016 stars"},
		"as many stars as all have": {many(MaxGlobStars/MaxStars, stars(MaxStars)), ""},
		"length of all rules":       {many(MaxGlobText/1000+1, "/"+strings.Repeat("a", 999)), "132000 bytes"},
		"as long as all may be":     {many(MaxGlobText/1000, "/"+strings.Repeat("a", 999)), ""},
	} {
		_, err := Compile(Node, c.rules, nil)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", name, err, c.want)
		}
	}
}

// many are rules with the same path.
func many(n int, path string) []Rule {
	rules := make([]Rule, n)
	for i := range rules {
		rules[i] = Rule{Name: fmt.Sprint("r", i), Paths: []string{path}, Action: Allow}
	}
	return rules
}
