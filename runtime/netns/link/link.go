// Package link defines the network inside a sandbox: one device with the same
// addresses in every sandbox, because the device identifies the sandbox, not an
// address.
//
// The addresses are of 198.18.0.0/15, which is for measurements between networks
// (RFC 2544) and which nobody reaches through the internet: a name that leads
// there was given its address by the node.
package link

import "net/netip"

const (
	// Device is the name of the only device beside lo.
	Device = "eth0"
	// MTU in bytes: the largest that a TUN device has. Each packet costs the same
	// whatever its size, and these never cross a wire.
	MTU = 65520
	// MaxReceiveBuffer and MaxSendBuffer bound the memory of a TCP socket in bytes
	// (tcp(7), tcp_rmem and tcp_wmem). Both ends are on this machine, 0.1 ms apart: more
	// makes a stream no faster.
	MaxReceiveBuffer = 2 << 20
	MaxSendBuffer    = 1 << 20
	// MaxTimeWait bounds the sockets in TIME_WAIT (tcp(7), tcp_max_tw_buckets), some
	// 250 bytes of kernel memory each.
	MaxTimeWait = 8192
)

var (
	// Sandbox is the sandbox's own address, Gateway the node's in it: name server
	// and default route. Prefix holds both.
	Sandbox = netip.MustParseAddr("198.18.0.2")
	Gateway = netip.MustParseAddr("198.18.0.1")
	Prefix  = netip.MustParsePrefix("198.18.0.0/30")
	// SecondServer is the node, too: a name server for resolvers that do not take
	// the first one's REFUSED for an answer.
	SecondServer = netip.MustParseAddr("198.18.0.53")

	// Listener is where the node takes the sandbox's connections: an address that is
	// not the sandbox's, so that no server of its own is in the way.
	Listener = netip.AddrPortFrom(Gateway, 1)

	// Pool holds the addresses that stand for names. Those of Reserved are not
	// given out.
	Pool     = netip.MustParsePrefix("198.18.0.0/15")
	Reserved = netip.MustParsePrefix("198.18.0.0/24")
)
