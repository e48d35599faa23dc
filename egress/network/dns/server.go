// Package dns is the name server of sandboxes. Each allowed name gets an address of
// its own from link.Pool: a connection to this address reaches the node, which
// identifies the name by it.
//
// No query leaves the node: whether a name exists is found out when a connection
// to it is dialled. So names carry nothing out of a sandbox, and one that does
// not exist has an address, too: the connection to it fails.
//
// Every answer fits in 512 bytes, so that none is ever truncated.
package dns

import (
	"encoding/binary"
	"net/netip"
	"sync"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/time/rate"
)

// Config of a Server. Names in it are clean, see rule.CleanHost.
type Config struct {
	// Decide says whether a name is answered, and if not, why: for the client
	// and the audit log. It does not wait.
	Decide func(name string) (allowed bool, reason string)
	// Refused is told of refusals. The name is as it was asked for if it is no
	// host name, and empty when queries are dropped because there are too many.
	// Refusals of one name right after another are told once.
	Refused func(name, reason string)

	// Known are the addresses that earlier Servers of this sandbox gave. It is
	// read by New only, and what cannot be right in it is left out.
	Known map[netip.Addr]string
	// Record is called before an address is answered for the first time, Forget
	// before it may become another name's. Both may be nil, and are called by
	// several goroutines, but not about one address at a time.
	Record func(name string, a netip.Addr)
	Forget func(name string, a netip.Addr)

	// Names is how many names have addresses at a time: 8192, at most 65536. If
	// there are more, those that were not used for an hour go; if all were used,
	// others get SERVFAIL.
	Names int
	// Rate and Burst of queries a second: 1000 and 2000. A query takes some
	// microseconds; a busy client, which asks twice for each connection, is far
	// below. What is above is dropped, and clients ask again after a while; TCP
	// waits.
	Rate  float64
	Burst int
}

func (c *Config) defaults() {
	if c.Refused == nil {
		c.Refused = func(string, string) {}
	}
	if c.Names == 0 {
		c.Names = 8192
	}
	c.Names = min(c.Names, 1<<16) // half of the pool: there is always a free address
	if c.Rate == 0 {
		c.Rate = 1000
	}
	if c.Burst == 0 {
		c.Burst = 2000
	}
}

// Server answers one sandbox. It has no goroutines, takes next to no memory
// until it is asked, and is safe for concurrent use.
type Server struct {
	cfg     Config
	limiter *rate.Limiter
	names   names
	refused refusals
	dropped refusals
}

// New returns a Server.
func New(cfg Config) *Server {
	cfg.defaults()
	s := &Server{cfg: cfg, limiter: rate.NewLimiter(rate.Limit(cfg.Rate), cfg.Burst)}
	s.names.most = cfg.Names
	s.names.load(cfg.Known, time.Now())
	s.cfg.Known = nil
	return s
}

// Host returns the name that an address was given for. It is called for each
// connection: a name that connections go to keeps its address.
func (s *Server) Host(a netip.Addr) (string, bool) {
	return s.names.host(a.Unmap(), time.Now())
}

const (
	headerSize = 12 // RFC 1035, section 4.1.1
	// maxQuery in bytes: a name has 255, the options of a stub resolver some
	// 50, and who pads fills up to 128 (RFC 8467).
	maxQuery = 2048
	// maxExtra is how many additional records a query may have: OPT and what
	// signs it.
	maxExtra = 2
)

// Answer returns the answer to one message, or nil if there is none: to what is
// no query, and above the rate.
func (s *Server) Answer(query []byte) []byte { return s.answerDatagram(query, dns.RcodeRefused) }

// AnswerSecond is Answer as link.SecondServer: names that are refused do not exist.
// musl takes no REFUSED for an answer and waits until its time is over; it asks all
// of its servers at once and takes NXDOMAIN. Others ask the second server when the
// first refuses.
func (s *Server) AnswerSecond(query []byte) []byte {
	return s.answerDatagram(query, dns.RcodeNameError)
}

// answerDatagram answers with that code where a name is refused.
func (s *Server) answerDatagram(query []byte, refusal int) []byte {
	if !isQuery(query) {
		return nil
	}
	if !s.limiter.Allow() {
		if s.dropped.isFirst("", time.Now()) {
			s.cfg.Refused("", "the sandbox sends too many DNS queries: some are dropped")
		}
		return nil
	}
	return s.answer(query, refusal)
}

// isQuery keeps two servers from answering each other's answers.
func isQuery(b []byte) bool { return len(b) >= headerSize && b[2]&0x80 == 0 }

// answer answers a query, see isQuery and answerDatagram.
func (s *Server) answer(query []byte, refusal int) []byte {
	if opcode := query[2] >> 3 & 0xf; opcode != dns.OpcodeQuery {
		return bare(query, dns.RcodeNotImplemented)
	}
	// Looked at before the records: they are the sandbox's numbers.
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

// bare is an answer without anything but a code.
func bare(query []byte, rcode byte) []byte {
	b := make([]byte, headerSize)
	copy(b, query[:3])
	b[2] = b[2]&^0x06 | 0x80 // an answer; neither authoritative nor truncated
	b[3] = rcode
	return b
}

// refusals remembers the last refusal that was told.
type refusals struct {
	mu   sync.Mutex
	name string
	at   time.Time
}

// again is after how long a refusal is told once more: a resolver asks for A and
// AAAA, and both again after 2 seconds.
const again = 5 * time.Second

func (r *refusals) isFirst(name string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.name == name && now.Sub(r.at) < again {
		return false
	}
	r.name, r.at = name, now
	return true
}
