package wakeproxy

import (
	"slices"
	"strconv"
	"strings"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Name is what a preview's host name contains: {port}-{id}-{token}.{domain}, or
// {port}-{id}.{domain} for a public port. All of it is one DNS label, so that
// one wildcard certificate covers every preview of a domain.
type Name struct {
	Port  uint16
	ID    sandbox.ID
	Token string // empty for a public port
}

const (
	idLength = 12
	maxLabel = 63 // RFC 1035, section 2.3.4
)

// Host formats the name under a domain, in lower case.
func (n Name) Host(domain string) string {
	host := strconv.Itoa(int(n.Port)) + "-" + string(n.ID)
	if n.Token != "" {
		host += "-" + n.Token
	}
	return host + "." + domain
}

// ParseHost reads the Host of a request under one of the domains, which are in
// lower case. It accepts any case, one trailing dot and a port, as DNS and HTTP
// do, and is strict about everything else, so that each preview has one name.
func ParseHost(host string, domains []string) (name Name, ok bool) {
	// Longer than any host name with a port: refuse before doing any work.
	if len(host) > 255+len(":65535") {
		return Name{}, false
	}
	if i := strings.LastIndexByte(host, ':'); i >= 0 {
		if _, ok := parsePort(host[i+1:]); !ok {
			return Name{}, false
		}
		host = host[:i]
	}
	host = lowerASCII(strings.TrimSuffix(host, "."))
	label, rest, found := strings.Cut(host, ".")
	if !found || len(label) > maxLabel {
		return Name{}, false
	}
	if !slices.Contains(domains, rest) {
		return Name{}, false
	}
	return parseLabel(label)
}

func parseLabel(label string) (Name, bool) {
	port, rest, _ := strings.Cut(label, "-")
	id, token, hasToken := strings.Cut(rest, "-")
	number, ok := parsePort(port)
	if !ok || len(id) != idLength || !alphanumeric(id) {
		return Name{}, false
	}
	if hasToken && (token == "" || !alphanumeric(token)) {
		return Name{}, false
	}
	return Name{Port: number, ID: sandbox.ID(id), Token: token}, true
}

// parsePort accepts 1 to 65535 without sign or leading zeros.
func parsePort(s string) (uint16, bool) {
	if s == "" || s[0] < '1' || s[0] > '9' {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err == nil
}

func alphanumeric(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return true
}

// lowerASCII leaves other letters alone: strings.ToLower would turn the Kelvin
// sign into a k and so give one preview a second name.
func lowerASCII(s string) string {
	for i := range len(s) {
		if c := s[i]; c >= 'A' && c <= 'Z' {
			b := []byte(s)
			for j := i; j < len(b); j++ {
				if b[j] >= 'A' && b[j] <= 'Z' {
					b[j] += 'a' - 'A'
				}
			}
			return string(b)
		}
	}
	return s
}
