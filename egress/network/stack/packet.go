package stack

import (
	"bytes"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/doze-run/doze/runtime/netns/link"
)

const (
	dnsPort = 53
	// maxQuery bounds a name query in bytes, with its UDP header: EDNS(0) queries have
	// names of 255 bytes and options, and resolvers send no more than fits in an
	// Ethernet frame.
	maxQuery = 1500
	// maxSYN bounds the first packet of a connection in bytes, which is held until the
	// Handler has decided. Only TCP Fast Open has data in it, which the listener does not
	// support.
	maxSYN = 1500
	// quoted is how many bytes of the original packet an ICMP error repeats: its IP
	// header and 8 bytes, RFC 792.
	quoted = header.IPv4MinimumSize + 8
)

var (
	sandbox = tcpip.AddrFrom4(link.Sandbox.As4())
	gateway = tcpip.AddrFrom4(link.Gateway.As4())
	second  = tcpip.AddrFrom4(link.SecondServer.As4())
)

// packet handles one packet from the device. It returns false if the stack is ending.
//
// Packets that no kernel sends through this device are dropped: IPv6, which the device
// does not support; another source address; IP options; and fragments, because the MTU is
// the maximum packet size. So no fragment is ever stored until the others arrive.
func (s *Stack) packet(b []byte) (more bool) {
	if !s.active {
		s.activate()
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

// segment handles the first segment of a connection; the others do not leave the device.
func (s *Stack) segment(ip header.IPv4) {
	tcp := header.TCP(ip.Payload())
	if len(tcp) < header.TCPMinimumSize || len(ip) > maxSYN || !unicast(ip.DestinationAddress()) ||
		tcp.Flags()&(header.TCPFlagSyn|header.TCPFlagAck|header.TCPFlagRst) != header.TCPFlagSyn {
		return
	}
	e := endpoints{tcp.SourcePort(), destination(ip, tcp.DestinationPort())}
	if f := s.admit(e, ip); f != nil {
		go s.serve(f)
	}
}

// reset responds to a SYN as if no socket listened at its destination (RFC 9293, 3.10.7.1).
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

// ping replies to an echo request to any unicast address: the reply does not mean that
// a rule allows the address.
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

// datagram passes a name query to the Handler. All other UDP is refused immediately, so
// that a QUIC client falls back to TCP without waiting.
func (s *Stack) datagram(ip header.IPv4) {
	udp := header.UDP(ip.Payload())
	if len(udp) < header.UDPMinimumSize || int(udp.Length()) < header.UDPMinimumSize || int(udp.Length()) > len(udp) {
		return
	}
	server := ip.DestinationAddress()
	if server != gateway && server != second || udp.DestinationPort() != dnsPort {
		s.unreachable(ip)
		s.reportRefused(destination(ip, udp.DestinationPort()))
		return
	}
	if udp.Length() > maxQuery {
		return
	}
	select {
	case s.queries <- struct{}{}:
	default:
		s.reportExceeded(Queries)
		return
	}
	port := udp.SourcePort()
	query := bytes.Clone(udp[header.UDPMinimumSize:udp.Length()])
	s.running.Go(func() {
		defer func() { <-s.queries }()
		defer s.recover()
		if response := s.cfg.Handler.DNS(s.ctx, netip.AddrFrom4(server.As4()), query); response != nil {
			s.respond(server, port, response)
		}
	})
}

// respond sends the Handler's response to a name query. It drops one that exceeds the MTU.
func (s *Stack) respond(server tcpip.Address, port uint16, response []byte) {
	length := header.UDPMinimumSize + len(response)
	if header.IPv4MinimumSize+length > link.MTU {
		return
	}
	packet := newPacket(server, header.UDPProtocolNumber, length)
	udp := header.UDP(packet.Payload())
	udp.Encode(&header.UDPFields{SrcPort: dnsPort, DstPort: port, Length: uint16(length)})
	copy(udp.Payload(), response)
	sum := header.PseudoHeaderChecksum(header.UDPProtocolNumber, server, sandbox, uint16(length))
	udp.SetChecksum(^checksum.Checksum(udp, sum))
	_ = s.device.send(packet)
}

// unreachable refuses a datagram, with the datagram's destination as the source.
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

func destination(ip header.IPv4, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4(ip.DestinationAddress().As4()), port)
}

// unicast reports whether an address can belong to one machine.
func unicast(a tcpip.Address) bool {
	return a != header.IPv4Any && a != header.IPv4Broadcast && !header.IsV4MulticastAddress(a) && !header.IsV4LoopbackAddress(a)
}

// newPacket returns an IPv4 packet to the sandbox with payload bytes of zero payload.
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
