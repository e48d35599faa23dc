//go:build !wasip1

package sdktest

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
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

// Limits of the node.
const (
	maxReferences = 64
	maxReference  = 192 << 10 // bytes that one reference stands for
	maxHeld       = 1 << 20   // bytes that all references together stand for
	maxName       = 256
	maxText       = 64 << 10 // bytes to be encoded, signed or hashed
	maxParts      = 16
	maxSigns      = 4 // per request
	maxPrivateKey = 5 << 10
)

// references holds the references of an exchange. They stand for secrets and encoded text
// until the policy has finished.
type references struct {
	prefix  string // common to all references; empty until the first
	entries []refEntry
	held    int
}

type refEntry struct {
	text, value string
	secret      string // name of the secret, if the value is exactly its value
	escaped     bool
}

func (r *references) add(e refEntry) (string, bool) {
	if len(r.entries) == maxReferences || len(e.value) > maxReference || r.held+len(e.value) > maxHeld {
		return "", false
	}
	if r.prefix == "" {
		r.prefix = "doze-ref-" + rand.Text() + "-"
	}
	e.text = fmt.Sprintf("%s%02d", r.prefix, len(r.entries))
	r.entries = append(r.entries, e)
	r.held += len(e.value)
	return e.text, true
}

// in reports whether a text contains a reference or the beginning of one.
func (r *references) in(text string) bool { return r.prefix != "" && strings.Contains(text, r.prefix) }

// render replaces the references in text with values. Invalid and partial references are
// errors.
func (r *references) render(text string, value func(refEntry) string) (rendered string, err error) {
	if r.prefix == "" {
		return text, nil
	}
	rendered = regexp.MustCompile(r.prefix+`(\d\d)?`).ReplaceAllStringFunc(text, func(ref string) string {
		i, invalid := strconv.Atoi(ref[len(r.prefix):])
		if invalid != nil || i >= len(r.entries) {
			err = errors.New("an unknown reference, or only a part of one")
			return ""
		}
		return value(r.entries[i])
	})
	return rendered, err
}

func asIs(e refEntry) string { return e.value }

func inURL(e refEntry) string {
	if e.escaped {
		return e.value
	}
	return percent(e.value)
}

// rendered returns the request as it is sent.
func (h *host) rendered(body string) Result {
	check := func(place string, err error) {
		if err != nil {
			refuse("%s: %v", place, err)
		}
	}
	if h.references.in(h.method) {
		check("method", errors.New("no place for a secret"))
	}
	sent := Result{Method: h.method, Header: http.Header{"Host": {h.host}}}
	var err error
	path, query, found := strings.Cut(h.uri, "?")
	path, err = h.references.render(path, inURL)
	check("path", err)
	query, err = h.references.render(query, inURL)
	check("query", err)
	if sent.URI = path; found {
		sent.URI += "?" + query
	}
	for name, values := range h.header {
		if h.references.prefix != "" && strings.Contains(strings.ToLower(name), strings.ToLower(h.references.prefix)) {
			check("name of a header", errors.New("no place for a secret"))
		}
		for _, v := range values {
			rendered, err := h.references.render(v, asIs)
			check("header "+name, err)
			if rendered != v && strings.ContainsFunc(rendered, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
				check("header "+name, errors.New("the secret has line breaks or control characters, which no header can hold"))
			}
			sent.Header[name] = append(sent.Header[name], rendered)
		}
	}
	if h.body.written == nil { // the client's body has no references
		sent.Body = body
		return sent
	}
	sent.Body, err = h.references.render(body, asIs)
	check("body", err)
	if sent.Header.Get("Content-Length") != "" {
		sent.Header.Set("Content-Length", fmt.Sprint(len(sent.Body)))
	}
	return sent
}

// secret returns a secret for a function with valid arguments. If code is not 0, it is the
// reason why the secret cannot be used.
func (h *host) secret(name string, valid bool) (value string, code int32) {
	value, ok := h.policy.Secrets[name]
	switch {
	case h.phase != beforeNext:
		code = abi.NotAllowed
	case name == "" || len(name) > maxName || !valid:
		code = abi.BadArgument
	case !ok:
		code = abi.NotFound
	}
	return value, code
}

