// Package signedurl signs URLs of the API for clients without a token, such as a browser,
// and verifies them. A URL permits one kind of request to one sandbox, with exactly its
// query, until it expires. Nothing is stored for it: it can be used more than once.
//
// A signature is an HMAC-SHA256. Its key is derived with HKDF (RFC 5869) from the node's
// secret, for the purpose, the owner of the sandbox, and the generation of the owner's
// credentials: a new token ends all URLs that were signed before.
package signedurl

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"time"
)

// Parameters of the query of a signed URL. Expires is a time in seconds since 1970.
const (
	Expires   = "expires"
	Signature = "signature"
)

const (
	// DefaultLifetime of a URL.
	DefaultLifetime = time.Hour
	// MaxLifetime of a URL.
	MaxLifetime = 7 * 24 * time.Hour
)

var (
	// ErrInvalid is returned for a URL that was not signed for the request, was changed, or
	// was signed for earlier credentials.
	ErrInvalid = errors.New("the signature is not valid for this request")
	// ErrExpired is returned for a URL with a valid signature that has expired.
	ErrExpired = errors.New("the signed URL has expired")
)

// LifetimeError refuses a lifetime that is not positive or exceeds MaxLifetime.
type LifetimeError struct{ Lifetime time.Duration }

func (e *LifetimeError) Error() string {
	return fmt.Sprintf("a lifetime of %s is out of range; use 1s to %s", e.Lifetime, MaxLifetime)
}

// Permission is what a signed URL permits, in addition to what its query says.
type Permission struct {
	Purpose string // such as the id of an operation
	Method  string // of HTTP
	Sandbox string // id, not name: a name may pass to another sandbox
	Owner   string // of the sandbox
}

// Signer signs and verifies. It never shows its secret: not formatted or in logs. It is
// safe for concurrent use.
type Signer struct {
	secret     []byte
	generation func(owner string) []byte
}

// New returns a Signer with the node's secret, of at least 32 random bytes. generation
// returns a value that changes when the credentials of an owner change. It must be quick.
func New(secret []byte, generation func(owner string) []byte) *Signer {
	return &Signer{secret: slices.Clone(secret), generation: generation}
}

// Sign returns the query with the parameters Expires and Signature, and when the URL
// expires. Lifetime is rounded up to a second. Errors: *LifetimeError.
func (s *Signer) Sign(p Permission, query url.Values, lifetime time.Duration) (url.Values, time.Time, error) {
	if lifetime <= 0 || lifetime > MaxLifetime {
		return nil, time.Time{}, &LifetimeError{lifetime}
	}
	expires := time.Now().Add(lifetime + time.Second - 1).Truncate(time.Second).UTC()
	signed := maps.Clone(query)
	if signed == nil {
		signed = url.Values{}
	}
	signed.Del(Signature)
	signed.Set(Expires, strconv.FormatInt(expires.Unix(), 10))
	mac, err := s.mac(p, signed)
	if err != nil {
		return nil, time.Time{}, err
	}
	signed.Set(Signature, base64.RawURLEncoding.EncodeToString(mac))
	return signed, expires, nil
}

// Verify returns nil if the query was signed for the permission and has not expired.
// Errors: ErrInvalid, ErrExpired.
func (s *Signer) Verify(p Permission, query url.Values) error {
	sent := query[Signature]
	if len(sent) != 1 || len(query[Expires]) != 1 {
		return ErrInvalid
	}
	signature, err := base64.RawURLEncoding.Strict().DecodeString(sent[0])
	if err != nil {
		return ErrInvalid
	}
	mac, err := s.mac(p, query)
	if err != nil || !hmac.Equal(mac, signature) {
		return ErrInvalid
	}
	expires, err := strconv.ParseInt(query.Get(Expires), 10, 64)
	switch {
	case err != nil:
		return ErrInvalid
	case time.Now().Unix() >= expires:
		return ErrExpired
	}
	return nil
}

// mac authenticates a permission and all of the query but the signature.
func (s *Signer) mac(p Permission, query url.Values) ([]byte, error) {
	info := canonical("doze signed url 1", p.Purpose, p.Owner)
	key, err := hkdf.Key(sha256.New, s.secret, s.generation(p.Owner), string(info), sha256.Size)
	if err != nil {
		return nil, err
	}
	message := []string{p.Method, p.Sandbox}
	for _, name := range slices.Sorted(maps.Keys(query)) {
		if name == Signature {
			continue
		}
		for _, value := range query[name] {
			message = append(message, name, value)
		}
	}
	h := hmac.New(sha256.New, key)
	h.Write(canonical(message...))
	return h.Sum(nil), nil
}

// canonical encodes fields unambiguously: their number, and each with its length.
func canonical(fields ...string) []byte {
	b := binary.AppendUvarint(nil, uint64(len(fields)))
	for _, field := range fields {
		b = binary.AppendUvarint(b, uint64(len(field)))
		b = append(b, field...)
	}
	return b
}

// redacted stands for a Signer wherever one is shown.
const redacted = "[signer]"

// Format implements fmt.Formatter for all verbs.
func (s *Signer) Format(f fmt.State, _ rune) { f.Write([]byte(redacted)) }

// LogValue implements slog.LogValuer.
func (s *Signer) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalText implements encoding.TextMarshaler, and so JSON's.
func (s *Signer) MarshalText() ([]byte, error) { return []byte(redacted), nil }
