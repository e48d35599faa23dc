//go:build !wasip1

package sdktest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/pem"
	"regexp"
	"strings"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

// references stand for secrets and for encoded text, until the policy has ended.
type references map[string]string

var reference = regexp.MustCompile(`doze-ref-[a-z2-7]{26}`)

func (h *host) refer(value string, buf []byte) int32 {
	if h.references == nil {
		h.references = references{}
	}
	for ref, v := range h.references {
		if v == value {
			return int32(put(buf, ref))
		}
	}
	ref := "doze-ref-" + strings.ToLower(rand.Text())
	h.references[ref] = value
	return int32(put(buf, ref))
}

// render puts values in the place of references.
func (h *host) render(text string) string {
	return reference.ReplaceAllStringFunc(text, func(ref string) string {
		if value, ok := h.references[ref]; ok {
			return value
		}
		return ref
	})
}

func (h *host) SecretRef(name string, buf []byte) int32 {
	value, ok := h.policy.Secrets[name]
	if !ok {
		return abi.NotFound
	}
	return h.refer(value, buf)
}

func (h *host) EncodeRef(encoding uint32, text string, buf []byte) int32 {
	text = h.render(text)
	switch encoding {
	case abi.Base64:
		text = base64.StdEncoding.EncodeToString([]byte(text))
	case abi.Base64URL:
		text = base64.RawURLEncoding.EncodeToString([]byte(text))
	case abi.Hex:
		text = hex.EncodeToString([]byte(text))
	case abi.Percent:
		text = percent(text)
	default:
		return abi.BadArgument
	}
	return h.refer(text, buf)
}

// percent escapes all but RFC 3986's unreserved characters.
func percent(text string) string {
	var b strings.Builder
	for _, c := range []byte(text) {
		if c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || strings.IndexByte("-._~", c) >= 0 {
			b.WriteByte(c)
		} else {
			b.WriteString("%" + strings.ToUpper(hex.EncodeToString([]byte{c})))
		}
	}
	return b.String()
}

func (h *host) HMACSHA256(name, prefix string, parts, buf []byte) int32 {
	secret, ok := h.policy.Secrets[name]
	if !ok {
		return abi.NotFound
	}
	key, n := []byte(prefix+secret), 0
	for ; len(parts) > 0; n++ {
		if len(parts) < 4 || uint32(len(parts)-4) < binary.LittleEndian.Uint32(parts) {
			return abi.BadArgument
		}
		size := binary.LittleEndian.Uint32(parts)
		mac := hmac.New(sha256.New, key)
		mac.Write(parts[4 : 4+size])
		key, parts = mac.Sum(nil), parts[4+size:]
	}
	if n < 1 || n > 16 {
		return abi.BadArgument
	}
	return int32(put(buf, string(key)))
}

func (h *host) Sign(name string, algorithm uint32, data, buf []byte) int32 {
	secret, ok := h.policy.Secrets[name]
	if !ok {
		return abi.NotFound
	}
	sum := sha256.Sum256(data)
	var sig []byte
	var err error
	switch key := parseKey(secret).(type) {
	case *rsa.PrivateKey:
		if algorithm != abi.RS256 {
			return abi.BadArgument
		}
		sig, err = key.Sign(rand.Reader, sum[:], crypto.SHA256)
	case ed25519.PrivateKey:
		if algorithm != abi.EdDSA {
			return abi.BadArgument
		}
		sig = ed25519.Sign(key, data)
	case *ecdsa.PrivateKey:
		if algorithm != abi.ES256 || key.Curve.Params().BitSize != 256 {
			return abi.BadArgument
		}
		r, s, signErr := ecdsa.Sign(rand.Reader, key, sum[:])
		if err = signErr; err == nil {
			sig = make([]byte, 64)
			r.FillBytes(sig[:32])
			s.FillBytes(sig[32:])
		}
	default:
		return abi.BadArgument
	}
	if err != nil {
		return abi.BadArgument
	}
	return int32(put(buf, string(sig)))
}

// parseKey is a private key in PEM: PKCS #8, PKCS #1 or SEC 1. Nil if it is none.
func parseKey(text string) any {
	block, _ := pem.Decode([]byte(text))
	if block == nil {
		return nil
	}
	if key, err := x509.ParsePKCS8PrivateKey(block.Bytes); err == nil {
		return key
	}
	if key, err := x509.ParsePKCS1PrivateKey(block.Bytes); err == nil {
		return key
	}
	if key, err := x509.ParseECPrivateKey(block.Bytes); err == nil {
		return key
	}
	return nil
}
