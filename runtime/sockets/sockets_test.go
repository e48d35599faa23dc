package sockets

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestListenersAreFoundOnEveryAddress(t *testing.T) {
	for _, ip := range []string{"127.0.0.1", "127.0.0.2", "::1"} {
		ln, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		port := uint16(ln.Addr().(*net.TCPAddr).Port)
		got := Listeners("/proc/self", port)
		if want := []netip.Addr{netip.MustParseAddr(ip)}; !slices.Equal(got, want) {
			t.Errorf("a listener on %s is found on %v", ip, got)
		}
	}
	if got := Listeners("/proc/-1", 80); len(got) != 0 {
		t.Errorf("no process: %v", got)
	}
}

// The sandbox decides what is in the table.
func FuzzListed(f *testing.F) {
	f.Add("  sl  local_address rem_address   st tx_queue\n   0: 0200007F:0BB8 00000000:0000 0A 00000000:00000000\n")
	f.Add("   0: 00000000000000000000000001000000:0BB8 0:0 0A\n 1: 0000000000000000FFFF00000200007F:0BB8 0:0 0A\n")
	f.Fuzz(func(t *testing.T, table string) {
		for _, addr := range listed(strings.NewReader(table), 3000) {
			if !addr.IsValid() || addr.IsUnspecified() || addr.Is4In6() {
				t.Errorf("%v", addr)
			}
		}
	})
}
