// Package stacktest is the network of a sandbox without a sandbox: programs of a
// test send through it as if they ran in one.
package stacktest

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/doze-run/doze/runtime/netns/link"
)

// Device is one end of a pair of sockets in the place of a network device: the
// stack's, which owns it. The other is the Network's.
func Device(t testing.TB) (device *os.File, network *Network) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fds[0]), "device"), newNetwork(t, os.NewFile(uintptr(fds[1]), "network"))
}

// Network is what a sandbox sees: an address, a route and a name server.
type Network struct {
	file  *os.File
	stack *stack.Stack
	link  *channel.Endpoint

	stop    context.CancelFunc
	running sync.WaitGroup
	gone    chan struct{} // closed when the device has ended
	closing sync.Once
}

const (
	nic = 1
	// queued packets on their way out; more are lost, as on any device.
	queued = 1024
)

func newNetwork(t testing.TB, file *os.File) *Network {
	t.Helper()
	n := &Network{
		file: file,
		link: channel.New(queued, link.MTU, ""),
		stack: stack.New(stack.Options{
			NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol},
			TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol},
		}),
		gone: make(chan struct{}),
	}
	check := func(err tcpip.Error) {
		if err != nil {
			t.Fatalf("making a sandbox's network: %v", err)
		}
	}
	check(n.stack.CreateNIC(nic, n.link))
	check(n.stack.AddProtocolAddress(nic, tcpip.ProtocolAddress{
		Protocol:          ipv4.ProtocolNumber,
		AddressWithPrefix: tcpip.AddrFrom4(link.Sandbox.As4()).WithPrefix(),
	}, stack.AddressProperties{}))
	n.stack.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nic}})
	var ctx context.Context
	ctx, n.stop = context.WithCancel(context.Background())
	n.running.Go(n.receive)              // ends with the file
	n.running.Go(func() { n.send(ctx) }) // ends by stop
	t.Cleanup(n.Close)
	return n
}

// receive takes packets from the node.
func (n *Network) receive() {
	defer close(n.gone)
	b := make([]byte, link.MTU)
	for {
		k, err := n.file.Read(b)
		if err != nil || k == 0 {
			return
		}
		p := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(append([]byte(nil), b[:k]...))})
		n.link.InjectInbound(ipv4.ProtocolNumber, p)
		p.DecRef()
	}
}

// send hands packets to the node.
func (n *Network) send(ctx context.Context) {
	for {
		p := n.link.ReadContext(ctx)
		if p == nil {
			return
		}
		view := p.ToView()
		_, err := n.file.Write(view.AsSlice())
		view.Release()
		p.DecRef()
		if err != nil {
			return
		}
	}
}

// Gone is closed when the node has taken its end of the device away.
func (n *Network) Gone() <-chan struct{} { return n.gone }

// Close ends all that the sandbox has open. Idempotent.
func (n *Network) Close() {
	n.closing.Do(func() {
		n.stop()
		n.stack.Close()
		_ = n.file.Close()
		n.running.Wait()
		n.link.Close()
		n.stack.Wait()
	})
}

// DialContext connects to host and port as a program in the sandbox does: it looks
// the host up with the sandbox's name server. Networks are tcp and udp.
func (n *Network) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	host, text, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return nil, err
	}
	a, err := netip.ParseAddr(host)
	if err != nil {
		found, err := n.Resolver().LookupNetIP(ctx, "ip4", host+".")
		if err != nil {
			return nil, err
		}
		a = found[0].Unmap()
	}
	if !a.Is4() {
		return nil, fmt.Errorf("dialling %s: a sandbox has no IPv6", address)
	}
	to := tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFrom4(a.As4()), Port: uint16(port)}
	if network == "udp" {
		return gonet.DialUDP(n.stack, nil, &to, ipv4.ProtocolNumber)
	}
	return gonet.DialContextTCP(ctx, n.stack, to, ipv4.ProtocolNumber)
}

// Resolver asks the sandbox's name server.
func (n *Network) Resolver() *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return n.DialContext(ctx, network, netip.AddrPortFrom(link.Gateway, 53).String())
	}}
}
