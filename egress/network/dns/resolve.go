package dns

import (
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/miekg/dns"

	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/runtime/netns/link"
)

// resolve completes the answer to a question.
func (s *Server) resolve(a *reply) {
	q := a.question
	if q.Qclass != dns.ClassINET { // such as version.bind in class CH
		a.refuse(dns.RcodeRefused, dns.ExtendedErrorCodeNotSupported, "only names of the internet are answered")
		return
	}
	if q.Qtype >= dns.TypeTKEY && q.Qtype < dns.TypeANY { // zone transfers and similar queries
		a.refuse(dns.RcodeNotImplemented, dns.ExtendedErrorCodeInvalidQueryType, "")
		return
	}
	if q.Name == "." {
		a.none(dns.RcodeSuccess)
		return
	}
	queried := strings.ToLower(strings.TrimSuffix(q.Name, "."))
	// The library escapes a dot within a label, and other characters that are not valid in
	// host names, with a backslash.
	if !strings.Contains(queried, `\`) && s.special(a, queried) {
		return
	}
	name, err := rule.CleanHost(queried)
	if err != nil {
		s.refuse(a, cut(queried, maxName), "invalid host name")
		return
	}
	if allowed, reason := s.cfg.Decide(name); !allowed {
		s.refuse(a, name, reason)
		return
	}
	switch q.Qtype {
	case dns.TypeA:
		s.assign(a, name)
	case dns.TypeANY:
		a.any()
	default:
		// This includes AAAA, because the sandbox has no IPv6, and HTTPS and SVCB: the
		// facts in these records (h3, ECH, that the site requires https) are either
		// not possible through the node or not known to it.
		a.none(dns.RcodeSuccess)
	}
}

// maxName is the maximum size in bytes of an invalid host name in a report.
const maxName = 253

func (s *Server) refuse(a *reply, name, reason string) {
	// Clients do not cache an NXDOMAIN without an SOA (RFC 2308, section 5): the rules
	// may change at any time.
	a.refuse(a.refusal, dns.ExtendedErrorCodeProhibited, reason)
	s.report(&s.refused, name, reason)
}

// assign answers with the name's address.
func (s *Server) assign(a *reply, name string) {
	addr, ok := s.names.assign(name, time.Now())
	if !ok {
		const reason = "the sandbox looked up too many names within an hour"
		a.refuse(dns.RcodeServerFailure, dns.ExtendedErrorCodeOther, reason)
		s.report(&s.refused, name, reason)
		return
	}
	a.address(addr)
}

// special answers names that mean the same everywhere, or to which no rule applies. It
// returns false for all other names.
func (s *Server) special(a *reply, name string) bool {
	switch top := name[strings.LastIndexByte(name, '.')+1:]; {
	case top == "localhost": // RFC 6761, section 6.3
		switch a.question.Qtype {
		case dns.TypeA:
			a.address(netip.AddrFrom4([4]byte{127, 0, 0, 1}))
		case dns.TypeAAAA:
			a.address(netip.IPv6Loopback())
		default:
			a.none(dns.RcodeSuccess)
		}
	case top == "invalid", top == "onion": // RFC 6761, section 6.4; RFC 7686
		a.none(dns.RcodeNameError)
	case name == "use-application-dns.net":
		// Browsers that prefer DNS over HTTPS query this name; NXDOMAIN disables DNS
		// over HTTPS. Connections to the addresses that it returns would be refused.
		a.none(dns.RcodeNameError)
	case top == "arpa" && name != "home.arpa" && !strings.HasSuffix(name, ".home.arpa"): // RFC 8375
		s.reverse(a, name)
	default:
		return false
	}
	return true
}

// reverse answers names below arpa. Only names of loopback addresses and of assigned
// addresses exist.
func (s *Server) reverse(a *reply, name string) {
	host := ""
	if addr := fromReverse(name); addr.IsLoopback() {
		host = "localhost"
	} else if link.Pool.Contains(addr) {
		host, _ = s.names.host(addr, time.Now())
	}
	switch {
	case host == "":
		a.none(dns.RcodeNameError)
	case a.question.Qtype == dns.TypePTR:
		a.pointer(host)
	default:
		a.none(dns.RcodeSuccess)
	}
}

// fromReverse returns the IPv4 address of a name such as 1.2.0.192.in-addr.arpa, or the
// zero Addr for other names.
func fromReverse(name string) netip.Addr {
	labels := strings.Split(strings.TrimSuffix(name, ".in-addr.arpa"), ".")
	slices.Reverse(labels)
	a, err := netip.ParseAddr(strings.Join(labels, "."))
	if err != nil || !a.Is4() {
		return netip.Addr{}
	}
	return a
}

// cut returns the beginning of s in whole characters, not longer than limit bytes.
func cut(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	for limit > 0 && !utf8.RuneStart(s[limit]) {
		limit--
	}
	return s[:limit]
}
