package scrub

import (
	"cmp"
	"slices"
	"strings"
)

// maxKey is how much of a pattern has to be there for an occurrence. The rest of
// a longer one is replaced as far as it is the same, so that little has to be held
// back. Keys in files start alike: 83 characters of an OpenSSH key, 64 of RSA in
// PKCS #8, and a service account's JSON has 250 before its private key.
const maxKey = 256

type encoding uint8

const (
	raw encoding = iota
	base64Std
	base64URL
	hexLower
	hexUpper
)

// pattern is a value in one encoding.
type pattern struct {
	value    []byte
	encoding encoding
	bit      int // of the value, with which its first base64 character begins
	length   int
}

// encodings returns the patterns of a value.
func encodings(value []byte) []pattern {
	n := len(value)
	patterns := []pattern{
		{value, raw, 0, n},
		{value, hexLower, 0, 2 * n},
		{value, hexUpper, 0, 2 * n},
	}
	// After 0, 1 or 2 other bytes (modulo 3) the first character that is the
	// value's alone begins with its bit 0, 4 or 2.
	for _, bit := range []int{0, 4, 2} {
		length := (8*n - bit) / 6
		patterns = append(patterns, pattern{value, base64Std, bit, length}, pattern{value, base64URL, bit, length})
	}
	return patterns
}

const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"

// at returns character i.
func (p *pattern) at(i int) byte {
	switch p.encoding {
	case base64Std:
		return (alphabet + "+/")[p.sextet(i)]
	case base64URL:
		return (alphabet + "-_")[p.sextet(i)]
	case hexLower:
		return "0123456789abcdef"[p.nibble(i)]
	case hexUpper:
		return "0123456789ABCDEF"[p.nibble(i)]
	default:
		return p.value[i]
	}
}

func (p *pattern) nibble(i int) byte { return p.value[i/2] >> (4 * (1 - i%2)) & 15 }

func (p *pattern) sextet(i int) byte {
	bit := p.bit + 6*i
	pair := uint(p.value[bit/8]) << 8
	if bit%8 > 2 {
		pair |= uint(p.value[bit/8+1])
	}
	return byte(pair >> (10 - bit%8) & 63)
}

// key is the beginning of a pattern, by which it is found.
type key struct {
	text string
	of   *pattern
}

// sorted returns the keys of patterns in lexical order.
func sorted(patterns []pattern) []key {
	keys := make([]key, len(patterns))
	for i := range patterns {
		p := &patterns[i]
		text := make([]byte, min(p.length, maxKey))
		for j := range text {
			text[j] = p.at(j)
		}
		keys[i] = key{string(text), p}
	}
	slices.SortFunc(keys, func(a, b key) int {
		return cmp.Or(strings.Compare(a.text, b.text), cmp.Compare(a.of.length, b.of.length))
	})
	return keys
}
