package stack

import (
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/doze-run/doze/runtime/netns/link"
)

const (
	dnsPort = 53
	// maxQuery bounds a name query: EDNS(0) asks for names of 255 bytes with options,
	// and resolvers send no more than an Ethernet frame holds.
	maxQuery = 1500
	// quoted is what an ICMP error repeats of the packet that it is about: its IP
	// header and 8 bytes, RFC 792.
	quoted = header.IPv4MinimumSize + 8
)

var (
	sandbox = tcpip.AddrFrom4(link.Sandbox.As4())
	gateway = tcpip.AddrFrom4(link.Gateway.As4())
	second  = tcpip.AddrFrom4(link.SecondServer.As4())
)

// packet takes one packet from the device.
//
// What no kernel sends by this device is dropped: IPv6, which the device has not;
// another source address; IP options; fragments, for the MTU is as large as packets
// get, so that nothing has to be kept until its other half comes.
func (s *Stack) packet(b []byte) (more bool) {
	if !s.awake {
		s.arise()
	}
	ip := header.IPv4(b)
	if len(b) < header.IPv4MinimumSize || ip.HeaderLength() != header.IPv4MinimumSize || !ip.IsValid(len(b)) ||
		ip.More() || ip.FragmentOffset() != 0 || ip.SourceAddress() != sandbox {
		return s.ctx.Err() == nil
	}
	ip = ip[:ip.TotalLength()]
	switch ip.TransportProtocol() {
	case header.TCPProtocolNumber:
		s.segment(ip)
	case header.UDPProtocolNumber:
		s.datagram(ip)
	case header.ICMPv4ProtocolNumber:
		s.ping(ip)
	}
	return s.ctx.Err() == nil
}

// segment takes the first segment of a connection; its others do not come this way.
func (s *Stack) segment(ip header.IPv4) {
	tcp := header.TCP(ip.Payload())
	if len(tcp) < header.TCPMinimumSize || !unicast(ip.DestinationAddress()) ||
		tcp.Flags()&(header.TCPFlagSyn|header.TCPFlagAck|header.TCPFlagRst) != header.TCPFlagSyn {
		return
	}
	e := endpoints{tcp.SourcePort(), netip.AddrPortFrom(netip.AddrFrom4(ip.DestinationAddress().As4()), tcp.DestinationPort())}
	if f := s.admit(e, ip); f != nil {
		go s.serve(f)
	}
}

// reset answers a SYN as if nothing listened where it goes (RFC 9293, 3.10.7.1).
func (s *Stack) reset(ip header.IPv4) {
	syn := header.TCP(ip.Payload())
	next := syn.SequenceNumber() + 1
	if offset := int(syn.DataOffset()); offset <= len(syn) {
		next += uint32(len(syn) - offset)
	}
	packet := newPacket(ip.DestinationAddress(), header.TCPProtocolNumber, header.TCPMinimumSize)
	tcp := header.TCP(packet.Payload())
	tcp.Encode(&header.TCPFields{
		SrcPort: syn.DestinationPort(), DstPort: syn.SourcePort(), AckNum: next,
		DataOffset: header.TCPMinimumSize, Flags: header.TCPFlagRst | header.TCPFlagAck,
	})
	sum := header.PseudoHeaderChecksum(header.TCPProtocolNumber, ip.DestinationAddress(), sandbox, header.TCPMinimumSize)
	tcp.SetChecksum(^checksum.Checksum(tcp, sum))
	_ = s.device.send(packet)
}

// ping answers an echo request, whatever it is addressed to: that an address is
// there says nothing yet about whether it may be reached.
func (s *Stack) ping(ip header.IPv4) {
	request := header.ICMPv4(ip.Payload())
	if len(request) < header.ICMPv4MinimumSize || request.Type() != header.ICMPv4Echo ||
		!unicast(ip.DestinationAddress()) {
		return
	}
	packet := newPacket(ip.DestinationAddress(), header.ICMPv4ProtocolNumber, len(request))
	reply := header.ICMPv4(packet.Payload())
	copy(reply, request)
	reply.SetType(header.ICMPv4EchoReply)
	reply.SetCode(0)
	reply.SetChecksum(0)
	reply.SetChecksum(^checksum.Checksum(reply, 0))
	_ = s.device.send(packet)
}

