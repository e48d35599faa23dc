// Package placeholder defines texts that programs in a sandbox hold in the place of
// secrets, such as a token in an environment variable: the node replaces them on their
// way to the hosts that the secret is bound to.
package placeholder

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"strings"

	"github.com/doze-run/doze/egress/secret"
)

// Prefix of every placeholder.
const Prefix = "doze-placeholder-"

// Text returns the placeholder of a secret for a sandbox: letters, digits, - and _.
// It is the same as long as the sandbox lives and needs no storage: its end is an
// HMAC by a key of the node, so that a placeholder of another sandbox cannot be made
// without the key. The name is in it for people to read.
func Text(key []byte, sandbox, name string) string {
	mac := hmac.New(sha256.New, key)
	fmt.Fprintf(mac, "placeholder %q %q", sandbox, name)
	return Prefix + name + "-" + base64.RawURLEncoding.EncodeToString(mac.Sum(nil)[:16])
}

// RefusedError: a request has a placeholder whose secret may not be sent to its host, or
// in a place where placeholders are not replaced. Its text has no part of a value.
type RefusedError struct {
	Secret secret.ID
	Reason string
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("placeholder of secret %s: %s", e.Secret, e.Reason)
}

// Offer is a secret that a sandbox knows by its placeholder.
type Offer struct {
	Secret secret.ID
	Text   string // see Text
}

// Set is the placeholders of a sandbox. It is immutable, and safe for concurrent use.
type Set struct {
	offers  []Offer
	longest int // text of an offer
	value   func(secret.ID) ([]byte, error)
	hold    func(bytes int64) bool
}

// NewSet returns the set of a sandbox's offers. value returns a secret. Its error is why
// the secret may not be sent (it is not bound to the host, the connection is not verified
// TLS) and becomes the reason of a RefusedError. The goroutine that reads the request's
// body calls it, too.
//
// hold acquires memory for a body, which uses it until the request ends. It returns false
// if the limit is reached.
func NewSet(offers []Offer, value func(secret.ID) ([]byte, error), hold func(bytes int64) bool) *Set {
	s := &Set{offers: offers, value: value, hold: hold}
	for _, o := range offers {
		s.longest = max(s.longest, len(o.Text))
	}
	return s
}

// find returns the offer with whose text a text begins. part reports that the text
// may be the beginning of one, if more follows.
func (s *Set) find(text string) (offer *Offer, part bool) {
	for i := range s.offers {
		o := &s.offers[i]
		if strings.HasPrefix(text, o.Text) {
			return o, false
		}
		part = part || strings.HasPrefix(o.Text, text)
	}
	return nil, part
}
