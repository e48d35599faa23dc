package audit

import "strings"

// Filter selects entries. Empty fields match all entries.
type Filter struct {
	Kind    Kind
	Verdict Verdict
	// Host is a name, or `*.example.com` for all names below it.
	Host string
	// After omits the entries up to and including this Seq.
	After uint64
}

func (f *Filter) match(e *Entry) bool {
	if e.Seq <= f.After || f.Kind != "" && e.Kind != f.Kind || f.Verdict != "" && e.Verdict != f.Verdict {
		return false
	}
	if below, ok := strings.CutPrefix(f.Host, "*"); ok {
		return len(e.Host) > len(below) && strings.HasSuffix(e.Host, below)
	}
	return f.Host == "" || e.Host == f.Host
}
