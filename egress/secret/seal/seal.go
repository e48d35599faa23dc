// Package seal encrypts secrets, and the key of the node's certificate authority, for
// the disk.
//
// A value is sealed with AES-256-GCM for a purpose, and opens for that purpose
// only: write access to the store does not suffice to make one value pass for another.
package seal

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"

	"github.com/tink-crypto/tink-go/v2/aead/aesgcm"
	"github.com/tink-crypto/tink-go/v2/insecuresecretdataaccess"
	"github.com/tink-crypto/tink-go/v2/secretdata"
	"github.com/tink-crypto/tink-go/v2/tink"
)

var (
	// ErrOtherKey is returned for a value that was sealed with a missing key.
	ErrOtherKey = errors.New("it was sealed with another key than this node has")
	// ErrBroken is returned for a value that was changed, cut short, or sealed for another
	// purpose.
	ErrBroken = errors.New("it is damaged, or was sealed for something else")
)

// keySize is the size of keys of AES-256.
const keySize = 32

// prefixSize is the size of Tink's prefix of a value: a byte 1 and the id of the key.
const prefixSize = 5

// Key seals and opens. It never shows itself: not in errors, formatted or in logs.
// All methods are safe for concurrent use.
type Key struct {
	newest uint32 // id of the key that seals
	aeads  map[uint32]tink.AEAD
}

// newKey makes a Key that seals with the first of keys and opens with all of them.
func newKey(keys [][]byte) (*Key, error) {
	parameters, err := aesgcm.NewParameters(aesgcm.ParametersOpts{
		KeySizeInBytes: keySize, IVSizeInBytes: 12, TagSizeInBytes: 16, Variant: aesgcm.VariantTink})
	if err != nil {
		return nil, err
	}
	k := &Key{newest: keyID(keys[0]), aeads: make(map[uint32]tink.AEAD, len(keys))}
	for _, b := range keys {
		id := keyID(b)
		key, err := aesgcm.NewKey(secretdata.NewBytesFromData(b, insecuresecretdataaccess.Token{}), id, parameters)
		if err != nil {
			return nil, err
		}
		if k.aeads[id], err = aesgcm.NewAEAD(key); err != nil {
			return nil, err
		}
	}
	return k, nil
}

// keyID names a key without revealing it: 32 of the 256 bits of a hash.
func keyID(key []byte) uint32 {
	sum := sha256.Sum256(append([]byte("doze seal key id\x00"), key...))
	return binary.BigEndian.Uint32(sum[:])
}

// maxPlain bounds the size of values, far above the limits of stores.
const maxPlain = 1 << 24

// Seal encrypts plain for a purpose.
func (k *Key) Seal(purpose string, plain []byte) ([]byte, error) {
	if len(plain) > maxPlain {
		return nil, fmt.Errorf("seal %s: it has %d bytes, at most %d fit", purpose, len(plain), maxPlain)
	}
	sealed, err := k.aeads[k.newest].Encrypt(plain, []byte(purpose))
	if err != nil {
		return nil, fmt.Errorf("seal %s: %w", purpose, err)
	}
	return sealed, nil
}

// Open decrypts a value that was sealed for that purpose. Errors: ErrOtherKey, ErrBroken
// (wrapped).
func (k *Key) Open(purpose string, sealed []byte) ([]byte, error) {
	id, ok := sealedWith(sealed)
	if !ok {
		return nil, fmt.Errorf("open %s: %w", purpose, ErrBroken)
	}
	aead, ok := k.aeads[id]
	if !ok {
		return nil, fmt.Errorf("open %s: %w", purpose, ErrOtherKey)
	}
	plain, err := aead.Decrypt(sealed, []byte(purpose))
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", purpose, ErrBroken) // Tink says no more than that either
	}
	return plain, nil
}

// Old reports whether a value was sealed with a key that no longer seals. Such values are
// sealed again at the start, so that the old key can be removed.
func (k *Key) Old(sealed []byte) bool {
	id, ok := sealedWith(sealed)
	return ok && id != k.newest
}

func sealedWith(sealed []byte) (id uint32, ok bool) {
	if len(sealed) < prefixSize || sealed[0] != 1 {
		return 0, false
	}
	return binary.BigEndian.Uint32(sealed[1:]), true
}

// redacted stands for a key wherever one is shown.
const redacted = "[sealing key]"

// Format implements fmt.Formatter for all verbs.
func (k *Key) Format(f fmt.State, _ rune) { f.Write([]byte(redacted)) }

// LogValue implements slog.LogValuer.
func (k *Key) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalText implements encoding.TextMarshaler, and so JSON's.
func (k *Key) MarshalText() ([]byte, error) { return []byte(redacted), nil }
