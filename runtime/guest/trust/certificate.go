package trust

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"

	"github.com/doze-run/doze/runtime/guest"
)

var beginCertificate = []byte("-----BEGIN CERTIFICATE-----")

// certificate is one CA of the node.
type certificate struct {
	der  []byte
	pem  []byte // as every tool writes it, so that it is found in what they made
	name string // of its files, without an extension
	hash string // of its subject, see subjectHash
}

// ErrInvalid is returned (wrapped) for input that is not PEM of CAs.
var ErrInvalid = errors.New("the node's CAs are unusable")

// parse reads the PEM of 1 to guest.MaxCAs CAs.
func parse(text []byte) (list []*certificate, err error) {
	for rest := text; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("%w: there is a %s among them", ErrInvalid, block.Type)
		}
		if len(list) == guest.MaxCAs {
			return nil, fmt.Errorf("%w: there are more than %d", ErrInvalid, guest.MaxCAs)
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
		}
		if !c.IsCA {
			return nil, fmt.Errorf("%w: %s is not a CA", ErrInvalid, c.Subject)
		}
		hash, err := subjectHash(c.RawSubject)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
		}
		sum := sha256.Sum256(c.Raw)
		list = append(list, &certificate{
			der:  c.Raw,
			pem:  pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}),
			name: "doze-" + hex.EncodeToString(sum[:8]),
			hash: hash,
		})
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%w: there is no certificate", ErrInvalid)
	}
	return list, nil
}

// with appends to a bundle what is not in it.
func with(bundle []byte, certs []*certificate) []byte {
	for _, c := range certs {
		if c.find(bundle) >= 0 {
			continue
		}
		bundle = bytes.Clone(bundle)
		if len(bundle) > 0 && bundle[len(bundle)-1] != '\n' {
			bundle = append(bundle, '\n')
		}
		bundle = append(bundle, c.pem...)
	}
	return bundle
}

// without removes from a bundle what is in it.
func without(bundle []byte, certs []*certificate) []byte {
	for _, c := range certs {
		for i := c.find(bundle); i >= 0; i = c.find(bundle) {
			bundle = slices.Concat(bundle[:i], bundle[i+len(c.pem):])
		}
	}
	return bundle
}

// find is where the certificate's text begins in a bundle, or -1. All of them begin
// alike, which makes a search for all of it slow; the last of its text is its alone.
func (c *certificate) find(bundle []byte) int {
	const own = 48 // bytes, which is less than the search has fast code for
	end := len(c.pem) - len("\n-----END CERTIFICATE-----\n")
	for from := 0; ; {
		i := bytes.Index(bundle[from:], c.pem[end-own:end])
		if i < 0 {
			return -1
		}
		from += i + own
		if begin := from - end; begin >= 0 && bytes.HasPrefix(bundle[begin:], c.pem) {
			return begin
		}
	}
}
