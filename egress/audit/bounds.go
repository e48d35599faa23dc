package audit

import (
	"strings"
	"unicode"
	"unicode/utf8"
	"unsafe"
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
	if n := len(e.Policies); n > 0 {
		all := make([]Policy, min(n, maxList))
		for i := range all {
			all[i] = Policy{clean(e.Policies[i].Name, maxName), clean(e.Policies[i].Digest, maxName)}
		}
		e.Policies = all
	}
	e.Secrets = cleanAll(e.Secrets, maxName)
	e.Notes = cleanAll(e.Notes, maxNote)
}

func cleanAll(texts []string, most int) []string {
	if len(texts) == 0 {
		return nil
	}
	all := make([]string, min(len(texts), maxList))
	for i := range all {
		all[i] = clean(texts[i], most)
	}
	return all
}

// clean returns a copy of s of at most most bytes, with unprintable characters
// replaced by U+FFFD: a path may contain a line break that starts a forged line, or
// terminal escape sequences.
func clean(s string, most int) string {
	head := s[:min(len(s), most)]
	for i := range len(head) {
		if c := head[i]; c < ' ' || c > '~' {
			return replaced(s, most)
		}
	}
	return strings.Clone(head)
}

func replaced(s string, most int) string {
	var b strings.Builder
	for _, r := range s {
		if !unicode.IsPrint(r) {
			r = utf8.RuneError // three bytes, possibly more than r had
		}
		if b.Len()+utf8.RuneLen(r) > most {
			break
		}
		b.WriteRune(r)
	}
	return b.String()
}

// size returns the approximate memory of an entry, in bytes.
func (e *Entry) size() int {
	n := int(unsafe.Sizeof(*e)) + len(e.Flow) + len(e.Host) + len(e.Method) + len(e.Path) + len(e.Rule) + len(e.Reason)
	for _, p := range e.Policies {
		n += int(unsafe.Sizeof(p)) + len(p.Name) + len(p.Digest)
	}
	for _, list := range [][]string{e.Secrets, e.Notes} {
		for _, s := range list {
			n += int(unsafe.Sizeof(s)) + len(s)
		}
	}
	return n
}
