// Package hellotest helps tests of what reads ClientHellos.
package hellotest

import (
	"crypto/ecdh"
	"crypto/rand"
	"encoding/binary"
)

// ECHConfigs is a list with one configuration of Encrypted Client Hello (RFC 9849,
// section 4): a client that has it hides its server's name behind the public one, with
// a key that nobody has.
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

// vector appends the length of v, in so many bytes, and v.
func vector(b []byte, bytes int, v []byte) []byte {
	length := binary.BigEndian.AppendUint16(nil, uint16(len(v)))
	return append(append(b, length[2-bytes:]...), v...)
}
