package address_test

import (
	"net/netip"
	"testing"

	"github.com/doze-run/doze/egress/network/address"
)

func TestClassesOfTheRegistries(t *testing.T) {
	for text, want := range map[string]address.Class{
		"1.1.1.1": address.Public, "8.8.8.8": address.Public, "192.0.1.1": address.Public, "100.63.255.255": address.Public, "100.128.0.0": address.Public,
		"172.15.255.255": address.Public, "172.32.0.0": address.Public, "223.255.255.255": address.Public, "198.17.255.255": address.Public, "198.20.0.0": address.Public,
		"2606:4700::1111": address.Public, "2a00:1450::1": address.Public, "2001:4860:4860::8888": address.Public, "2001:200::": address.Public,

		"0.0.0.0": address.Unspecified, "0.255.255.255": address.Unspecified, "::": address.Unspecified,
		"127.0.0.1": address.Loopback, "127.255.255.254": address.Loopback, "::1": address.Loopback,
		"10.0.0.1": address.Private, "10.255.255.255": address.Private, "172.16.0.0": address.Private, "172.31.255.255": address.Private, "192.168.1.1": address.Private,
		"fc00::1": address.Private, "fdff::1": address.Private, "fec0::1": address.Private,
		"169.254.0.1": address.LinkLocal, "169.254.169.253": address.LinkLocal, "fe80::1": address.LinkLocal, "febf::1": address.LinkLocal, "fe80::1%eth0": address.LinkLocal, "2606:4700::1%1": address.LinkLocal,
		"169.254.169.254": address.Metadata, "169.254.170.2": address.Metadata, "169.254.171.255": address.Metadata, "100.100.100.200": address.Metadata,
		"192.0.0.192": address.Metadata, "168.63.129.16": address.Metadata, "fd00:ec2::254": address.Metadata, "fd20:ce::254": address.Metadata,
		"169.254.42.42": address.Metadata, "169.254.0.23": address.Metadata, "169.254.10.10": address.Metadata, "fd00:42::42": address.Metadata, "fd00:c1::a9fe:a9fe": address.Metadata,
		"fd00:a9fe:a9fe::1": address.Metadata, "fd00:100::100:200": address.Metadata,
		"100.64.0.0": address.Shared, "100.127.255.255": address.Shared,
		"224.0.0.1": address.Multicast, "239.255.255.255": address.Multicast, "ff02::1": address.Multicast,
		"255.255.255.255": address.Broadcast, "240.0.0.1": address.Reserved, "255.255.255.254": address.Reserved, "192.0.0.1": address.Reserved,
		"192.0.2.1": address.Documentation, "198.51.100.1": address.Documentation, "203.0.113.1": address.Documentation, "2001:db8::1": address.Documentation, "3fff::1": address.Documentation,
		"198.18.0.1": address.Benchmark, "198.19.255.255": address.Benchmark, "2001:2::1": address.Benchmark,
		"192.88.99.1": address.Translated, "::ffff:1.1.1.1": address.Translated, "::ffff:127.0.0.1": address.Translated, "::1.1.1.1": address.Translated, "::ffff:0:1.1.1.1": address.Translated,
		"64:ff9b::1.1.1.1": address.Translated, "64:ff9b:1::7f00:1": address.Translated, "2002:7f00:1::1": address.Translated, "2001:0:7f00::1": address.Translated,
		"2606:4700::5efe:7f00:1": address.Translated, "2606:4700::200:5efe:7f00:1": address.Translated, "fe80::5efe:a00:1": address.Translated,
		"100::1": address.Reserved, "2001:10::1": address.Reserved, "2001:20::1": address.Reserved, "5f00::1": address.Reserved, "4000::1": address.Reserved, "e000::1": address.Reserved, "64:ff9b:2::1": address.Reserved,
	} {
		if got := address.Classify(netip.MustParseAddr(text)); got != want {
			t.Errorf("%s is %s, want %s", text, got, want)
		}
	}
	if got := address.Classify(netip.Addr{}); got != address.Invalid {
		t.Errorf("no address is %s", got)
	}
}

// FuzzPublicIsGlobalUnicast checks that no notation of an address that is not public is
// classified as public.
func FuzzPublicIsGlobalUnicast(f *testing.F) {
	f.Add([]byte{1, 1, 1, 1})
	f.Add(netip.MustParseAddr("::ffff:10.0.0.1").AsSlice())
	f.Fuzz(func(t *testing.T, b []byte) {
		a, ok := netip.AddrFromSlice(b)
		if !ok || address.Classify(a) != address.Public {
			return
		}
		if a.Is4In6() || !a.IsGlobalUnicast() || a.IsPrivate() {
			t.Errorf("%s is public", a)
		}
	})
}
