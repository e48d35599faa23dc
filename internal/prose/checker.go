package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
)

// Finding is a text that a rule forbids.
type Finding struct {
	Path    string
	Line    int
	Rule    *Rule
	Text    string // the forbidden part
	Context string // the paragraph, string or name around it
}

func (f Finding) String() string {
	return fmt.Sprintf("%s:%d: prose/%s: %q; write %s", f.Path, f.Line, f.Rule.ID, f.Text, f.Rule.Instead)
}

// checker applies the rules to files. It is safe for concurrent use.
type checker struct {
	terms map[string]bool // of the glossary, in lower case
}

// own are files that quote what the rules forbid.
var own = []string{folder + "/rules.go", folder + "/rules_test.go"}

var (
	testdata   = regexp.MustCompile(`(^|/)testdata/`)
	shebang    = regexp.MustCompile(`^#!.*sh`)
	shellNames = regexp.MustCompile(`^(Makefile|Caddyfile.*|Containerfile|.*\.service|.*\.sh)$`)
)

// file returns what is found in a file.
func (c *checker) file(name string, src []byte) ([]Finding, error) {
	if slices.Contains(own, name) || testdata.MatchString(name) {
		return nil, nil
	}
	base := path.Base(name)
	units := []*unit{single(name, File, 1, strings.TrimSuffix(base, path.Ext(base)))}
	var found []Finding
	switch {
	case strings.HasSuffix(name, ".go"):
		s, err := golang(name, src)
		if err != nil {
			return nil, err
		}
		if s == nil {
			return nil, nil
		}
		units, found = append(units, s.units...), s.found
	case strings.HasSuffix(name, ".md"):
		units = append(units, markdown(name, string(src))...)
	case strings.HasPrefix(name, "docs/pictures/") && strings.HasSuffix(name, ".txt"):
		for i, line := range strings.Split(string(src), "\n") {
			units = append(units, single(name, Doc, i+1, line))
		}
	case shellNames.MatchString(base) || shebang.Match(src):
		units = append(units, shell(name, string(src))...)
	default:
		return nil, nil
	}
	for _, u := range units {
		found = append(found, c.unit(u)...)
	}
	return found, nil
}

// unit applies the rules that have a pattern or words.
func (c *checker) unit(u *unit) []Finding {
	var found []Finding
	lower := asciiLower(u.text)
	var name []string
	isName := u.kind&(Name|Local|File) != 0
	if isName {
		name = words(u.text)
		lower = strings.Join(name, " ")
	}
	for _, r := range rules {
		if r.In&u.kind == 0 {
			continue
		}
		if r.Words != nil {
			for i, w := range name {
				if r.Words[w] && !c.terms[w] && (r.Unless == nil || !r.Unless(match{unit: u, words: name, index: i})) {
					found = append(found, Finding{u.path, u.line(0), r, u.text, u.text})
					break
				}
			}
			continue
		}
		if r.Pattern == nil {
			continue
		}
		for _, at := range r.Pattern.FindAllStringIndex(lower, -1) {
			m := match{unit: u, before: lower[:at[0]], text: lower[at[0]:at[1]], after: lower[at[1]:]}
			term := strings.Trim(m.text, " *")
			if c.terms[term] || c.terms[strings.TrimSuffix(term, "s")] || r.Unless != nil && r.Unless(m) {
				continue
			}
			if isName {
				found = append(found, Finding{u.path, u.line(0), r, u.text, u.text})
				break
			}
			start := at[0] + len(m.text) - len(strings.TrimLeft(m.text, " .;:("))
			found = append(found, Finding{u.path, u.line(start), r, strings.TrimSpace(u.text[start:at[1]]), u.text})
		}
	}
	return found
}

// asciiLower lowers the letters of ASCII only, so that offsets stay valid.
func asciiLower(s string) string {
	b := []byte(s)
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return string(b)
}

// maxMethods bounds how many unexported methods may share a name.
const maxMethods = 12

// ordinary names of methods mean the same everywhere, as in the standard library.
var ordinary = wordSet(`accept add close dial flush get lock next open read remove reset run send serve set start stop unlock wait write`)

// dropRare removes the findings of methods whose names are not too frequent.
func dropRare(found []Finding) []Finding {
	methods := map[string]int{}
	for _, f := range found {
		if f.Rule == ruleMethodName {
			methods[f.Text]++
		}
	}
	return slices.DeleteFunc(found, func(f Finding) bool { return f.Rule == ruleMethodName && methods[f.Text] <= maxMethods })
}

// glossaryTerm is a heading of the second level.
var glossaryTerm = regexp.MustCompile(`(?m)^## (.+)$`)

// readGlossary returns the terms of the glossary. A heading may have several: "wake, sleep".
func readGlossary(file string) (map[string]bool, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	terms := map[string]bool{}
	for _, m := range glossaryTerm.FindAllStringSubmatch(string(b), -1) {
		for term := range strings.SplitSeq(m[1], ",") {
			terms[strings.ToLower(strings.TrimSpace(term))] = true
		}
	}
	return terms, nil
}
