package stack

import (
	"fmt"
	"math"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

const (
	// Buffers begin small and grow with what a connection moves in a round trip, if
	// it is one of Limits.Wide. The other end is 0.1 ms away: more than this was
	// measured to make a stream slower, by what no longer fits into the CPU's caches.
	firstReceiveBuffer = 512 << 10
	maxReceiveBuffer   = 2 << 20
	firstSendBuffer    = 512 << 10
	maxSendBuffer      = 1 << 20
	// narrowBuffer is both buffers of all other connections: two packets each way.
	narrowBuffer = 128 << 10

	// timeWait is short: the other side is a kernel on this machine, and no packet
	// travels for longer.
	timeWait = time.Second
	// maxRTO bounds the time between two attempts to reach a kernel that does not
	// answer, or whose window is closed because nobody reads. It is also how long a
	// connection may hang if the word that the window has opened was lost.
	maxRTO = 10 * time.Second
)

// nic is the one that a netstack has.
const nic tcpip.NICID = 1

// attempt names a connection attempt.
type attempt = stack.TransportEndpointID

// netstack is gVisor's TCP on a device.
type netstack struct {
	stack *stack.Stack
	link  *wire
}

// attempts are those that want to connect: the Stack, in which Limits are kept.
type attempts interface {
	// admit takes room for an attempt. One that is known is the same one again.
	admit(attempt) (admitted, known bool)
	// withdraw gives the room back if serve is not called.
	withdraw(attempt)
	// serve is called for an admitted attempt, in a goroutine of its own.
	serve(attempt, *tcp.ForwarderRequest)
}

// newNetstack makes a netstack that owns every address. An attempt that is not
// admitted is reset. A nil clock is the real one.
func newNetstack(d *device, to attempts, clock tcpip.Clock) *netstack {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol}, // reno
		Clock:              clock,
	})
	n := &netstack{stack: s, link: newWire(d)}
	must("making a device", s.CreateNIC(nic, n.link))
	must("taking every address", s.SetPromiscuousMode(nic, true))
	must("answering from every address", s.SetSpoofing(nic, true))
	s.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nic}})
	for _, option := range []tcpip.SettableTransportProtocolOption{
		ptr(tcpip.TCPSACKEnabled(true)),
		// RACK costs a timer per packet and finds losses sooner; there are none here.
		ptr(tcpip.TCPRecovery(0)),
		ptr(tcpip.TCPModerateReceiveBufferOption(true)),
		&tcpip.TCPReceiveBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: firstReceiveBuffer, Max: maxReceiveBuffer},
		&tcpip.TCPSendBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: firstSendBuffer, Max: maxSendBuffer},
		ptr(tcpip.TCPTimeWaitTimeoutOption(timeWait)),
		ptr(tcpip.TCPMaxRTOOption(maxRTO)),
		// A connection ends when one of its ends says so, or with the device: however
		// long a sandbox sleeps, it is not given up for silence.
		ptr(tcpip.TCPMaxRetriesOption(math.MaxUint32)),
	} {
		must("setting an option of TCP", s.SetTransportProtocolOption(tcp.ProtocolNumber, option))
	}
	// The forwarder answers attempts over its own limit with silence, so that limit
	// is never reached.
	forwarder := tcp.NewForwarder(s, firstReceiveBuffer, math.MaxInt, func(r *tcp.ForwarderRequest) {
		to.serve(r.ID(), r)
	})
	s.SetTransportProtocolHandler(tcp.ProtocolNumber, func(id attempt, packet *stack.PacketBuffer) bool {
		flags := header.TCP(packet.TransportHeader().Slice()).Flags()
		if flags&(header.TCPFlagSyn|header.TCPFlagAck) != header.TCPFlagSyn {
			return false // netstack resets what belongs to no connection
		}
		admitted, known := to.admit(id)
		if !admitted {
			return known
		}
		taken := forwarder.HandlePacket(id, packet)
		if !taken {
			to.withdraw(id)
		}
		return taken
	})
	return n
}

// headers is more than the headers of a packet without IP options have.
const headers = 128

// deliver gives the netstack a packet. It owns the view.
//
// The headers get a buffer of their own: netstack keeps each packet twice, and to look
// at a header in a buffer that is shared it first copies that, whatever its size.
func (n *netstack) deliver(view *buffer.View) {
	var whole buffer.Buffer
	if size := view.Size(); size > headers {
		_ = whole.Append(buffer.NewViewWithData(view.AsSlice()[:headers]))
		view.TrimFront(headers)
	}
	_ = whole.Append(view)
	packet := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: whole})
	n.link.deliver(packet)
	packet.DecRef()
}

// abort resets all connections.
func (n *netstack) abort() {
	for _, ep := range n.stack.RegisteredEndpoints() {
		ep.Abort()
	}
}

// end resets all connections and waits for the netstack's goroutines.
func (n *netstack) end() { n.stack.Destroy() }

// must panics: what it checks depends on nothing but this file and gVisor's version.
func must(what string, err tcpip.Error) {
	if err != nil {
		panic(fmt.Sprintf("netstack: %s: %s", what, err))
	}
}

func ptr[T any](v T) *T { return &v }
