package stack

import (
	"slices"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/doze-run/doze/runtime/netns/link"
)

// wire is the link between a netstack and its device.
//
// A packet is written by who sends it. While a socket's bytes are read into packets
// faster than one by one, a goroutine writes the large ones: the write of one takes as
// long as reading the next.
type wire struct {
	device     *device
	dispatcher atomic.Pointer[stack.NetworkDispatcher]
	bulk       atomic.Int32 // how many are reading so

	mu      sync.Mutex
	room    sync.Cond             // the queue has room again
	sending bool                  // there is a goroutine; it ends with the queue
	queue   []*stack.PacketBuffer // references of its own, oldest first
	running sync.WaitGroup
}

const (
	// largePacket is from which size on a packet may be worth a goroutine.
	largePacket = 32 << 10
	// maxQueued bounds the packets that wait. Who sends one more waits.
	maxQueued = 4
)

func newWire(d *device) *wire {
	w := &wire{device: d}
	w.room.L = &w.mu
	return w
}

func (w *wire) deliver(packet *stack.PacketBuffer) {
	if to := w.dispatcher.Load(); to != nil {
		(*to).DeliverNetworkPacket(header.IPv4ProtocolNumber, packet)
	}
}

// WritePackets implements stack.LinkWriter. Packets go out in their order.
func (w *wire) WritePackets(packets stack.PacketBufferList) (int, tcpip.Error) {
	for _, packet := range packets.AsSlice() {
		if !w.enqueue(packet) {
			w.write(packet)
		}
	}
	return packets.Len(), nil
}

// enqueue leaves a packet to the goroutine, if there is one or this one is worth it.
func (w *wire) enqueue(packet *stack.PacketBuffer) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.sending && (packet.Size() < largePacket || w.bulk.Load() == 0) {
		return false
	}
	for len(w.queue) == maxQueued {
		w.room.Wait()
	}
	w.queue = append(w.queue, packet.IncRef())
	if !w.sending {
		w.sending = true
		w.running.Go(w.send)
	}
	return true
}

// send writes what is queued.
func (w *wire) send() {
	for {
		w.mu.Lock()
		if len(w.queue) == 0 {
			w.sending = false
			w.mu.Unlock()
			return
		}
		packet := w.queue[0]
		w.queue = slices.Delete(w.queue, 0, 1)
		w.mu.Unlock()
		w.room.Signal()
		w.write(packet)
		packet.DecRef()
	}
}

// write writes a packet to the device. One that is lost is sent again.
func (w *wire) write(packet *stack.PacketBuffer) {
	var array [8][]byte // a packet of 64 KiB spans three views, with its headers
	parts := array[:0]
	var before packetHeader
	if w.device.offload {
		before = offloaded(packet)
		parts = append(parts, before[:])
	}
	views, skip := packet.AsViewList()
	for v := views.Front(); v != nil; v = v.Next() {
		b := v.AsSlice()
		if skip >= len(b) {
			skip -= len(b)
			continue
		}
		parts = append(parts, b[skip:])
		skip = 0
	}
	_ = w.device.write(parts)
}

// offloaded puts into a packet of TCP what the kernel needs to compute its checksum, if
// it ever has to: a sandbox may send it on.
func offloaded(packet *stack.PacketBuffer) packetHeader {
	ip, tcp := header.IPv4(packet.NetworkHeader().Slice()), header.TCP(packet.TransportHeader().Slice())
	length := uint16(len(tcp) + packet.Data().Size())
	tcp.SetChecksum(header.PseudoHeaderChecksum(header.TCPProtocolNumber, ip.SourceAddress(), ip.DestinationAddress(), length))
	return tcpPacketHeader(len(ip), len(tcp))
}

// Attach implements stack.NetworkLinkEndpoint.
func (w *wire) Attach(to stack.NetworkDispatcher) {
	if to == nil {
		w.dispatcher.Store(nil)
		return
	}
	w.dispatcher.Store(&to)
}

func (w *wire) IsAttached() bool { return w.dispatcher.Load() != nil }

func (w *wire) MTU() uint32 { return link.MTU }

// Capabilities: a packet that was damaged on its way from a kernel on this machine
// would be the least of our worries.
func (w *wire) Capabilities() stack.LinkEndpointCapabilities {
	if w.device.offload {
		return stack.CapabilityRXChecksumOffload | stack.CapabilityTXChecksumOffload
	}
	return stack.CapabilityRXChecksumOffload
}

func (w *wire) SetMTU(uint32)                           {}
func (w *wire) MaxHeaderLength() uint16                 { return 0 }
func (w *wire) LinkAddress() tcpip.LinkAddress          { return "" }
func (w *wire) SetLinkAddress(tcpip.LinkAddress)        {}
func (w *wire) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareNone }
func (w *wire) AddHeader(*stack.PacketBuffer)           {}
func (w *wire) ParseHeader(*stack.PacketBuffer) bool    { return true }
func (w *wire) Wait()                                   { w.running.Wait() }
func (w *wire) Close()                                  {}
func (w *wire) SetOnCloseAction(func())                 {}

var _ stack.LinkEndpoint = (*wire)(nil)
