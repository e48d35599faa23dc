//go:build integration

package netns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/link"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// boxDevice returns an error if the device differs from package link. It runs in a sandbox.
func boxDevice() error {
	device, err := net.InterfaceByName(link.Device)
	if err != nil {
		return err
	}
	if device.MTU != link.MTU || device.Flags&(net.FlagUp|net.FlagRunning) != net.FlagUp|net.FlagRunning {
		return fmt.Errorf("MTU %d, flags %v", device.MTU, device.Flags)
	}
	addresses, err := device.Addrs()
	if err != nil {
		return err
	}
	want := netip.PrefixFrom(link.Sandbox, link.Prefix.Bits()).String()
	if len(addresses) != 1 || addresses[0].String() != want {
		return fmt.Errorf("its addresses are %v, not %s alone", addresses, want)
	}
	routes, err := os.ReadFile("/proc/net/route")
	if err != nil {
		return err
	}
	gateway := link.Gateway.As4()
	route := fmt.Sprintf("%s\t00000000\t%08X\t", link.Device, binary.NativeEndian.Uint32(gateway[:]))
	if !strings.Contains(string(routes), route) {
		return fmt.Errorf("no default route in %q", routes)
	}
	return nil
}

func attach(t testing.TB, c *Client, id sandbox.ID, pid int) *os.File {
	t.Helper()
	device, listener, err := c.TUN(testkit.Context(t), id, pid)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { device.Close() })
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	return device
}

// readSYN reads packets until one begins a TCP connection.
func readSYN(t testing.TB, device *os.File) (from, to netip.AddrPort) {
	t.Helper()
	if err := device.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	for {
		b := make([]byte, link.MTU)
		n, err := device.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		if b = b[:n]; len(b) < 40 || b[0] != 0x45 || b[9] != unix.IPPROTO_TCP {
			t.Fatalf("the kernel sent a packet of its own: %x", b)
		}
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[12:])), binary.BigEndian.Uint16(b[20:])),
			netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[16:])), binary.BigEndian.Uint16(b[22:]))
	}
}

func TestPacketsOfASandboxReachTheOtherEndOfItsDevice(t *testing.T) {
	const id = "nstun0000000"
	c := open(t, config())
	b := startBox(t, id, namespaces...)
	device := attach(t, c, id, b.PID())
	b.do(t, "device")
	b.do(t, "dial 203.0.113.9:443")
	from, to := readSYN(t, device)
	if from.Addr() != link.Sandbox || to != netip.MustParseAddrPort("203.0.113.9:443") {
		t.Errorf("a packet from %s to %s", from, to)
	}
}

func TestASandboxIsAttachedOnceAtATime(t *testing.T) {
	const id = "nstun0000001"
	c := open(t, config())
	b := startBox(t, id, namespaces...)
	device := attach(t, c, id, b.PID())
	if second, listener, err := c.TUN(testkit.Context(t), id, b.PID()); !errors.Is(err, ErrAttached) {
		if err == nil {
			second.Close()
			listener.Close()
		}
		t.Fatalf("a second device: %v", err)
	}
	b.do(t, "device")
	for range 3 { // as after a restart of the node
		device.Close()
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		c = open(t, config())
		device = attach(t, c, id, b.PID())
		b.do(t, "device")
	}
}

func TestADeviceOutlivesTheClient(t *testing.T) {
	const id = "nstun0000002"
	c := open(t, config())
	b := startBox(t, id, namespaces...)
	device := attach(t, c, id, b.PID())
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	b.do(t, "dial 203.0.113.9:443")
	readSYN(t, device)
}

func TestADeviceIsMadeOnlyForTheSandbox(t *testing.T) {
	c := open(t, config())
	other := startBox(t, "nstun0000003", namespaces...)
	for name, pid := range map[string]int{"another sandbox": other.PID(), "the node": os.Getpid(), "nothing": 0} {
		device, listener, err := c.TUN(testkit.Context(t), "nstun0000004", pid)
		if err == nil {
			device.Close()
			listener.Close()
			t.Errorf("a device was created for %s", name)
		}
	}
}

func BenchmarkTUN(b *testing.B) {
	const id = "nstun0000005"
	c := open(b, config())
	box := startBox(b, id, namespaces...)
	for b.Loop() {
		device, listener, err := c.TUN(testkit.Context(b), id, box.PID())
		if err != nil {
			b.Fatal(err)
		}
		device.Close()
		listener.Close()
	}
}
