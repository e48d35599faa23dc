// Package link defines the network inside a sandbox: one device with the same
// addresses in every sandbox, because the device identifies the sandbox, not an
// address.
//
// The addresses are in 198.18.0.0/15, which is reserved for measurements between networks
// (RFC 2544) and unreachable through the internet: if a name resolves to one of them, the
// node assigned that address.
package link

import "net/netip"

const (
	// Device is the name of the only device in addition to lo.
	Device = "eth0"
	// MTU is the maximum of a TUN device, in bytes. The cost of a packet does not depend on
	// its size, and these packets never cross a wire.
	MTU = 65520
	// MaxReceiveBuffer and MaxSendBuffer bound the memory of a TCP socket in bytes
	// (tcp(7), tcp_rmem and tcp_wmem). Both ends are on this machine, 0.1 ms apart:
	// larger buffers do not make a stream faster.
	MaxReceiveBuffer = 2 << 20
	MaxSendBuffer    = 1 << 20
	// Mark is on packets that the kernel delivers locally, whatever their address.
	Mark = 0xd02e
	// MaxTimeWait bounds the sockets in TIME_WAIT (tcp(7), tcp_max_tw_buckets), some
	// 250 bytes of kernel memory each.
	MaxTimeWait = 8192
)

var (
	// Sandbox is the sandbox's own address. Gateway is the node's address in the sandbox:
	// its name server and default route. Prefix has both.
	Sandbox = netip.MustParseAddr("198.18.0.2")
	Gateway = netip.MustParseAddr("198.18.0.1")
	Prefix  = netip.MustParsePrefix("198.18.0.0/30")
	// SecondServer is the node, too: a name server for resolvers that query another
	// one after a REFUSED.
	SecondServer = netip.MustParseAddr("198.18.0.53")

	// Listener is the address on which the node accepts the sandbox's connections. It is
	// not the sandbox's own, so it conflicts with no server in the sandbox.
	Listener = netip.AddrPortFrom(Gateway, 1)

	// Pool has the addresses that stand for names. Addresses in Reserved are not
	// assigned.
	Pool     = netip.MustParsePrefix("198.18.0.0/15")
	Reserved = netip.MustParsePrefix("198.18.0.0/24")
)
