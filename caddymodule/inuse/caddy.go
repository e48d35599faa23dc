package inuse

import (
	"net"
	"net/netip"
	"strings"

	"github.com/caddyserver/caddy/v2"
)

// CheckAll is Check for an address as Caddy's configuration has it, with all its
// ports: for TCP, and with http3 for UDP as well. Networks other than TCP are not
// checked. A name stands for the address that a listener would choose.
func CheckAll(address caddy.NetworkAddress, http3 bool) error {
	if !strings.HasPrefix(address.Network, "tcp") {
		return nil
	}
	networks := []string{"tcp"}
	if http3 {
		networks = append(networks, "udp")
	}
	for offset := range address.PortRangeSize() {
		resolved, err := net.ResolveTCPAddr(address.Network, address.JoinHostPort(offset))
		if err != nil {
			return nil // for Caddy's own attempt to report
		}
		for _, candidate := range candidates(address.Network, resolved.AddrPort()) {
			for _, network := range networks {
				if err := Check(network, candidate); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// candidates are the addresses that a listener may have: no address stands for all
// of both families, or of one where the other is missing.
func candidates(network string, address netip.AddrPort) []netip.AddrPort {
	all4 := netip.AddrPortFrom(netip.IPv4Unspecified(), address.Port())
	all6 := netip.AddrPortFrom(netip.IPv6Unspecified(), address.Port())
	switch {
	case address.Addr().IsValid() && !address.Addr().IsUnspecified():
		return []netip.AddrPort{netip.AddrPortFrom(address.Addr().Unmap(), address.Port())}
	case network == "tcp4":
		return []netip.AddrPort{all4}
	case network == "tcp6":
		return []netip.AddrPort{all6}
	}
	return []netip.AddrPort{all6, all4}
}
