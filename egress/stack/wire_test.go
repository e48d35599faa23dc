package stack

import (
	"bytes"
	"context"
	"io"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/faketime"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	gvisor "gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/doze-run/doze/runtime/netns/link"
)

// These tests have a socket pair in place of a network device, and need no kernel's
// leave for it.

func socketPair(t testing.TB) (ours, theirs *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
}

// peer is the network of a sandbox without a kernel: another netstack, which can be
// made deaf.
type peer struct {
	stack *gvisor.Stack
	deaf  atomic.Bool
}

func newPeer(t testing.TB, file *os.File) *peer {
	t.Helper()
	d, err := openDevice(file)
	if err != nil {
		t.Fatal(err)
	}
	p := &peer{stack: gvisor.New(gvisor.Options{
		NetworkProtocols:   []gvisor.NetworkProtocolFactory{ipv4.NewProtocol},
		TransportProtocols: []gvisor.TransportProtocolFactory{tcp.NewProtocol},
	})}
	w := newWire(d)
	must("making a device", p.stack.CreateNIC(nic, w))
	must("setting its address", p.stack.AddProtocolAddress(nic, tcpip.ProtocolAddress{
		Protocol:          ipv4.ProtocolNumber,
		AddressWithPrefix: sandbox.WithPrefix(),
	}, gvisor.AddressProperties{}))
	p.stack.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nic}})
	ended := make(chan struct{})
	go func() { // ends with the device
		defer close(ended)
		_ = d.read(func(view *buffer.View) bool {
			if p.deaf.Load() {
				view.Release()
				return true
			}
			packet := gvisor.NewPacketBuffer(gvisor.PacketBufferOptions{Payload: buffer.MakeWithView(view)})
			w.deliver(packet)
			packet.DecRef()
			return true
		}, func() {})
		d.rest()
	}()
	t.Cleanup(func() {
		d.wake(time.Unix(1, 0))
		<-ended
		p.stack.Destroy()
		_ = d.close()
	})
	return p
}

// A sandbox sleeps for hours while something is on its way to it.
func TestAConnectionOutlastsSilence(t *testing.T) {
	ours, theirs := socketPair(t)
	clock := faketime.NewManualClock()
	p := newPeer(t, theirs)
	h, conns := accepted(t)
	s, err := New(Config{Device: ours, Handler: h, clock: clock})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	client, err := gonet.DialContextTCP(context.Background(), p.stack,
		tcpip.FullAddress{Addr: tcpip.AddrFrom4([4]byte{198, 18, 7, 9}), Port: 443}, ipv4.ProtocolNumber)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	server := <-conns

	p.deaf.Store(true)
	sent := bytes.Repeat([]byte("0123456789abcdef"), 1000)
	if _, err := server.Write(sent); err != nil {
		t.Fatal(err)
	}
	for range 12 * 60 {
		clock.Advance(time.Minute)
	}
	p.deaf.Store(false)
	clock.Advance(maxRTO) // by then it is sent again
	got := make([]byte, len(sent))
	_ = client.SetDeadline(time.Now().Add(patience))
	if _, err := io.ReadFull(client, got); err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("after half a day: %v", err)
	}
}

// Its kernel acknowledges while it sleeps, until nothing more fits.
func TestAConnectionOutlastsAClosedWindow(t *testing.T) {
	clock := faketime.NewManualClock()
	h, conns := accepted(t)
	_, k := start(t, Config{Handler: h, clock: clock})
	client, server := pair(t, k, conns)
	sent := bytes.Repeat([]byte("0123456789abcdef"), 4<<20)
	failed := make(chan error, 1)
	go func() { // ends with the connection
		_, err := server.Write(sent)
		failed <- err
	}()
	for range 12 * 60 {
		clock.Advance(time.Minute)
	}
	ticking, stop := context.WithCancel(context.Background())
	ticked := make(chan struct{})
	go func() { // until stop: what it lost of the window's opening it asks for again
		defer close(ticked)
		for ticking.Err() == nil {
			clock.Advance(time.Millisecond)
			runtime.Gosched()
		}
	}()
	defer func() { stop(); <-ticked }()
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(client, got); err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("after half a day: %v", err)
	}
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
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

func TestWhatNoKernelSendsIsDropped(t *testing.T) {
	ours, theirs := socketPair(t)
	defer theirs.Close()
	var mu sync.Mutex
	var got []string
	s, err := New(Config{Device: ours, Handler: handler{dns: func(_ context.Context, _ netip.Addr, query []byte) []byte {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, string(query))
		return query
	}}})
	if err != nil {
		t.Fatal(err)
	}
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
		queryPacket("short")[:30], // says that it is longer
		queryPacket("taken"),
	} {
		if _, err := theirs.Write(packet); err != nil {
			t.Fatal(err)
		}
	}
	_ = theirs.SetReadDeadline(time.Now().Add(patience))
	if _, err := theirs.Read(make([]byte, maxPacket)); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil { // which waits for all that were taken
		t.Fatal(err)
	}
	if len(got) != 1 || got[0] != "taken" {
		t.Errorf("taken were %q", got)
	}
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

