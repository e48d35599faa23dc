package sdk

import (
	"encoding/binary"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

// Encoding is an encoding for [Encode].
type Encoding uint32

const (
	Base64    = Encoding(abi.Base64)
	Base64URL = Encoding(abi.Base64URL) // without padding
	Hex       = Encoding(abi.Hex)
	Percent   = Encoding(abi.Percent) // for queries
)

// Secret returns a reference to the secret to which the rule maps name. It returns
// ErrNotFound if the rule does not map name, and ErrNotAllowed in Policy.Response.
// If the secret is unknown, or not bound to this host, the node refuses the
// request, and the policy stops.
func Secret(name string) (string, error) {
	ref, err := fetchOf("secret", name, func(buf []byte) int32 { return abi.Node().SecretRef(name, buf) })
	return string(ref), err
}

// Encode returns a reference to the encoded form of text, which may contain references.
func Encode(e Encoding, text string) (string, error) {
	ref, err := fetchOf("encode", "", func(buf []byte) int32 { return abi.Node().EncodeRef(uint32(e), text, buf) })
	return string(ref), err
}

// Basic returns the value of an Authorization header for user with the named secret
// as the password.
func Basic(user, secret string) (string, error) {
	password, err := Secret(secret)
	if err != nil {
		return "", err
	}
	credentials, err := Encode(Base64, user+":"+password)
	return "Basic " + credentials, err
}

// HMACSHA256 computes a chain of HMACs with SHA-256. The first key is prefix followed
// by the secret. The HMAC of each part is the key for the next part, and the last HMAC
// is the result. There must be 1 to 16 parts.
func HMACSHA256(secret, prefix string, parts ...[]byte) (mac [32]byte, err error) {
	var packed []byte
	for _, part := range parts {
		packed = binary.LittleEndian.AppendUint32(packed, uint32(len(part)))
		packed = append(packed, part...)
	}
	if n := abi.Node().HMACSHA256(secret, prefix, packed, mac[:]); n < 0 {
		return mac, failure("hmac with secret", secret, n)
	}
	return mac, nil
}

// Algorithm is a signature algorithm for [Sign].
type Algorithm uint32

const (
	RS256 = Algorithm(abi.RS256) // RSASSA-PKCS1-v1_5 with SHA-256
	EdDSA = Algorithm(abi.EdDSA) // Ed25519
	ES256 = Algorithm(abi.ES256) // ECDSA on P-256 with SHA-256; the signature is r and s, 32 bytes each
)

// Sign returns the signature of data. The named secret must be a private key in PEM.
func Sign(secret string, a Algorithm, data []byte) ([]byte, error) {
	sig, err := fetchOf("sign with secret", secret, func(buf []byte) int32 {
		return abi.Node().Sign(secret, uint32(a), data, buf)
	})
	return append([]byte(nil), sig...), err
}
