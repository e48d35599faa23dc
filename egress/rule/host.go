package rule

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/idna"

	"github.com/doze-run/doze/egress/preset"
)

// Names as browsers look them up (UTS 46): lower case, ASCII, no character that
// looks like structure. Underscores and hyphens stand anywhere, as in DNS.
var lookup = idna.New(idna.MapForLookup(), idna.BidiRule(), idna.StrictDomainName(false), idna.CheckHyphens(false), idna.VerifyDNSLength(true))

// maxUnicode bounds the work for names that have to be converted: 253 characters
// of at most 4 bytes.
const maxUnicode = 4 * 253

var errAddress = errors.New("is an address: rules name addresses under `addresses`")

// CleanHost returns the form in which rules see a host name: lower case, ASCII,
// no dot at the end. Anything that is no name is an error, an address too.
func CleanHost(host string) (string, error) {
	name := strings.TrimSuffix(host, ".")
	if len(name) > maxUnicode {
		return "", fmt.Errorf("%.80q… is no host name", host)
	}
	if !plain(name) || strings.Contains(name, "xn--") { // few are
		var err error
		if name, err = lookup.ToASCII(name); err != nil || !plain(name) || !utf8.ValidString(host) {
			return "", fmt.Errorf("%.80q is no host name", host)
		}
	}
	if isAddress(name) {
		return "", fmt.Errorf("%.80q %w", host, errAddress)
	}
	return name, nil
}

// plain says whether a name is in its final form: labels of 1 to 63 of a-z, 0-9,
// - and _, and 253 bytes in all (RFC 1035).
func plain(name string) bool {
	if len(name) == 0 || len(name) > 253 {
		return false
	}
	label := 0
	for i := range len(name) {
		switch c := name[i]; {
		case c == '.':
			if label == 0 {
				return false
			}
			label = 0
			continue
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9', c == '-', c == '_':
		default:
			return false
		}
		if label++; label > 63 {
			return false
		}
	}
	return label > 0
}

// isAddress finds what resolvers and browsers take for an IPv4 address: the last
// label is a number, decimal or hexadecimal (URL standard, "ends in a number").
func isAddress(name string) bool {
	if _, err := netip.ParseAddr(name); err == nil {
		return true
	}
	last := name[strings.LastIndexByte(name, '.')+1:]
	if hex, ok := strings.CutPrefix(last, "0x"); ok {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return strings.Trim(last, "0123456789") == ""
}

// CleanPattern reads a pattern of host names: a name, or `*.` and a name, which
// stands for all below it and not for the name itself. The pattern `**` is an
// error here. The name is as CleanHost returns it.
func CleanPattern(pattern string) (name string, below bool, err error) {
	name, below = strings.CutPrefix(pattern, "*.")
	if strings.Contains(name, "*") {
		return "", false, fmt.Errorf("%.80q: a pattern is a name, `*.` and a name, or `**`", pattern)
	}
	name, err = CleanHost(name)
	return name, below, err
}

// Hosts are compiled patterns: names, `*.example.com` (all below, without
// example.com itself), `**` (every name) and presets such as `preset:github`.
type Hosts struct {
	exact map[string]bool
	below map[string]bool // "example.com" for all below it
	every bool
}

func (h *Hosts) add(pattern string) error {
	if pattern == "**" {
		h.every = true
		return nil
	}
	if p, ok, err := preset.Parse(pattern); ok {
		for _, host := range p.Hosts {
			if err := h.add(host); err != nil {
				return err
			}
		}
		return err
	}
	name, below, err := CleanPattern(pattern)
	if err != nil {
		return err
	}
	names := &h.exact
	if below {
		names = &h.below
	}
	if *names == nil {
		*names = map[string]bool{}
	}
	(*names)[name] = true
	return nil
}

// CompileHosts compiles patterns; the error says what is wrong with the first that
// is none.
func CompileHosts(patterns ...string) (*Hosts, error) {
	h := new(Hosts)
	for _, p := range patterns {
		if err := h.add(p); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// Every says whether a pattern is `**`.
func (h *Hosts) Every() bool { return h.every }

// covers says whether every host that a valid pattern matches is matched.
func (h *Hosts) covers(pattern string) bool {
	if h.every || pattern == "**" {
		return h.every
	}
	if p, ok, _ := preset.Parse(pattern); ok {
		return !slices.ContainsFunc(p.Hosts, func(host string) bool { return !h.covers(host) })
	}
	name, below, err := CleanPattern(pattern)
	if err != nil {
		return false
	}
	return below && h.below[name] || !below && h.exact[name] || h.belowAny(name)
}

// overlaps says whether some host is matched by both.
func (h *Hosts) overlaps(other *Hosts) bool {
	if h.every || other.every {
		return true
	}
	for _, pair := range [2][2]*Hosts{{h, other}, {other, h}} {
		for name := range pair[0].exact {
			if pair[1].Match(name) {
				return true
			}
		}
		for name := range pair[0].below {
			if pair[1].below[name] || pair[1].belowAny(name) {
				return true
			}
		}
	}
	return false
}

// Match says whether a pattern matches the host, which CleanHost has cleaned.
func (h *Hosts) Match(host string) bool {
	return h.every || h.exact[host] || h.belowAny(host)
}

// belowAny says whether a pattern such as `*.example.com` matches the host.
func (h *Hosts) belowAny(host string) bool {
	for parent := host; len(h.below) > 0; {
		var found bool
		if _, parent, found = strings.Cut(parent, "."); !found {
			break
		}
		if h.below[parent] {
			return true
		}
	}
	return false
}