// datagram answers a name query by the Handler. All other UDP is refused at once, so
// that who tries QUIC falls back to TCP without waiting.
func (s *Stack) datagram(ip header.IPv4) {
	udp := header.UDP(ip.Payload())
	if len(udp) < header.UDPMinimumSize || int(udp.Length()) < header.UDPMinimumSize || int(udp.Length()) > len(udp) {
		return
	}
	server := ip.DestinationAddress()
	if server != gateway && server != second || udp.DestinationPort() != dnsPort {
		s.unreachable(ip)
		s.tellRefused(netip.AddrPortFrom(netip.AddrFrom4(ip.DestinationAddress().As4()), udp.DestinationPort()))
		return
	}
	if udp.Length() > maxQuery {
		return
	}
	select {
	case s.queries <- struct{}{}:
	default:
		s.tell(Queries)
		return
	}
	port := udp.SourcePort()
	query := append([]byte(nil), udp[header.UDPMinimumSize:udp.Length()]...)
	s.running.Go(func() {
		defer func() { <-s.queries }()
		defer s.recover("a name query")
		if answer := s.cfg.Handler.DNS(s.ctx, netip.AddrFrom4(server.As4()), query); answer != nil {
			s.answer(server, port, answer)
		}
	})
}

// answer sends what the Handler answered to a name query.
func (s *Stack) answer(server tcpip.Address, port uint16, answer []byte) {
	length := header.UDPMinimumSize + len(answer)
	if header.IPv4MinimumSize+length > link.MTU {
		return
	}
	packet := newPacket(server, header.UDPProtocolNumber, length)
	udp := header.UDP(packet.Payload())
	udp.Encode(&header.UDPFields{SrcPort: dnsPort, DstPort: port, Length: uint16(length)})
	copy(udp.Payload(), answer)
	sum := header.PseudoHeaderChecksum(header.UDPProtocolNumber, server, sandbox, uint16(length))
	udp.SetChecksum(^checksum.Checksum(udp, sum))
	_ = s.device.send(packet)
}

// unreachable refuses a datagram, in the name of whom it was addressed to.
func (s *Stack) unreachable(ip header.IPv4) {
	if !unicast(ip.DestinationAddress()) {
		return // RFC 1122, 3.2.2
	}
	quote := ip[:min(len(ip), quoted)]
	packet := newPacket(ip.DestinationAddress(), header.ICMPv4ProtocolNumber, header.ICMPv4MinimumSize+len(quote))
	message := header.ICMPv4(packet.Payload())
	message.SetType(header.ICMPv4DstUnreachable)
	message.SetCode(header.ICMPv4PortUnreachable)
	copy(message.Payload(), quote)
	message.SetChecksum(^checksum.Checksum(message, 0))
	_ = s.device.send(packet)
}

// unicast says whether an address can be that of one machine.
func unicast(a tcpip.Address) bool {
	return a != header.IPv4Any && a != header.IPv4Broadcast && !header.IsV4MulticastAddress(a) && !header.IsV4LoopbackAddress(a)
}

// newPacket makes an IPv4 packet to the sandbox with so many bytes of payload.
func newPacket(from tcpip.Address, protocol tcpip.TransportProtocolNumber, payload int) header.IPv4 {
	ip := header.IPv4(make([]byte, header.IPv4MinimumSize+payload))
	ip.Encode(&header.IPv4Fields{
		TotalLength: uint16(len(ip)),
		Flags:       header.IPv4FlagDontFragment,
		TTL:         64,
		Protocol:    uint8(protocol),
		SrcAddr:     from,
		DstAddr:     sandbox,
	})
	ip.SetChecksum(^ip.CalculateChecksum())
	return ip
}
