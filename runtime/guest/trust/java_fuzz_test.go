package trust_test

import (
	"bytes"
	"crypto/sha1"
	"encoding/asn1"
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/guest/trust"
)

// The parts of a store in the format JKS: see package trust.
const (
	jksMagic   = "\xfe\xed\xfe\xed"
	jksTrusted = "\x00\x00\x00\x02"
	jksKey     = "\x00\x00\x00\x01"
)

// sumJKS is the last part of a store with Java's default password.
func sumJKS(body string) string {
	sum := sha1.Sum([]byte("\x00c\x00h\x00a\x00n\x00g\x00e\x00i\x00tMighty Aphrodite" + body))
	return string(sum[:])
}

// sized has its length in front, in so many bytes.
func sized(bytes int, text string) string {
	length := binary.BigEndian.AppendUint32(nil, uint32(len(text)))
	return string(length[4-bytes:]) + text
}

// entry is a trusted certificate of a store of version 2.
func entry(alias, der string) string {
	return jksTrusted + sized(2, alias) + "\x00\x00\x01\x95\x11\x22\x33\x44" + sized(2, "X.509") + sized(4, der)
}

// storeOf is a store of version 2.
func storeOf(entries []string) string {
	count := binary.BigEndian.AppendUint32(nil, uint32(len(entries)))
	body := jksMagic + "\x00\x00\x00\x02" + string(count) + strings.Join(entries, "")
	return body + sumJKS(body)
}

// entriesOf takes a store apart; false if it is none.
func entriesOf(store string) (entries []string, ok bool) {
	defer func() {
		if recover() != nil { // it ends too early
			ok = false
		}
	}()
	end := len(store) - sha1.Size
	if store[:4] != jksMagic || store[end:] != sumJKS(store[:end]) {
		return nil, false
	}
	number := func(at, bytes int) (n int) {
		for _, b := range []byte(store[:end][at : at+bytes]) {
			n = n<<8 | int(b)
		}
		return n
	}
	typed := number(4, 4) == 2
	at := 12
	certificate := func() {
		if typed {
			at += 2 + number(at, 2)
		}
		at += 4 + number(at, 4)
	}
	for range number(8, 4) {
		start := at
		at += 4
		at += 2 + number(at, 2) + 8
		if store[start:start+4] == jksKey {
			at += 4 + number(at, 4)
			chain := number(at, 4)
			at += 4
			for range chain {
				certificate()
			}
		} else {
			certificate()
		}
		entries = append(entries, store[:end][start:at])
	}
	return entries, at == end
}

// FuzzJKS: of any store all is kept as it is, but for a CA that the node does not
// have any more, and the node's is trusted once.
func FuzzJKS(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0, 3, 'a', 'b', 'c', 1, 2, 'k', 'e', 2, 1, 'x', 0, 0})
	f.Add([]byte{2, 1, 'a', 3, 1, 'b', 2, 1, 'c', 0, 1, 'd'})
	f.Add([]byte{3, 0, 1, 7, 1, 2, 3, 4, 5, 6, 7})
	ca, stale := nodeCA(f), nodeCA(f)
	f.Fuzz(func(t *testing.T, script []byte) {
		var entries, kept []string
		trusted := 0
		for len(script) > 1 && len(entries) < 100 { // a kind, a length and a text
			kind, n := script[0]%4, min(int(script[1]), len(script)-2)
			text := string(script[2 : 2+n])
			script = script[2+n:]
			one := ""
			switch kind {
			case 0:
				one = entry("public-"+text, text)
			case 1:
				chain := sized(2, "X.509") + sized(4, text)
				one = jksKey + sized(2, text) + "\x00\x00\x00\x00\x00\x00\x00\x00" + sized(4, "key "+text) + "\x00\x00\x00\x02" + chain + chain
			case 2:
				one = entry(text, string(der(t, stale)))
			case 3:
				if trusted > 0 {
					continue
				}
				one = entry(text, string(der(t, ca)))
				trusted++
			}
			entries = append(entries, one)
			if kind != 2 {
				kept = append(kept, one)
			}
		}
		updated, err := trust.UpdateKeystore([]byte(storeOf(entries)), ca, stale)
		if err != nil {
			t.Fatal(err)
		}
		got, ok := entriesOf(string(updated))
		if !ok {
			t.Fatalf("%x became %x, which is not a store", entries, updated)
		}
		if trusted == 0 && len(got) > 0 {
			added := got[len(got)-1]
			if !strings.HasPrefix(added, jksTrusted) || !strings.HasSuffix(added, sized(2, "X.509")+sized(4, string(der(t, ca)))) {
				t.Errorf("added was %x", added)
			}
			got = got[:len(got)-1]
		}
		if !slices.Equal(got, kept) {
			t.Errorf("%x became %x", kept, got)
		}
	})
}

// FuzzKeystore: whatever a sandbox puts in the place of its store is refused, or
// has all that it had and trusts the node; to do it again changes nothing.
func FuzzKeystore(f *testing.F) {
	for _, name := range []string{"cacerts.jks", "cacerts.p12", "password.p12"} {
		f.Add([]byte(stored(f, name)))
	}
	f.Add([]byte(jksMagic))
	ca, stale := nodeCA(f), nodeCA(f)
	f.Fuzz(func(t *testing.T, store []byte) {
		if n := len(store) - sha1.Size; n >= 4 && string(store[:4]) == jksMagic {
			store = []byte(string(store[:n]) + sumJKS(string(store[:n]))) // else none of them would be read
		}
		updated, err := trust.UpdateKeystore(store, ca, stale)
		if err != nil {
			return
		}
		if again, err := trust.UpdateKeystore(updated, ca, stale); err != nil || !bytes.Equal(again, updated) {
			t.Errorf("the second time something changed: %v", err)
		}
		read := entriesOf
		if !bytes.HasPrefix(store, []byte(jksMagic)) {
			read = safesOf
		}
		had, ok := read(string(store))
		has, good := read(string(updated))
		if !ok || !good || len(has) != len(had)+1 || !slices.Equal(has[:len(had)], had) || !strings.Contains(has[len(had)], string(der(t, ca))) {
			t.Errorf("%x (a store: %v) became %x (a store: %v)", had, ok, has, good)
		}
	})
}

// safesOf takes a PKCS #12 without a password apart; false if it is none.
func safesOf(store string) (safes []string, ok bool) {
	var p struct {
		Version int
		Safes   struct {
			Type    asn1.ObjectIdentifier
			Content []byte `asn1:"tag:0,explicit"`
		}
	}
	var all []asn1.RawValue
	if rest, err := asn1.Unmarshal([]byte(store), &p); err != nil || len(rest) > 0 {
		return nil, false
	}
	if rest, err := asn1.Unmarshal(p.Safes.Content, &all); err != nil || len(rest) > 0 {
		return nil, false
	}
	for _, one := range all {
		safes = append(safes, string(one.FullBytes))
	}
	return safes, true
}
