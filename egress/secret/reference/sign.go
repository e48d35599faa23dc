package reference

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"

	"github.com/doze-run/doze/egress/secret"
)

// Algorithms of Sign, by the names of RFC 7518 and RFC 8037. The numbers are the ABI's.
const (
	RS256 int32 = 1
	EdDSA int32 = 2
	ES256 int32 = 3
)

// maxParts of an HMAC chain: AWS's signature has five.
const maxParts = 16

// maxKey bytes of a private key in DER: one of RSA with 8,192 bits has 4.7 KiB. A value
// of the vault could hold one that signs for minutes.
const maxKey = 5 << 10

// HMAC returns the end of a chain of HMAC-SHA256: the first key is prefix and
// secret, each next one is the HMAC of a part, the last is the result. Errors:
// the errors of the set's resolve, secret.ErrBadArgument.
func (s *Set) HMAC(id secret.ID, prefix string, parts [][]byte) ([]byte, error) {
	if len(parts) == 0 || len(parts) > maxParts {
		return nil, fmt.Errorf("%w: an HMAC has 1 to %d parts", secret.ErrBadArgument, maxParts)
	}
	value, err := s.resolve(id)
	if err != nil {
		return nil, err
	}
	key := append([]byte(prefix), value...)
	for _, part := range parts {
		mac := hmac.New(sha256.New, key)
		mac.Write(part)
		key = mac.Sum(nil)
	}
	s.derived = append(s.derived, id)
	return key, nil
}

// Sign signs data with the private key that a secret holds as PEM (PKCS #8, or
// what is usual for RSA and EC keys): RS256 in PKCS #1 v1.5, ES256 as r and s of
// 32 bytes. Errors: the errors of the set's resolve, secret.ErrBadArgument, and keys that do not
// fit, which no error quotes.
func (s *Set) Sign(id secret.ID, algorithm int32, data []byte) ([]byte, error) {
	if algorithm < RS256 || algorithm > ES256 {
		return nil, fmt.Errorf("%w: unknown algorithm: %d", secret.ErrBadArgument, algorithm)
	}
	value, err := s.resolve(id)
	if err != nil {
		return nil, err
	}
	key, err := privateKey(value)
	if err != nil {
		return nil, fmt.Errorf("secret %s: %w", id, err)
	}
	signature, err := sign(key, algorithm, data)
	if signature == nil && err == nil {
		err = fmt.Errorf("secret %s is a key of another kind: RS256 takes RSA, EdDSA takes Ed25519, ES256 takes EC P-256", id)
	}
	if err == nil {
		s.derived = append(s.derived, id)
	}
	return signature, err
}

// sign returns nothing if the algorithm is not for this kind of key.
func sign(key any, algorithm int32, data []byte) ([]byte, error) {
	digest := sha256.Sum256(data)
	switch key := key.(type) {
	case *rsa.PrivateKey:
		if algorithm == RS256 {
			return rsa.SignPKCS1v15(nil, key, crypto.SHA256, digest[:])
		}
	case ed25519.PrivateKey:
		if algorithm == EdDSA {
			return ed25519.Sign(key, data), nil
		}
	case *ecdsa.PrivateKey:
		if algorithm == ES256 && key.Curve == elliptic.P256() {
			r, s, err := ecdsa.Sign(rand.Reader, key, digest[:])
			if err != nil {
				return nil, err
			}
			signature := make([]byte, 64)
			r.FillBytes(signature[:32])
			s.FillBytes(signature[32:])
			return signature, nil
		}
	}
	return nil, nil
}

func privateKey(value []byte) (any, error) {
	block, _ := pem.Decode(value)
	if block == nil {
		return nil, errors.New("no private key in PEM")
	}
	if len(block.Bytes) > maxKey {
		return nil, fmt.Errorf("private key of %d bytes is too large; use at most %d, as RSA keys of 8192 bits have", len(block.Bytes), maxKey)
	}
	for _, parse := range []func([]byte) (any, error){
		x509.ParsePKCS8PrivateKey,
		func(der []byte) (any, error) { return x509.ParsePKCS1PrivateKey(der) },
		func(der []byte) (any, error) { return x509.ParseECPrivateKey(der) },
	} {
		if key, err := parse(block.Bytes); err == nil {
			return key, nil
		}
	}
	return nil, errors.New("unsupported private key; use PKCS #8, PKCS #1 or SEC 1 without encryption")
}
