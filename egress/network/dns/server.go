// Package dns is the name server of sandboxes. Each allowed name gets an address of
// its own from link.Pool: a connection to this address reaches the node, which
// identifies the name by it.
//
// No query leaves the node: it resolves a name only when it dials a connection to it.
// So queries carry no data out of a sandbox. A name that does not exist gets an address,
// too: the connection to it fails.
//
// Every answer fits in 512 bytes, so none is ever truncated.
package dns

import (
	"encoding/binary"
	"net/netip"
	"sync"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/time/rate"

	"github.com/doze-run/doze/runtime/netns/link"
)

// Config configures a Server. Its names are clean, see rule.CleanHost.
type Config struct {
	// Decide reports whether a name is allowed, and if not, the reason, for the client
	// and the audit log. It must not block.
	Decide func(name string) (allowed bool, reason string)
	// Refused is called for refused names. A name that is not a valid host name is
	// as queried; an empty name means that queries are dropped because there are too
	// many. Consecutive refusals of one name are reported once in 5 seconds.
	Refused func(name, reason string)

	// Known has the addresses that earlier Servers of this sandbox assigned. Only New
	// reads it, and ignores invalid entries.
	Known map[netip.Addr]string
	// Record is called before an address is first returned in an answer, Forget before
	// it may become another name's: one call at a time, which must not block or call the
	// Server.
	Record func(name string, a netip.Addr)
	Forget func(a netip.Addr)
}

// queriesPerSecond and queriesBurst limit the queries. A query takes some microseconds. A
// busy client, which sends two queries for each connection, stays far below. Datagrams
// above the rate are dropped, and clients retry after a while; TCP connections wait.
const queriesPerSecond, queriesBurst = 1000, 2000

// Server answers the queries of one sandbox. It has no goroutines, takes almost no
// memory before the first query, and is safe for concurrent use.
type Server struct {
	cfg     Config
	limiter *rate.Limiter
	names   names
	refused refusals
	dropped refusals
}

// New returns a Server.
func New(cfg Config) *Server {
	s := &Server{cfg: cfg, limiter: rate.NewLimiter(queriesPerSecond, queriesBurst)}
	s.names.limit, s.names.record, s.names.forget = maxNames, cfg.Record, cfg.Forget
	s.names.load(cfg.Known, time.Now())
	s.cfg.Known = nil
	return s
}

// Host returns the name to which an address is assigned. The caller calls it for each
// connection: a name with connections retains its address.
func (s *Server) Host(a netip.Addr) (string, bool) {
	return s.names.host(a.Unmap(), time.Now())
}

const (
	headerSize = 12 // RFC 1035, section 4.1.1
	// maxQuery is the maximum size of a query in bytes: a name has 255, the options of
	// a stub resolver about 50, and padding clients fill up to 128 (RFC 8467).
	maxQuery = 2048
	// maxExtra is how many additional records a query may have: OPT and a signature.
	maxExtra = 2
)

// Answer returns the answer to one message to a name server, or nil if there is none: if
// the message is not a query, or exceeds the rate.
//
// To link.SecondServer, refused names do not exist. musl does not accept REFUSED as an
// answer and waits until its timeout; it queries all of its servers concurrently and
// accepts NXDOMAIN. Other resolvers query the second server when the first one refuses.
func (s *Server) Answer(server netip.Addr, query []byte) []byte {
	if !isQuery(query) {
		return nil
	}
	if !s.limiter.Allow() {
		s.report(&s.dropped, "", "the sandbox sends too many DNS queries: some are dropped")
		return nil
	}
	if server == link.SecondServer {
		return s.answer(query, dns.RcodeNameError)
	}
	return s.answer(query, dns.RcodeRefused)
}

// isQuery reports whether a message is a query. It prevents two servers from answering
// each other's answers.
func isQuery(b []byte) bool { return len(b) >= headerSize && b[2]&0x80 == 0 }

// answer returns the answer to a message that passed isQuery. refusal is the response
// code of a refused name.
func (s *Server) answer(query []byte, refusal int) []byte {
	if opcode := query[2] >> 3 & 0xf; opcode != dns.OpcodeQuery {
		return bare(query, dns.RcodeNotImplemented)
	}
	// The counts are checked before the records are parsed: the sandbox controls them.
	count := func(section int) uint16 { return binary.BigEndian.Uint16(query[4+2*section:]) }
	if len(query) > maxQuery || count(0) != 1 || count(1) != 0 || count(2) != 0 || count(3) > maxExtra {
		return bare(query, dns.RcodeFormatError)
	}
	var q dns.Msg
	if err := q.Unpack(query); err != nil || len(q.Question) != 1 {
		return bare(query, dns.RcodeFormatError)
	}
	a := &reply{question: &q.Question[0], refusal: refusal}
	a.msg.SetReply(&q)
	a.msg.RecursionAvailable = true
	a.msg.Compress = true
	if valid := a.edns(q.Extra); valid {
		s.resolve(a)
	}
	packed, err := a.msg.Pack()
	if err != nil {
		return bare(query, dns.RcodeServerFailure)
	}
	return packed
}

// bare returns an answer that consists of a header with a response code.
func bare(query []byte, rcode byte) []byte {
	b := make([]byte, headerSize)
	copy(b, query[:3])
	b[2] = b[2]&^0x06 | 0x80 // an answer; neither authoritative nor truncated
	b[3] = rcode
	return b
}

// refusals records the last reported refusal.
type refusals struct {
	mu   sync.Mutex
	name string
	at   time.Time
}

// again is how long a repeated refusal is not reported: a resolver queries A and AAAA,
// and both again after 2 seconds.
const again = 5 * time.Second

// report calls Config.Refused, unless the last reported refusal is the same.
func (s *Server) report(r *refusals, name, reason string) {
	r.mu.Lock()
	now := time.Now()
	repeated := r.name == name && now.Sub(r.at) < again
	if !repeated {
		r.name, r.at = name, now
	}
	r.mu.Unlock()
	if !repeated {
		s.cfg.Refused(name, reason)
	}
}
