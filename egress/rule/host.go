package rule

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/idna"

	"github.com/doze-run/doze/egress/rule/preset"
)

// Names as browsers look them up (UTS 46): lower case, ASCII, no character that
// looks like structure. Underscores and hyphens stand anywhere, as in DNS.
var lookup = idna.New(idna.MapForLookup(), idna.BidiRule(), idna.StrictDomainName(false), idna.CheckHyphens(false), idna.VerifyDNSLength(true))

// maxUnicode bounds the work for names that have to be converted: 253 characters
// of at most 4 bytes.
const maxUnicode = 4 * 253

var errAddress = errors.New("is an address: rules name addresses under `addresses`")

// CleanHost returns the form in which rules see a host name: lower case, ASCII,
// no dot at the end. Anything else is an error, an address too.
func CleanHost(host string) (string, error) {
	name := strings.TrimSuffix(host, ".")
	if len(name) > maxUnicode {
		return "", fmt.Errorf("invalid host name %.80q…", host)
	}
	if !plain(name) || strings.Contains(name, "xn--") { // few are
		var err error
		if name, err = lookup.ToASCII(name); err != nil || !plain(name) || !utf8.ValidString(host) {
			return "", fmt.Errorf("invalid host name %.80q", host)
		}
	}
	if isAddress(name) {
		return "", fmt.Errorf("%.80q %w", host, errAddress)
	}
	return name, nil
}

// plain reports whether a name is in its final form: labels of 1 to 63 of a-z, 0-9,
// - and _, and 253 bytes in all (RFC 1035).
func plain(name string) bool {
	for label := range strings.SplitSeq(name, ".") {
		if len(label) == 0 || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return false
		}
	}
	return len(name) <= 253
}

// isAddress reports whether resolvers and browsers parse a name as an IPv4 address: its last
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
	// presets that are named, each once. They are shared by all rules that name them.
	presets []*Hosts
	// undefined are the presets that are named and not defined.
	undefined []string
}

func (h *Hosts) add(pattern string, defined *Presets) error {
	if pattern == "**" {
		h.every = true
		return nil
	}
	if name, ok := strings.CutPrefix(pattern, preset.Prefix); ok {
		return h.addPreset(name, defined)
	}
	return h.addName(pattern)
}

// addName adds a name, or `*.` and a name.
func (h *Hosts) addName(pattern string) error {
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

// addPreset adds a preset. For one that is not defined it returns an error, too.
func (h *Hosts) addPreset(name string, defined *Presets) error {
	p, err := defined.lookup(name)
	if err != nil {
		if !slices.Contains(h.undefined, name) {
			h.undefined = append(h.undefined, name)
		}
		return err
	}
	if !slices.Contains(h.presets, p) {
		h.presets = append(h.presets, p)
	}
	return nil
}

// withPresets returns the hosts of valid patterns with the presets that are defined now.
func (h *Hosts) withPresets(patterns []string, defined *Presets) Hosts {
	with := *h
	with.presets, with.undefined = nil, nil
	for _, pattern := range patterns {
		if name, ok := strings.CutPrefix(pattern, preset.Prefix); ok {
			_ = with.addPreset(name, defined) // undefined has the error
		}
	}
	return with
}

// compileHosts compiles patterns; the error describes the first invalid one. Without presets,
// the built-in ones are defined.
func compileHosts(defined *Presets, patterns ...string) (*Hosts, error) {
	h := new(Hosts)
	for _, p := range patterns {
		if err := h.add(p, defined); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// covers reports whether every host that other matches is matched.
func (h *Hosts) covers(other *Hosts) bool {
	if h.every || other.every {
		return h.every
	}
	for name := range other.exact {
		if !h.Match(name) {
			return false
		}
	}
	for name := range other.below {
		if !h.matchesBelow(name) {
			return false
		}
	}
	return !slices.ContainsFunc(other.presets, func(p *Hosts) bool { return !h.covers(p) })
}

// overlaps reports whether some host is matched by both.
func (h *Hosts) overlaps(other *Hosts) bool {
	if h.every || other.every {
		return true
	}
	for _, pair := range [2][2]*Hosts{{h, other}, {other, h}} {
		for _, list := range append([]*Hosts{pair[0]}, pair[0].presets...) {
			for name := range list.exact {
				if pair[1].Match(name) {
					return true
				}
			}
			for name := range list.below {
				if pair[1].matchesBelow(name) {
					return true
				}
			}
		}
	}
	return false
}

// size is the number of patterns, including the patterns of presets.
func (h *Hosts) size() int {
	n := len(h.exact) + len(h.below)
	for _, p := range h.presets {
		n += p.size()
	}
	return n
}

// Match reports whether a pattern matches the host, which CleanHost has cleaned.
func (h *Hosts) Match(host string) bool {
	return h.matchesByName(host) || slices.ContainsFunc(h.presets, func(p *Hosts) bool { return p.Match(host) })
}

// matchesByName reports whether a pattern other than a preset matches the host.
func (h *Hosts) matchesByName(host string) bool {
	return h.every || h.exact[host] || h.belowAny(host)
}

// matchesBelow reports whether all hosts below a name are matched by one pattern.
func (h *Hosts) matchesBelow(name string) bool {
	return h.every || h.below[name] || h.belowAny(name) ||
		slices.ContainsFunc(h.presets, func(p *Hosts) bool { return p.matchesBelow(name) })
}

// belowAny reports whether a pattern such as `*.example.com` matches the host.
func (h *Hosts) belowAny(host string) bool {
	if len(h.below) == 0 {
		return false
	}
	for _, parent, found := strings.Cut(host, "."); found; _, parent, found = strings.Cut(parent, ".") {
		if h.below[parent] {
			return true
		}
	}
	return false
}
