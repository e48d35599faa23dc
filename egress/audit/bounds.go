package audit

import (
	"strings"
	"unicode"
	"unicode/utf8"
	"unsafe"
)

// How much of an entry is kept. Most of its texts are the sandbox's or a
// policy's.
const (
	maxHost   = 253  // bytes of a name, RFC 1035
	maxMethod = 32   // bytes; the longest registered one has 17
	maxPath   = 1024 // bytes; with longer ones a few requests would fill the ring
	maxReason = 1000 // bytes, as of a rule
	maxName   = 200  // bytes of a rule, policy, digest, secret or flow
	maxNote   = 256  // bytes, as the ABI has them
	maxList   = 48   // policies, secrets and notes each: three layers of 16 policies
)

// bound cuts what is too long and copies what it keeps: a path may be a part of
// a request line of a megabyte, and would keep it in memory.
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

// clean returns a copy of at most so many bytes, in which what is no printable
// character is replaced: a path may hold a line break that begins a forged line,
// or what a terminal obeys.
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
			r = utf8.RuneError // three bytes, where there may have been one
		}
		if b.Len()+utf8.RuneLen(r) > most {
			break
		}
		b.WriteRune(r)
	}
	return b.String()
}

// size is about what an entry takes in memory.
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
