package main

import (
	"bytes"
	"math/bits"
	"strings"
)

// finder recognizes one kind of text. It is written by hand: a regular expression over a body
// of a megabyte exceeds the time limit of policies.
type finder struct {
	name string
	// marks are the characters at which at is called; with word, only at the beginning of
	// a word.
	marks string
	word  bool
	// at returns the span of the text to which the mark at i belongs, if it recognizes one. It
	// begins at from or later.
	at func(body []byte, from, i int) (start, end int, ok bool)
}

const (
	digits  = "0123456789"
	letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)

var finders = []finder{
	{"aws-key", firstOf(awsPrefixes), true, atAWSKey},
	{"card", digits, true, atCard},
	{"email", "@", false, atEmail},
	{"private-key", "-", false, atPrivateKey},
	{"token", firstOf(tokenPrefixes), true, atToken},
}

// span is a text that was found.
type span struct {
	start, end int
	name       string
}

// maxSpans bounds the findings: a body with more is not an accident.
const maxSpans = 10_000

// find returns the spans that the finders recognize, in one pass and in order, without
// overlap. The first ones win. It stops at maxSpans.
func find(body []byte, finders []finder) (found []span) {
	// The finders to call at a character: bit i is finders[i]. Most characters have none, so
	// they cost only this look-up.
	var marked [256]uint8
	var words uint8
	for i, f := range finders {
		for _, c := range []byte(f.marks) {
			marked[c] |= 1 << i
		}
		if f.word {
			words |= 1 << i
		}
	}
	from := 0
	for i := 0; i < len(body); i++ {
		called := marked[body[i]]
		if called == 0 {
			continue
		}
		if i > 0 && wordTable[body[i-1]] {
			called &^= words
		}
		for ; called != 0; called &= called - 1 {
			f := &finders[bits.TrailingZeros8(called)]
			if start, end, ok := f.at(body, from, i); ok {
				if found = append(found, span{start, end, f.name}); len(found) == maxSpans {
					return found
				}
				from, i = end, end-1
				break
			}
		}
	}
	return found
}

func known() string {
	names := make([]string, len(finders))
	for i, f := range finders {
		names[i] = f.name
	}
	return strings.Join(names, ", ")
}

// Classes of characters.
var (
	wordTable  = tableOf(digits + letters)
	emailTable = tableOf(digits + letters + ".!#$%&'*+/=?^_`{|}~-")
)

func tableOf(characters string) (table [256]bool) {
	for _, c := range []byte(characters) {
		table[c] = true
	}
	return table
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }
func isWord(c byte) bool  { return wordTable[c] }

// extend returns the end of the characters from i on that ok accepts.
func extend(body []byte, i int, ok func(byte) bool) int {
	for i < len(body) && ok(body[i]) {
		i++
	}
	return i
}

// Bounds of the parts of an address (RFC 5321, 4.5.3.1).
const (
	maxLocal  = 64
	maxDomain = 255
)

// atEmail is name@host.tld.
func atEmail(body []byte, from, at int) (start, end int, ok bool) {
	for start = at; start > from && at-start < maxLocal && emailTable[body[start-1]]; {
		start--
	}
	for start < at && !isWord(body[start]) {
		start++
	}
	limit := min(len(body), at+1+maxDomain)
	end = extend(body[:limit], at+1, func(c byte) bool { return isWord(c) || c == '-' || c == '.' })
	for end > at && !isWord(body[end-1]) {
		end--
	}
	dot := bytes.LastIndexByte(body[at:end], '.')
	return start, end, start < at && dot > 1 && end-at-dot > 2 && !isDigit(body[end-1])
}

// Lengths of the numbers of payment cards (ISO/IEC 7812).
const (
	minCard = 13
	maxCard = 19
)

// atCard is the number of a payment card, in groups with a space or a hyphen
// between them or without, whose check digit is right.
func atCard(body []byte, _, start int) (int, int, bool) {
	var number [maxCard]byte
	n, end := 0, start
	for i := start; i < len(body); i++ {
		c := body[i]
		if !isDigit(c) {
			if c != ' ' && c != '-' || !isDigit(body[i-1]) {
				break
			}
			continue
		}
		if n == maxCard {
			return 0, 0, false
		}
		number[n] = c - '0'
		n, end = n+1, i+1
	}
	ok := n >= minCard && (end == len(body) || !isWord(body[end])) && checked(number[:n])
	return start, end, ok
}

// checked reports whether the last digit is right by Luhn's formula.
func checked(number []byte) bool {
	sum := 0
	for i, d := range number {
		n := int(d)
		if (len(number)-i)%2 == 0 {
			if n *= 2; n > 9 {
				n -= 9
			}
		}
		sum += n
	}
	return sum > 0 && sum%10 == 0
}

// atPrivateKey is a private key in PEM, also where JSON has escaped its line ends.
// A key without an end extends to the end of the body.
func atPrivateKey(body []byte, _, start int) (int, int, bool) {
	begin, end, mark := []byte("-----BEGIN "), []byte("-----END "), []byte("PRIVATE KEY-----")
	if !bytes.HasPrefix(body[start:], begin) {
		return 0, 0, false
	}
	label := body[start+len(begin):]
	if n := bytes.Index(label[:min(len(label), 60)], mark); n < 0 || bytes.IndexByte(label[:n], '-') >= 0 {
		return 0, 0, false
	}
	stop := bytes.Index(label, end)
	if stop < 0 {
		return start, len(body), true
	}
	after := label[stop+len(end):]
	if n := bytes.Index(after, []byte("-----")); n >= 0 {
		return start, len(body) - len(after) + n + len("-----"), true
	}
	return start, len(body), true
}

// Beginnings of the services' tokens.
var (
	awsPrefixes   = []string{"AKIA", "ASIA"}
	tokenPrefixes = []string{"ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "sk-", "xoxb-", "xoxp-", "npm_", "AIza"}
)

func firstOf(words []string) string {
	var first []byte
	for _, w := range words {
		first = append(first, w[0])
	}
	return string(first)
}

// atPrefixed is a word that begins with one of the prefixes and has between least
// and most characters of ok after it.
func atPrefixed(body []byte, start int, prefixes []string, least, most int, ok func(byte) bool) (int, int, bool) {
	for _, p := range prefixes {
		if !bytes.HasPrefix(body[start:], []byte(p)) {
			continue
		}
		end := extend(body, start+len(p), ok)
		if n := end - start - len(p); n >= least && n <= most {
			return start, end, true
		}
	}
	return 0, 0, false
}

// atAWSKey is the id of an access key of AWS. The keys themselves look like any
// other text of that length.
func atAWSKey(body []byte, _, start int) (int, int, bool) {
	return atPrefixed(body, start, awsPrefixes, 16, 16, func(c byte) bool { return isDigit(c) || c >= 'A' && c <= 'Z' })
}

// atToken is a token of a service that marks its tokens.
func atToken(body []byte, _, start int) (int, int, bool) {
	return atPrefixed(body, start, tokenPrefixes, 20, 300, func(c byte) bool { return isWord(c) || c == '_' || c == '-' })
}
