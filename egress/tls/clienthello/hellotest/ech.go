// Package hellotest has helpers for tests of code that reads ClientHellos.
package hellotest

import (
	"crypto/ecdh"
	"crypto/rand"
	"encoding/binary"
)

// ECHConfigs returns a list with one configuration of Encrypted Client Hello (RFC 9849,
// section 4). A client with this list hides the name of its server behind the public
// name. The private key is discarded.
func ECHConfigs(public string) ([]byte, error) {
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	contents := []byte{1, 0, 0x20} // config_id, DHKEM(X25519, HKDF-SHA256)
	contents = append(vector(contents, 2, key.PublicKey().Bytes()),
		0, 4, 0, 1, 0, 1, // HKDF-SHA256 with AES-128-GCM
		0) // maximum_name_length
	contents = vector(contents, 1, []byte(public))
	contents = vector(contents, 2, nil) // extensions
	return vector(nil, 2, vector([]byte{0xfe, 0x0d}, 2, contents)), nil
}

// vector appends the length of v, encoded in the given number of bytes, and v.
func vector(b []byte, bytes int, v []byte) []byte {
	length := binary.BigEndian.AppendUint16(nil, uint16(len(v)))
	return append(append(b, length[2-bytes:]...), v...)
}
