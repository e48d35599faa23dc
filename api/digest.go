package api

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"net/http"
	"regexp"
	"strconv"
	"strings"

	"github.com/doze-run/doze/runtime/guest"
)

// Headers of digests (RFC 9530) and of ranges.
const (
	contentDigest = "Content-Digest"
	reprDigest    = "Repr-Digest"
	contentRange  = "Content-Range"
)

// parseDigest returns the SHA-256 of a header, which is a dictionary of digests by their
// algorithms (RFC 9530, section 2), or nil without the header. Other algorithms are ignored,
// as the RFC permits, but not alone: the client expects a digest to be verified.
func parseDigest(h http.Header, name string) ([]byte, error) {
	values := h.Values(name)
	if len(values) == 0 {
		return nil, nil
	}
	for member := range strings.SplitSeq(strings.Join(values, ","), ",") {
		key, value, _ := strings.Cut(strings.TrimSpace(member), "=")
		text, opened := strings.CutPrefix(value, ":")
		text, closed := strings.CutSuffix(text, ":")
		if key != "sha-256" {
			continue
		}
		sum, err := base64.StdEncoding.DecodeString(text)
		if !opened || !closed || err != nil || len(sum) != sha256.Size {
			return nil, invalid("header."+name, clip(member)+" is not a SHA-256", "write it like sha-256=:BASE64:")
		}
		return sum, nil
	}
	return nil, invalid("header."+name, "has no sha-256", "send sha-256=:BASE64:, other algorithms are not verified")
}

// digestOf returns the SHA-256 that the body of an upload must have, or nil.
func digestOf(h http.Header, partial bool) ([]byte, error) {
	content, err := parseDigest(h, contentDigest)
	if err != nil {
		return nil, err
	}
	whole, err := parseDigest(h, reprDigest)
	switch {
	case err != nil:
		return nil, err
	case whole == nil:
		return content, nil
	case partial:
		return nil, invalid("header."+reprDigest, "the digest of the whole file is not verified for a range", "send "+contentDigest+" with the digest of the range")
	case content != nil && !bytes.Equal(content, whole):
		return nil, invalid("header."+reprDigest, "differs from "+contentDigest, "send one of them")
	}
	return whole, nil
}

var rangePattern = regexp.MustCompile(`^bytes ([0-9]{1,13})-([0-9]{1,13})/([0-9]{1,13}|\*)$`)

// parseContentRange returns the range that a body of length bytes is, or nil for a whole file
// (RFC 9110, section 14.4). length is -1 if it is unknown.
func parseContentRange(header string, length int64) (*guest.WriteRange, error) {
	if header == "" {
		return nil, nil
	}
	fault := func(message string) error {
		return invalid("header."+contentRange, message, "write it like bytes 0-1023/4096 or bytes 0-1023/*, with positions below "+strconv.Itoa(guest.MaxFileSize))
	}
	parts := rangePattern.FindStringSubmatch(header)
	if parts == nil {
		return nil, fault(clip(header) + " is not a range of bytes")
	}
	first, _ := strconv.ParseInt(parts[1], 10, 64)
	last, _ := strconv.ParseInt(parts[2], 10, 64)
	size := int64(-1)
	if parts[3] != "*" {
		size, _ = strconv.ParseInt(parts[3], 10, 64)
	}
	switch {
	case last < first:
		return nil, fault("its last position precedes the first")
	case size >= 0 && size <= last:
		return nil, fault("the range lies outside of the file")
	case last >= guest.MaxFileSize, size > guest.MaxFileSize:
		return nil, fault("the file would be too large")
	case length >= 0 && length != last-first+1:
		return nil, fault("the range has " + strconv.FormatInt(last-first+1, 10) + " bytes, and the body " + strconv.FormatInt(length, 10))
	}
	return &guest.WriteRange{Offset: first, Length: last - first + 1, Size: size}, nil
}
