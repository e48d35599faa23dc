package main

import (
	"crypto/sha256"
	"encoding/hex"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/doze-run/doze/policies/sdk"
)

// signing has the parts of a signature.
type signing struct {
	method, path, query string // as they are sent
	headers             []header
	payload             string
	time                time.Time // UTC
	region, service     string
}

// header that is signed; its name is in lower case.
type header struct{ name, value string }

// signature signs the request with the secret secret_access_key.
func (s *signing) signature() (string, error) {
	mac, err := sdk.HMACSHA256("secret_access_key", "AWS4",
		[]byte(s.date()), []byte(s.region), []byte(s.service), []byte("aws4_request"), []byte(s.stringToSign()))
	return hex.EncodeToString(mac[:]), err
}

func (s *signing) date() string { return s.time.Format("20060102") }

func (s *signing) scope() string {
	return s.date() + "/" + s.region + "/" + s.service + "/aws4_request"
}

func (s *signing) stringToSign() string {
	hash := sha256.Sum256([]byte(s.canonicalRequest()))
	return "AWS4-HMAC-SHA256\n" + s.time.Format("20060102T150405Z") + "\n" + s.scope() + "\n" + hex.EncodeToString(hash[:])
}

func (s *signing) canonicalRequest() string {
	slices.SortFunc(s.headers, func(a, b header) int { return strings.Compare(a.name, b.name) })
	var headers strings.Builder
	for _, h := range s.headers {
		headers.WriteString(h.name + ":" + strings.Join(strings.Fields(h.value), " ") + "\n")
	}
	return strings.Join([]string{s.method, s.canonicalPath(), canonicalQuery(s.query), headers.String(), s.headerNames(), s.payload}, "\n")
}

// headerNames returns the names of the signed headers, sorted.
func (s *signing) headerNames() string {
	names := make([]string, len(s.headers))
	for i, h := range s.headers {
		names[i] = h.name
	}
	return strings.Join(names, ";")
}

// canonicalPath returns the path in one spelling. S3 uses the path as it is, escaped once;
// all other services resolve dots and empty parts, and escape the path as sent, including
// its escapes.
func (s *signing) canonicalPath() string {
	if s.service == "s3" {
		path := s.path
		if unescaped, err := url.PathUnescape(path); err == nil {
			path = unescaped
		}
		return strings.ReplaceAll(escape(path), "%2F", "/")
	}
	var parts []string
	for part := range strings.SplitSeq(s.path, "/") {
		switch part {
		case "", ".":
		case "..":
			parts = parts[:max(0, len(parts)-1)]
		default:
			parts = append(parts, escape(part))
		}
	}
	path := "/" + strings.Join(parts, "/")
	if len(parts) > 0 && strings.HasSuffix(s.path, "/") {
		path += "/"
	}
	return path
}

// canonicalQuery returns the query with its parameters sorted, in one spelling.
func canonicalQuery(query string) string {
	var parameters [][]string
	for pair := range strings.SplitSeq(query, "&") {
		if pair == "" {
			continue
		}
		name, value, _ := strings.Cut(pair, "=")
		parameters = append(parameters, []string{reescape(name), reescape(value)})
	}
	slices.SortFunc(parameters, slices.Compare)
	pairs := make([]string, len(parameters))
	for i, p := range parameters {
		pairs[i] = strings.Join(p, "=")
	}
	return strings.Join(pairs, "&")
}

// reescape returns s in canonical escapes.
func reescape(s string) string {
	if unescaped, err := url.QueryUnescape(s); err == nil {
		s = unescaped
	}
	return escape(s)
}

// escape escapes all characters except the unreserved ones of RFC 3986.
func escape(s string) string {
	return strings.ReplaceAll(url.QueryEscape(s), "+", "%20")
}
