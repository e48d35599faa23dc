package main

import (
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/url"
	"slices"
	"strings"

	"github.com/doze-run/doze/policies/sdk"
)

const unsigned = "UNSIGNED-PAYLOAD"

// payloadOf returns what stands for the body in the signature.
func payloadOf(c config, r *sdk.Request) (string, error) {
	// AWS's programs hash the body for S3 themselves. Where they sign each chunk, they do so
	// with a key that is not the rule's.
	switch own := r.Header.Get("X-Amz-Content-Sha256"); {
	case own == unsigned, own == "STREAMING-UNSIGNED-PAYLOAD-TRAILER", isHash(own):
		return own, nil
	case strings.HasPrefix(own, "STREAMING-"):
		return "", sdk.Deny("the body's chunks are signed by the client's own key; set payload signing off, or send Content-MD5 instead of a trailing checksum")
	}
	if c.Payload == payloadUnsigned {
		return unsigned, nil
	}
	if err := sdk.Enable(sdk.BufferRequest); err != nil {
		return "", err
	}
	hash := sha256.New()
	_, err := io.Copy(hash, &r.Body)
	return hex.EncodeToString(hash.Sum(nil)), err
}

func isHash(s string) bool {
	return len(s) == 2*sha256.Size && strings.Trim(s, "0123456789abcdef") == ""
}

// signatureParameters are the parameters of a request that the client signed in its query.
var signatureParameters = []string{
	"X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Date", "X-Amz-Expires",
	"X-Amz-SignedHeaders", "X-Amz-Signature", "X-Amz-Security-Token",
}

// removeSignature removes the client's own signature, and writes spaces in the query in the
// form that both the signature and the service use.
func removeSignature(r *sdk.Request) {
	r.Header.Del("Authorization")
	r.Header.Del("X-Amz-Security-Token")
	r.Header.Del("Date") // X-Amz-Date takes its place
	path, query, found := strings.Cut(r.URI(), "?")
	if !found {
		return
	}
	var pairs []string
	for pair := range strings.SplitSeq(query, "&") {
		key, _, _ := strings.Cut(pair, "=")
		if unescaped, err := url.QueryUnescape(key); pair == "" || err == nil && slices.ContainsFunc(signatureParameters, func(p string) bool { return strings.EqualFold(p, unescaped) }) {
			continue
		}
		pairs = append(pairs, strings.ReplaceAll(pair, "+", "%20"))
	}
	if len(pairs) > 0 {
		path += "?" + strings.Join(pairs, "&")
	}
	r.SetURI(path)
}

// signedHeaders returns the headers that have to be signed: the host, the type and all
// of Amazon's. Others may be changed on the way.
func signedHeaders(r *sdk.Request) ([]header, error) {
	host := r.Header.Get("Host")
	if host == "" {
		var err error
		if host, err = sdk.Host(); err != nil {
			return nil, err
		}
	}
	headers := []header{{"host", host}}
	for _, name := range r.Header.Names() {
		if name == "content-type" || name == "content-md5" || strings.HasPrefix(name, "x-amz-") {
			headers = append(headers, header{name, strings.Join(r.Header.Values(name), ",")})
		}
	}
	return headers, nil
}
