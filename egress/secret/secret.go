// Package secret identifies secrets, and defines how policies use them.
package secret

import "errors"

// ID identifies a secret. Owners may each have a secret of the same name.
type ID struct{ Owner, Name string }

// String returns the name, for errors that the secret's owner reads.
func (id ID) String() string { return id.Name }

// Errors of a Source that a policy receives as a code. Any other error ends the request
// and is reported to the client.
var (
	ErrUnknown     = errors.New("not found")
	ErrNotAllowed  = errors.New("not allowed")
	ErrBadArgument = errors.New("bad argument")
	ErrLimit       = errors.New("limit reached")
)

// Source gives one policy access to the secrets of one request, by the names that the
// policy uses. It is not safe for concurrent use.
type Source interface {
	// Reference returns the text that stands for the secret until the request is
	// rendered: at most 64 of A-Z, a-z, 0-9, - and _.
	Reference(name string) (string, error)
	// Encode returns the text that stands for the encoded text, which may contain
	// references. Encodings: 0 base64, 1 base64url without padding, 2 hex, 3 percent.
	Encode(encoding int32, text string) (string, error)
	// HMAC returns the end of a chain of HMAC-SHA256. The first key is prefix and
	// secret, and each result is the key for the next part.
	HMAC(name, prefix string, parts [][]byte) ([]byte, error)
	// Sign returns a signature. Algorithms: 1 RS256, 2 EdDSA with Ed25519, 3 ES256.
	Sign(name string, algorithm int32, data []byte) ([]byte, error)
}
