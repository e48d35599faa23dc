package stack

import (
	"context"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/doze-run/doze/runtime/netns/link"
	"github.com/doze-run/doze/testkit"
)

// These tests use a socket pair instead of a network device, and so need no privileges.

// newOnPair returns a Stack on one end of a pair; its listener is not used.
func newOnPair(t testing.TB, device *os.File, limits Limits, h Handler) *Stack {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(complete(Config{Device: device, Listener: l.(*net.TCPListener), Limits: limits, Handler: h}))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func socketPair(t testing.TB) (ours, theirs *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
}

func queryPacket(query string) header.IPv4 {
	length := header.UDPMinimumSize + len(query)
	ip := newPacket(sandbox, header.UDPProtocolNumber, length)
	ip.SetDestinationAddress(gateway)
	udp := header.UDP(ip.Payload())
	udp.Encode(&header.UDPFields{SrcPort: 1024, DstPort: dnsPort, Length: uint16(length)})
	copy(udp.Payload(), query)
	return ip
}

func TestInvalidPacketsAreDropped(t *testing.T) {
	ours, theirs := socketPair(t)
	defer theirs.Close()
	var mu sync.Mutex
	var got []string
	receive := func(what string) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, what)
	}
	s := newOnPair(t, ours, Limits{}, handler{
		tcp: func(_ context.Context, f *Flow) { receive(f.Destination().String()) },
		dns: func(_ context.Context, _ netip.Addr, query []byte) []byte {
			receive(string(query))
			return query
		},
	})
	t.Cleanup(func() { _ = s.Close() })
	first, later, foreign := queryPacket("1"), queryPacket("2"), queryPacket("3")
	first.SetFlagsFragmentOffset(header.IPv4FlagMoreFragments, 0)
	later.SetFlagsFragmentOffset(0, 8)
	foreign.SetSourceAddress(gateway)
	options := append(append(append([]byte(nil), queryPacket("4")[:20]...), 1, 1, 1, 1), queryPacket("4")[20:]...)
	options[0] = 0x46
	header.IPv4(options).SetTotalLength(uint16(len(options)))
	for _, packet := range [][]byte{
		first, later, foreign, options, {0x45}, {0x60, 0, 0, 0},
		queryPacket("short")[:30], // its header declares a greater length
		tcpPacket(header.TCPFlagSyn, 1024, 443, 0, make([]byte, maxSYN)),
		queryPacket("valid"),
	} {
		if _, err := theirs.Write(packet); err != nil {
			t.Fatal(err)
		}
	}
	_ = theirs.SetReadDeadline(time.Now().Add(testkit.Patience))
	if _, err := theirs.Read(make([]byte, link.MTU)); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil { // waits for the handlers of all accepted queries
		t.Fatal(err)
	}
	testkit.Diff(t, "queries", got, []string{"valid"})
}

func tcpPacket(flags header.TCPFlags, from, to uint16, seq uint32, payload []byte) []byte {
	b := make([]byte, header.IPv4MinimumSize+header.TCPMinimumSize+len(payload))
	ip := header.IPv4(b)
	ip.Encode(&header.IPv4Fields{TotalLength: uint16(len(b)), TTL: 64, Protocol: uint8(header.TCPProtocolNumber),
		SrcAddr: sandbox, DstAddr: tcpip.AddrFrom4([4]byte{198, 18, 7, 9})})
	ip.SetChecksum(^ip.CalculateChecksum())
	segment := header.TCP(ip.Payload())
	segment.Encode(&header.TCPFields{SrcPort: from, DstPort: to, SeqNum: seq, DataOffset: header.TCPMinimumSize,
		Flags: flags, WindowSize: 65535})
	copy(segment.Payload(), payload)
	sum := header.PseudoHeaderChecksum(header.TCPProtocolNumber, ip.SourceAddress(), ip.DestinationAddress(), uint16(len(segment)))
	segment.SetChecksum(^checksum.Checksum(segment, sum))
	return b
}

