package audit

import "strings"

// Filter says which entries somebody wants. What is empty matches all.
type Filter struct {
	Kind    Kind
	Verdict Verdict
	// Host is a name, or `*.example.com` for all below it.
	Host string
	// After leaves out the entries up to this Seq.
	After uint64
	// Limit is how many entries there are at most: the latest. 0 is no limit.
	Limit int
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
