package sdk

import (
	"encoding/binary"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

// Encoding of [Encode].
type Encoding uint32

const (
	Base64    = Encoding(abi.Base64)
	Base64URL = Encoding(abi.Base64URL) // without padding
	Hex       = Encoding(abi.Hex)
	Percent   = Encoding(abi.Percent) // for queries
)

// Secret is a reference to the secret that the rule maps name to. It fails with
// ErrNotFound if the rule maps nothing, and with ErrNotAllowed in Policy.Response.
// If the secret is unknown, or not bound to this host, the node refuses the
// request, and the policy does not go on.
func Secret(name string) (string, error) {
	ref, err := fetchOf("secret", name, func(buf []byte) int32 { return abi.SecretRef(name, buf) })
	return string(ref), err
}

// Encode is a reference to the encoded form of text, which may hold references.
func Encode(e Encoding, text string) (string, error) {
	ref, err := fetchOf("encode", "", func(buf []byte) int32 { return abi.EncodeRef(uint32(e), text, buf) })
	return string(ref), err
}

// Basic is the value of an Authorization header for user with the named secret
// as password.
func Basic(user, secret string) (string, error) {
	password, err := Secret(secret)
	if err != nil {
		return "", err
	}
	credentials, err := Encode(Base64, user+":"+password)
	return "Basic " + credentials, err
}

// HMACSHA256 is a chain of HMACs with SHA-256. The first key is prefix followed
// by the secret; each part's HMAC is the key of the next, and the last is the
// result. There are 1 to 16 parts.
func HMACSHA256(secret, prefix string, parts ...[]byte) (mac [32]byte, err error) {
	var packed []byte
	for _, part := range parts {
		packed = binary.LittleEndian.AppendUint32(packed, uint32(len(part)))
		packed = append(packed, part...)
	}
	if n := abi.HMACSHA256(secret, prefix, packed, mac[:]); n < 0 {
		return mac, failure("hmac with secret", secret, n)
	}
	return mac, nil
}

// Algorithm of [Sign].
type Algorithm uint32

const (
	RS256 = Algorithm(abi.RS256) // RSASSA-PKCS1-v1_5 with SHA-256
	EdDSA = Algorithm(abi.EdDSA) // Ed25519
	ES256 = Algorithm(abi.ES256) // ECDSA on P-256 with SHA-256, as r and s of 32 bytes each
)

// Sign is the signature of data by the private key that the named secret is, in
// PEM.
func Sign(secret string, a Algorithm, data []byte) ([]byte, error) {
	sig, err := fetchOf("sign with secret", secret, func(buf []byte) int32 {
		return abi.Sign(secret, uint32(a), data, buf)
	})
	return append([]byte(nil), sig...), err
}