func (h *host) SecretRef(name string, buf []byte) int32 {
	value, code := h.secret(name, true)
	if code != 0 {
		return code
	}
	for _, e := range h.references.entries {
		if e.secret == name {
			return int32(put(buf, e.text))
		}
	}
	ref, ok := h.references.add(refEntry{value: value, secret: name})
	if !ok {
		return abi.LimitHit
	}
	return int32(put(buf, ref))
}

func (h *host) EncodeRef(encoding uint32, text string, buf []byte) int32 {
	switch {
	case h.phase != beforeNext:
		return abi.NotAllowed
	case encoding > abi.Percent || len(text) > maxText:
		return abi.BadArgument
	}
	value, err := h.references.render(text, asIs)
	switch {
	case err != nil:
		return abi.BadArgument
	case len(value) > maxReference:
		return abi.LimitHit
	}
	switch encoding {
	case abi.Base64:
		value = base64.StdEncoding.EncodeToString([]byte(value))
	case abi.Base64URL:
		value = base64.RawURLEncoding.EncodeToString([]byte(value))
	case abi.Hex:
		value = hex.EncodeToString([]byte(value))
	case abi.Percent:
		value = percent(value)
	}
	ref, ok := h.references.add(refEntry{value: value, escaped: encoding == abi.Percent})
	if !ok {
		return abi.LimitHit
	}
	return int32(put(buf, ref))
}

// percent escapes all characters except the unreserved ones of RFC 3986.
func percent(text string) string {
	return strings.ReplaceAll(url.QueryEscape(text), "+", "%20")
}

func (h *host) HMACSHA256(name, prefix string, parts, buf []byte) int32 {
	valid := len(prefix) <= maxName && len(parts) <= maxText
	var list [][]byte
	for len(parts) >= 4 && uint64(len(parts)-4) >= uint64(binary.LittleEndian.Uint32(parts)) {
		size := binary.LittleEndian.Uint32(parts)
		list, parts = append(list, parts[4:4+size]), parts[4+size:]
	}
	secret, code := h.secret(name, valid && len(parts) == 0 && len(list) > 0 && len(list) <= maxParts)
	if code != 0 {
		return code
	}
	key := []byte(prefix + secret)
	for _, part := range list {
		mac := hmac.New(sha256.New, key)
		mac.Write(part)
		key = mac.Sum(nil)
	}
	return int32(put(buf, string(key)))
}

func (h *host) Sign(name string, algorithm uint32, data, buf []byte) int32 {
	secret, code := h.secret(name, len(data) <= maxText && algorithm >= abi.RS256 && algorithm <= abi.ES256)
	if code == 0 || code == abi.NotFound {
		if h.signs++; h.signs > maxSigns {
			code = abi.LimitHit
		}
	}
	if code != 0 {
		return code
	}
	sum := sha256.Sum256(data)
	var signature []byte
	var err error
	switch key := parseKey(secret).(type) {
	case *rsa.PrivateKey:
		if algorithm == abi.RS256 {
			signature, err = rsa.SignPKCS1v15(nil, key, crypto.SHA256, sum[:])
		}
	case ed25519.PrivateKey:
		if algorithm == abi.EdDSA {
			signature = ed25519.Sign(key, data)
		}
	case *ecdsa.PrivateKey:
		if algorithm == abi.ES256 && key.Curve == elliptic.P256() {
			var r, s *big.Int
			if r, s, err = ecdsa.Sign(rand.Reader, key, sum[:]); err == nil {
				signature = append(r.FillBytes(make([]byte, 32)), s.FillBytes(make([]byte, 32))...)
			}
		}
	case nil:
		refuse("secret %s: no private key in PEM of at most %d bytes that can be read: PKCS #8, PKCS #1 or SEC 1, not encrypted", name, maxPrivateKey)
	}
	switch {
	case err != nil:
		refuse("secret %s: %v", name, err)
	case signature == nil:
		refuse("secret %s is a key of another kind: RS256 takes RSA, EdDSA takes Ed25519, ES256 takes EC P-256", name)
	}
	return int32(put(buf, string(signature)))
}

// parseKey parses a private key in PEM: PKCS #8, PKCS #1 or SEC 1. It returns nil if text
// is not such a key.
func parseKey(text string) any {
	block, _ := pem.Decode([]byte(text))
	if block == nil || len(block.Bytes) > maxPrivateKey {
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
