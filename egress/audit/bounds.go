package audit

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Limits on the fields of an entry. Most of its texts come from the sandbox or a
// policy.
const (
	maxHost   = 253  // bytes of a name, RFC 1035
	maxMethod = 32   // bytes; the longest registered method has 17
	maxPath   = 1024 // bytes; with longer paths a few requests would fill the ring
	maxReason = 1000 // bytes, as in a rule
	maxName   = 200  // bytes of a rule, policy, digest, secret or flow
	maxNote   = 256  // bytes, as in the ABI
	maxList   = 48   // entries each of policies, secrets and notes: three layers of 16 policies
)

// bound truncates long fields and copies all texts: a path may be a substring of
// a request line of a megabyte, and would keep the whole line in memory.
func (e *Entry) bound() {
	e.Flow = clean(e.Flow, maxName)
	e.Host = clean(e.Host, maxHost)
	e.Method = clean(e.Method, maxMethod)
	path, _, _ := strings.Cut(e.Path, "?")
	e.Path = clean(path, maxPath)
	e.Rule = clean(e.Rule, maxName)
	e.Reason = clean(e.Reason, maxReason)
	e.Policies = slices.Clone(e.Policies[:min(len(e.Policies), maxList)])
	for i, p := range e.Policies {
		e.Policies[i] = Policy{clean(p.Name, maxName), clean(p.Digest, maxName)}
	}
	e.Secrets = cleanAll(e.Secrets, maxName)
	e.Notes = cleanAll(e.Notes, maxNote)
}

func cleanAll(texts []string, limit int) []string {
	all := slices.Clone(texts[:min(len(texts), maxList)])
	for i, text := range all {
		all[i] = clean(text, limit)
	}
	return all
}

// clean returns a copy of s of at most limit bytes, with unprintable characters
// replaced by U+FFFD: a path may contain a line break that starts a forged line, or
// terminal escape sequences.
func clean(s string, limit int) string {
	head := s[:min(len(s), limit)]
	for i := range len(head) {
		if c := head[i]; c < ' ' || c > '~' {
			return printable(s, limit)
		}
	}
	return strings.Clone(head)
}

func printable(s string, limit int) string {
	var b strings.Builder
	for _, r := range s {
		if !unicode.IsPrint(r) {
			r = utf8.RuneError // three bytes, possibly more than r had
		}
		if b.Len()+utf8.RuneLen(r) > limit {
			break
		}
		b.WriteRune(r)
	}
	return b.String()
}
