package trust

import (
	"bytes"
	"encoding/asn1"
	"slices"
	"unicode/utf16"
)

// The format PKCS #12 (RFC 7292) as Java 18 and later write their CAs: without
// encryption and without a MAC. A store is a list of safes; each CA of ours is a
// safe of its own, which is always the same bytes, and so is found again.
type pfx struct {
	Version int
	Safes   contentInfo
	MAC     asn1.RawValue `asn1:"optional"`
}

type contentInfo struct {
	Type    asn1.ObjectIdentifier
	Content asn1.RawValue `asn1:"tag:0,explicit,optional"`
}

type safeBag struct {
	Type       asn1.ObjectIdentifier
	Value      certBag        `asn1:"tag:0,explicit"`
	Attributes []bagAttribute `asn1:"set"`
}

type certBag struct {
	Type asn1.ObjectIdentifier
	DER  []byte `asn1:"tag:0,explicit"`
}

type bagAttribute struct {
	Type   asn1.ObjectIdentifier
	Values []asn1.RawValue `asn1:"set"`
}

var (
	oidData         = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 1}
	oidCertBag      = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 12, 10, 1, 3}
	oidX509         = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 22, 1}
	oidFriendlyName = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 20}
	// oidTrusted is Java's: without it a certificate is in the store and not trusted.
	oidTrusted = asn1.ObjectIdentifier{2, 16, 840, 1, 113894, 746875, 1, 1}
	oidAnyUse  = asn1.ObjectIdentifier{2, 5, 29, 37, 0}
)

// updatePKCS12 returns a store without the stale certificates and with the others.
func updatePKCS12(store []byte, certs, stale []*certificate) ([]byte, error) {
	var p pfx
	if err := decode(store, &p); err != nil {
		return nil, err
	}
	if len(p.MAC.FullBytes) > 0 {
		return nil, errPassword
	}
	var inner []byte
	var safes []asn1.RawValue
	if !p.Safes.Type.Equal(oidData) || decode(p.Safes.Content.Bytes, &inner) != nil || decode(inner, &safes) != nil {
		return nil, errDamaged
	}
	for _, c := range stale {
		old, err := safeOf(c)
		if err != nil {
			return nil, err
		}
		safes = slices.DeleteFunc(safes, func(s asn1.RawValue) bool { return bytes.Equal(s.FullBytes, old) })
	}
	for _, c := range certs {
		if bytes.Contains(inner, c.der) {
			continue
		}
		safe, err := safeOf(c)
		if err != nil {
			return nil, err
		}
		safes = append(safes, asn1.RawValue{FullBytes: safe})
	}
	inner, err := asn1.Marshal(safes)
	if err != nil {
		return nil, err
	}
	if p.Safes, err = dataOf(inner); err != nil {
		return nil, err
	}
	return asn1.Marshal(struct {
		Version int
		Safes   contentInfo
	}{p.Version, p.Safes})
}

// decode decodes a whole value.
func decode(der []byte, v any) error {
	if rest, err := asn1.Unmarshal(der, v); err != nil || len(rest) > 0 {
		return errDamaged
	}
	return nil
}

// safeOf is a safe with one trusted certificate.
func safeOf(c *certificate) ([]byte, error) {
	name := asn1.RawValue{Tag: asn1.TagBMPString}
	for _, u := range utf16.Encode([]rune(c.name)) {
		name.Bytes = append(name.Bytes, byte(u>>8), byte(u))
	}
	use, err := asn1.Marshal(oidAnyUse)
	if err != nil {
		return nil, err
	}
	bags, err := asn1.Marshal([]safeBag{{
		Type:  oidCertBag,
		Value: certBag{oidX509, c.der},
		Attributes: []bagAttribute{
			{oidFriendlyName, []asn1.RawValue{name}},
			{oidTrusted, []asn1.RawValue{{FullBytes: use}}},
		},
	}})
	if err != nil {
		return nil, err
	}
	safe, err := dataOf(bags)
	if err != nil {
		return nil, err
	}
	return asn1.Marshal(safe)
}

// dataOf wraps bytes as data.
func dataOf(content []byte) (contentInfo, error) {
	octets, err := asn1.Marshal(content)
	if err != nil {
		return contentInfo{}, err
	}
	// The explicit tag by hand: encoding/asn1 does not wrap a RawValue.
	wrapped := asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 0, IsCompound: true, Bytes: octets}
	return contentInfo{oidData, wrapped}, nil
}
