package main

import (
	"fmt"
	"strings"
)

// table returns the rules for CONTRIBUTING.md.
func table() string {
	var b strings.Builder
	b.WriteString("| rule | instead of | write |\n|---|---|---|\n")
	for _, r := range rules {
		id := "`" + r.ID + "`"
		if r.Warn {
			id += " (warns)"
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", id, example(r, r.Bad), example(r, r.Good))
	}
	return b.String()
}

// example returns an example as Markdown: code in a code span, prose as it is.
func example(r *Rule, s string) string {
	if r.In&(Comment|Doc) != 0 || strings.Contains(s, "`") {
		return s
	}
	return "`" + s + "`"
}

// withTable returns a document with the table between its markers.
func withTable(document string) (string, error) {
	before, rest, ok := strings.Cut(document, generatedBegin+"\n")
	_, after, ok2 := strings.Cut(rest, generatedEnd)
	if !ok || !ok2 {
		return "", fmt.Errorf("no lines %q and %q", generatedBegin, generatedEnd)
	}
	return before + generatedBegin + "\n" + table() + generatedEnd + after, nil
}
