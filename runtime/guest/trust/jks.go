package trust

import (
	"bytes"
	"crypto/sha1"
	"encoding/binary"
	"errors"
	"slices"
	"unicode/utf16"
)

// The format JKS, which Java's own source defines (sun.security.provider.JavaKeyStore):
//
//	magic, version (1 or 2), number of entries, entries, SHA-1
//
// An entry is a tag (1: private key, 2: trusted certificate), an alias, a date and
// what it holds. Numbers are big-endian; texts have their length in two bytes before
// them, other bytes in four. The SHA-1 is of the password, a phrase, and all before.
var jksMagic = []byte{0xfe, 0xed, 0xfe, 0xed}

const (
	jksHeader   = 12 // bytes
	jksPassword = "changeit"
	jksPhrase   = "Mighty Aphrodite"
	tagKey      = 1
	tagTrusted  = 2
)

var (
	errDamaged  = errors.New("the store is damaged")
	errPassword = errors.New("the store has a password of its own")
)

// updateJKS returns a store without the stale certificates and with the others.
func updateJKS(store []byte, certs, stale []*certificate) ([]byte, error) {
	if len(store) < jksHeader+sha1.Size {
		return nil, errDamaged
	}
	body, sum := store[:len(store)-sha1.Size], store[len(store)-sha1.Size:]
	if !bytes.Equal(sum, jksSum(body)) {
		return nil, errPassword
	}
	version, count := binary.BigEndian.Uint32(body[4:]), binary.BigEndian.Uint32(body[8:])
	if version != 1 && version != 2 {
		return nil, errDamaged
	}
	in := &jksReader{unread: body[jksHeader:], typed: version == 2}
	kept := bytes.Clone(body[:jksHeader])
	var number uint32
	missing := slices.Clone(certs)
	for range count {
		entry, der := in.entry()
		if in.failed {
			return nil, errDamaged
		}
		same := func(c *certificate) bool { return bytes.Equal(c.der, der) }
		if slices.ContainsFunc(stale, same) {
			continue
		}
		missing = slices.DeleteFunc(missing, same)
		kept = append(kept, entry...)
		number++
	}
	if len(in.unread) > 0 {
		return nil, errDamaged
	}
	for _, c := range missing {
		kept = binary.BigEndian.AppendUint32(kept, tagTrusted)
		kept = appendText(kept, c.name)
		kept = binary.BigEndian.AppendUint64(kept, 0) // its date is unused
		if in.typed {
			kept = appendText(kept, "X.509")
		}
		kept = binary.BigEndian.AppendUint32(kept, uint32(len(c.der)))
		kept = append(kept, c.der...)
		number++
	}
	binary.BigEndian.PutUint32(kept[8:], number)
	return append(kept, jksSum(kept)...), nil
}

func appendText(b []byte, text string) []byte {
	return append(binary.BigEndian.AppendUint16(b, uint16(len(text))), text...)
}

func jksSum(body []byte) []byte {
	sum := sha1.New()
	for _, c := range utf16.Encode([]rune(jksPassword)) {
		sum.Write([]byte{byte(c >> 8), byte(c)})
	}
	sum.Write([]byte(jksPhrase))
	sum.Write(body)
	return sum.Sum(nil)
}

// jksReader reads entries until one is damaged.
type jksReader struct {
	unread []byte
	typed  bool // certificates have their type before them
	failed bool
}

// next reads n bytes, or fails.
func (r *jksReader) next(n uint32) []byte {
	if r.failed || uint64(n) > uint64(len(r.unread)) {
		r.failed = true
		return make([]byte, min(n, 8)) // enough for a number
	}
	b := r.unread[:n]
	r.unread = r.unread[n:]
	return b
}

func (r *jksReader) number() uint32 { return binary.BigEndian.Uint32(r.next(4)) }
func (r *jksReader) text()          { r.next(uint32(binary.BigEndian.Uint16(r.next(2)))) }

func (r *jksReader) certificate() []byte {
	if r.typed {
		r.text()
	}
	return r.next(r.number())
}

// entry reads an entry; der is a trusted certificate, or nil.
func (r *jksReader) entry() (entry, der []byte) {
	from := r.unread
	tag := r.number()
	r.text() // alias
	r.next(8)
	switch tag {
	case tagTrusted:
		der = r.certificate()
	case tagKey:
		r.next(r.number())
		for n := r.number(); n > 0 && !r.failed; n-- {
			r.certificate()
		}
	default:
		r.failed = true
	}
	return from[:len(from)-len(r.unread)], der
}
