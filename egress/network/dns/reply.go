package dns

import (
	"net"
	"net/netip"

	"github.com/miekg/dns"
)

const (
	// ttl is the TTL of all answers in seconds. Each connection checks again whether
	// its name may be reached, so the TTL could be long. It is short for sandboxes
	// that move to another node or whose names were lost.
	ttl = 60
	// udpSize is the advertised UDP payload size in bytes: the one that clients
	// expect since DNS flag day 2020.
	udpSize = 1232
	// maxText is the maximum size in bytes of the reason in an answer, so that the
	// answer fits in 512 bytes with the longest name: header 12, question 259, OPT 11,
	// option 6.
	maxText = 200
)

// reply is an answer under construction.
type reply struct {
	question *dns.Question
	msg      dns.Msg
	opt      *dns.OPT // of the answer; nil if the client has no EDNS
	refusal  int      // the response code for a refused name
}

// edns finds the client's OPT record and adds the server's. All options are ignored; an
// unsigned answer needs no indication. It returns false if the answer is complete, with
// an error code.
func (a *reply) edns(extra []dns.RR) (valid bool) {
	var theirs *dns.OPT
	for _, rr := range extra {
		opt, ok := rr.(*dns.OPT)
		if !ok {
			continue
		}
		if theirs != nil { // RFC 6891, section 6.1.1
			a.msg.Rcode = dns.RcodeFormatError
			return false
		}
		theirs = opt
	}
	if theirs == nil {
		return true
	}
	a.opt = &dns.OPT{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeOPT}}
	a.opt.SetUDPSize(udpSize)
	a.opt.SetDo(theirs.Do())
	a.msg.Extra = []dns.RR{a.opt}
	if theirs.Version() != 0 {
		a.msg.Rcode = dns.RcodeBadVers
		return false
	}
	return true
}

func (a *reply) header(rrtype uint16) dns.RR_Header {
	return dns.RR_Header{Name: a.question.Name, Rrtype: rrtype, Class: dns.ClassINET, Ttl: ttl}
}

func (a *reply) address(addr netip.Addr) {
	if addr.Is4() {
		a.msg.Answer = []dns.RR{&dns.A{Hdr: a.header(dns.TypeA), A: net.IP(addr.AsSlice())}}
		return
	}
	a.msg.Answer = []dns.RR{&dns.AAAA{Hdr: a.header(dns.TypeAAAA), AAAA: net.IP(addr.AsSlice())}}
}

func (a *reply) pointer(name string) {
	a.msg.Answer = []dns.RR{&dns.PTR{Hdr: a.header(dns.TypePTR), Ptr: name + "."}}
}

// any declines an ANY query with a synthesized HINFO record (RFC 8482, section 4.2).
func (a *reply) any() {
	a.msg.Answer = []dns.RR{&dns.HINFO{Hdr: a.header(dns.TypeHINFO), Cpu: "RFC8482"}}
}

// none answers that the name, or a record of this type, does not exist. The SOA
// determines how long the answer may be cached (RFC 2308).
func (a *reply) none(rcode int) {
	a.msg.Rcode = rcode
	soa := &dns.SOA{Hdr: a.header(dns.TypeSOA), Ns: ".", Mbox: ".", Serial: 1, Refresh: ttl, Retry: ttl, Expire: ttl, Minttl: ttl}
	soa.Hdr.Name = "."
	a.msg.Ns = []dns.RR{soa}
}

// refuse answers with an error code, and with the reason if the client supports EDNS
// (RFC 8914).
func (a *reply) refuse(rcode int, info uint16, reason string) {
	a.msg.Rcode = rcode
	if a.opt != nil {
		a.opt.Option = []dns.EDNS0{&dns.EDNS0_EDE{InfoCode: info, ExtraText: cut(reason, maxText)}}
	}
}