// SYNs exceed the limit while no attempt is decided.
func TestFloodOfSYNsIsBounded(t *testing.T) {
	ours, theirs := socketPair(t)
	defer theirs.Close()
	const limit = 16
	var calls atomic.Int64
	s := newOnPair(t, ours, Limits{Attempts: limit}, handler{tcp: func(ctx context.Context, f *Flow) {
		calls.Add(1)
		<-ctx.Done()
	}})
	resets := 0
	response := make([]byte, link.MTU)
	for n := range 5000 {
		syn := tcpPacket(header.TCPFlagSyn, uint16(1024+n), 443, uint32(n), nil)
		if _, err := theirs.Write(syn); err != nil {
			t.Fatal(err)
		}
		if n < limit {
			continue
		}
		_ = theirs.SetReadDeadline(time.Now().Add(testkit.Patience))
		if _, err := theirs.Read(response); err != nil {
			t.Fatal(err)
		}
		if reset := header.TCP(header.IPv4(response).Payload()); reset.Flags() != header.TCPFlagRst|header.TCPFlagAck || reset.AckNumber() != uint32(n+1) {
			t.Fatalf("the response to SYN %d is %v of %d", n, reset.Flags(), reset.AckNumber())
		}
		resets++
	}
	if resets != 5000-limit || s.connections() != limit {
		t.Errorf("%d resets, %d connections", resets, s.connections())
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if calls.Load() != limit || s.connections() != 0 {
		t.Errorf("%d calls, %d connections after Close", calls.Load(), s.connections())
	}
}

func FuzzPackets(f *testing.F) {
	f.Add(tcpPacket(header.TCPFlagSyn, 1024, 443, 0, nil), []byte(nil))
	f.Add(tcpPacket(header.TCPFlagSyn, 1024, 443, 0, nil), tcpPacket(header.TCPFlagAck|header.TCPFlagFin, 1024, 443, 1, []byte("x")))
	f.Add(tcpPacket(header.TCPFlagRst, 1024, 443, 0, nil), []byte{0x60})
	f.Add([]byte(queryPacket("name")), []byte(newPacket(gateway, header.ICMPv4ProtocolNumber, 30)))
	f.Fuzz(func(t *testing.T, first, second []byte) {
		ours, theirs := socketPair(t)
		defer theirs.Close()
		s := newOnPair(t, ours, Limits{}, handler{
			tcp: func(_ context.Context, f *Flow) {
				f.Refuse()
			},
			dns: func(_ context.Context, _ netip.Addr, query []byte) []byte { return query },
		})
		for _, packet := range [][]byte{first, second} {
			if len(packet) > 0 && len(packet) <= link.MTU {
				if len(packet) >= header.IPv4MinimumSize && packet[0] == 0x45 {
					header.IPv4(packet).SetSourceAddress(sandbox)
				}
				if _, err := theirs.Write(packet); err != nil {
					t.Fatal(err)
				}
			}
		}
		// The reply to a ping means that the packets before it were handled.
		ping := newPacket(gateway, header.ICMPv4ProtocolNumber, header.ICMPv4MinimumSize)
		ping.SetSourceAddress(sandbox)
		ping.SetDestinationAddress(gateway)
		header.ICMPv4(ping.Payload()).SetType(header.ICMPv4Echo)
		if _, err := theirs.Write(ping); err != nil {
			t.Fatal(err)
		}
		response := make([]byte, link.MTU)
		_ = theirs.SetReadDeadline(time.Now().Add(testkit.Patience))
		for {
			n, err := theirs.Read(response)
			if err != nil {
				t.Fatalf("the stack is gone: %v", err)
			}
			if ip := header.IPv4(response[:n]); ip.TransportProtocol() == header.ICMPv4ProtocolNumber &&
				header.ICMPv4(ip.Payload()).Type() == header.ICMPv4EchoReply {
				break
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	})
}
