package trust

import (
	"bytes"
	"crypto/sha1"
	"encoding/asn1"
	"encoding/binary"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
)

// attribute is one part of a name, such as its CN.
type attribute struct {
	Type  asn1.ObjectIdentifier
	Value asn1.RawValue
}

// attributeSET: encoding/asn1 encodes a type with this suffix as a SET.
type attributeSET []attribute

// subjectHash is what OpenSSL (X509_NAME_hash, since 1.0.0) names the links in its
// folder by: the first four bytes, the least first, of the SHA-1 of the name's
// canonical form, in which text is UTF-8, lower case, and has single spaces.
func subjectHash(subject []byte) (string, error) {
	var name []attributeSET
	if rest, err := asn1.Unmarshal(subject, &name); err != nil || len(rest) > 0 {
		return "", fmt.Errorf("its subject is not a name: %v", err)
	}
	sum := sha1.New()
	for _, set := range name {
		for i := range set {
			canonize(&set[i].Value)
		}
		der, err := asn1.Marshal(set)
		if err != nil {
			return "", err
		}
		sum.Write(der)
	}
	return fmt.Sprintf("%08x", binary.LittleEndian.Uint32(sum.Sum(nil))), nil
}

// canonize brings text of one byte a character, or UTF-8, into OpenSSL's canonical
// form. Other kinds, which no CA of ours has, it leaves as they are: OpenSSL then
// does not find them by their hash, and all else does.
func canonize(v *asn1.RawValue) {
	const visibleString = 26
	switch v.Tag {
	case asn1.TagUTF8String, asn1.TagPrintableString, asn1.TagIA5String, visibleString:
	default:
		return
	}
	text := bytes.Join(bytes.FieldsFunc(v.Bytes, func(r rune) bool { return strings.ContainsRune(" \t\n\v\f\r", r) }), []byte(" "))
	for i, c := range text {
		if c >= 'A' && c <= 'Z' {
			text[i] = c + 'a' - 'A'
		}
	}
	*v = asn1.RawValue{Tag: asn1.TagUTF8String, Bytes: text}
}

// maxSameHash bounds the links of one hash; two subjects with one are rare.
const maxSameHash = 32

// hashLinks puts the CAs into OpenSSL's folder as files and links to them: HASH.0,
// HASH.1 and so on, which OpenSSL reads up to the first gap.
func (in *installation) hashLinks() {
	folder, ok := in.folder(hashFolder)
	if !ok {
		return
	}
	in.files(folder, ".pem")
	links := map[string][]string{} // targets of the node's links, by hash
	for _, c := range in.stale {
		links[c.hash] = nil
	}
	for _, c := range in.certs {
		links[c.hash] = append(links[c.hash], c.name+".pem")
	}
	for hash, targets := range links {
		in.note(in.linkHash(path.Join(folder, hash), targets))
	}
}

// linkHash makes the links of one hash: first the existing ones to other targets, unchanged.
func (in *installation) linkHash(prefix string, own []string) error {
	at := func(i int) string { return fmt.Sprintf("%s.%d", prefix, i) }
	var targets []string
	count := 0
	for ; count < maxSameHash; count++ {
		target, err := os.Readlink(in.host(at(count)))
		if err != nil {
			break
		}
		if !slices.ContainsFunc(slices.Concat(in.certs, in.stale), func(c *certificate) bool { return c.name+".pem" == target }) {
			targets = append(targets, target)
		}
	}
	if in.exists(at(count)) {
		return nil // too many links, or a file, by another tool
	}
	targets = append(targets, own...)
	for i, target := range targets {
		if err := in.link(at(i), target); err != nil {
			return err
		}
	}
	for i := len(targets); i < count; i++ {
		if err := in.remove(at(i)); err != nil {
			return err
		}
	}
	return nil
}
