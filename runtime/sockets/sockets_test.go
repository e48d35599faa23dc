package sockets

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func listen(t testing.TB, address string) netip.AddrPort {
	t.Helper()
	network := "tcp"
	if strings.HasPrefix(address, "0.0.0.0") {
		network = "tcp4" // else it is [::]
	}
	ln, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return ln.Addr().(*net.TCPAddr).AddrPort()
}

func TestListenersAreFoundOnEveryAddress(t *testing.T) {
	for _, ip := range []string{"127.0.0.1", "127.0.0.2", "::1"} {
		port := listen(t, net.JoinHostPort(ip, "0")).Port()
		got := Listeners("/proc/self", port)
		if want := []netip.Addr{netip.MustParseAddr(ip)}; !slices.Equal(got, want) {
			t.Errorf("a listener on %s is found on %v", ip, got)
		}
	}
	for all, loopback := range map[string]string{"0.0.0.0:0": "127.0.0.1", "[::]:0": "::1"} {
		if got := Listeners("/proc/self", listen(t, all).Port()); !slices.Equal(got, []netip.Addr{netip.MustParseAddr(loopback)}) {
			t.Errorf("a listener on %s is found on %v", all, got)
		}
	}
	if got := Listeners("/proc/-1", 80); len(got) != 0 {
		t.Errorf("no process: %v", got)
	}
}

// The sandbox decides what is in the table.
func FuzzListed(f *testing.F) {
	f.Add("  sl  local_address rem_address   st tx_queue\n   0: 0200007F:0BB8 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 4711 1\n")
	f.Add("   0: 00000000000000000000000001000000:0BB8 0:0 0A 0:0 0:0 0 0 0 x\n 1: 0000000000000000FFFF00000200007F:0BB8 0:0 0A 0:0 0:0 0 0 0 99999999999\n")
	f.Add("   0: 7F:0BB8 0:0 0A 0 0 0 0 0 0\n 1: 0200007F 0 0A 0 0 0 0 0 0\n 2: 0200007F:1BB8F 0 0A 0 0 0 0 0 0\n")
	f.Fuzz(func(t *testing.T, table string) {
		for l := range listed(strings.NewReader(table)) {
			if !l.Addr.IsValid() || l.Addr.Addr().Is4In6() {
				t.Errorf("%+v", l)
			}
		}
	})
}