// A SYN may come more often than there is room, and nobody answers its SYN-ACK.
func TestAFloodOfSYNsIsBounded(t *testing.T) {
	ours, theirs := socketPair(t)
	defer theirs.Close()
	const limit = 16
	var calls atomic.Int64
	s, err := New(Config{Device: ours, Limits: Limits{Attempts: limit}, Handler: handler{tcp: func(_ context.Context, f *Flow) {
		calls.Add(1)
		if _, err := f.Accept(); err == nil {
			t.Error("a handshake was completed that nobody completed")
		}
	}}})
	if err != nil {
		t.Fatal(err)
	}
	before := runtime.NumGoroutine()
	resets := 0
	answer := make([]byte, maxPacket)
	for n := range 5000 {
		syn := tcpPacket(header.TCPFlagSyn, uint16(1024+n), 443, uint32(n), nil)
		if _, err := theirs.Write(syn); err != nil {
			t.Fatal(err)
		}
		if n < limit {
			continue
		}
		for reset := false; !reset; { // SYN-ACKs of the first come between
			_ = theirs.SetReadDeadline(time.Now().Add(patience))
			if _, err := theirs.Read(answer); err != nil {
				t.Fatal(err)
			}
			reset = header.TCP(header.IPv4(answer).Payload()).Flags().Contains(header.TCPFlagRst)
		}
		resets++
	}
	if resets != 5000-limit || s.connections() != limit {
		t.Errorf("%d resets, %d connections", resets, s.connections())
	}
	if grown := runtime.NumGoroutine() - before; grown > limit+8 {
		t.Errorf("%d goroutines more", grown)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if calls.Load() != limit || s.connections() != 0 {
		t.Errorf("%d calls, %d connections after Close", calls.Load(), s.connections())
	}
}

// Data that leaves a gap before it waits for what would fill that.
func TestSegmentsOutOfOrderAreBounded(t *testing.T) {
	ours, theirs := socketPair(t)
	defer theirs.Close()
	h, conns := accepted(t)
	s, err := New(Config{Device: ours, Handler: h})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	write := func(b []byte) {
		t.Helper()
		_ = theirs.SetWriteDeadline(time.Now().Add(patience))
		if _, err := theirs.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	write(tcpPacket(header.TCPFlagSyn, 1024, 443, 0, nil))
	answer := make([]byte, maxPacket)
	if _, err := theirs.Read(answer); err != nil {
		t.Fatal(err)
	}
	theirSeq := header.TCP(header.IPv4(answer).Payload()).SequenceNumber()
	send := func(seq uint32, payload []byte) {
		b := tcpPacket(header.TCPFlagAck, 1024, 443, seq, payload)
		segment := header.TCP(header.IPv4(b).Payload())
		segment.SetAckNumber(theirSeq + 1)
		write(b) // its checksum is not looked at
	}
	send(1, nil)
	<-conns
	var before, after runtime.MemStats
	runtime.GC()
	runtime.GC() // pools give up what they hold with the second
	runtime.ReadMemStats(&before)
	go func() { // ends with the socket
		for {
			if _, err := theirs.Read(answer); err != nil {
				return
			}
		}
	}()
	for n := range uint32(8_000) {
		send(3+2*n, []byte{1}) // one byte in packets of their own, none next to another
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	grown := int64(after.HeapAlloc) - int64(before.HeapAlloc)
	t.Logf("%d KiB", grown>>10)
	if grown > 4*firstReceiveBuffer {
		t.Errorf("it holds %d KiB", grown>>10)
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
		s, err := New(Config{Device: ours, Handler: handler{
			tcp: func(_ context.Context, f *Flow) {
				if conn, err := f.Accept(); err == nil {
					_, _ = io.Copy(conn, conn)
				}
			},
			dns: func(_ context.Context, _ netip.Addr, query []byte) []byte { return query },
		}})
		if err != nil {
			t.Fatal(err)
		}
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
		// The answer to a ping says that what came before was taken.
		ping := newPacket(gateway, header.ICMPv4ProtocolNumber, header.ICMPv4MinimumSize)
		ping.SetSourceAddress(sandbox)
		ping.SetDestinationAddress(gateway)
		header.ICMPv4(ping.Payload()).SetType(header.ICMPv4Echo)
		if _, err := theirs.Write(ping); err != nil {
			t.Fatal(err)
		}
		answer := make([]byte, maxPacket)
		_ = theirs.SetReadDeadline(time.Now().Add(patience))
		for {
			n, err := theirs.Read(answer)
			if err != nil {
				t.Fatalf("the stack is gone: %v", err)
			}
			if ip := header.IPv4(answer[:n]); ip.TransportProtocol() == header.ICMPv4ProtocolNumber &&
				header.ICMPv4(ip.Payload()).Type() == header.ICMPv4EchoReply {
				break
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	})
}
