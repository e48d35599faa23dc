package address

import (
	"net/netip"
	"testing"
)

func TestClassesOfTheRegistries(t *testing.T) {
	for text, want := range map[string]Class{
		"1.1.1.1": Public, "8.8.8.8": Public, "192.0.1.1": Public, "100.63.255.255": Public, "100.128.0.0": Public,
		"172.15.255.255": Public, "172.32.0.0": Public, "223.255.255.255": Public, "198.17.255.255": Public, "198.20.0.0": Public,
		"2606:4700::1111": Public, "2a00:1450::1": Public, "2001:4860:4860::8888": Public, "2001:200::": Public,

		"0.0.0.0": Unspecified, "0.255.255.255": Unspecified, "::": Unspecified,
		"127.0.0.1": Loopback, "127.255.255.254": Loopback, "::1": Loopback,
		"10.0.0.1": Private, "10.255.255.255": Private, "172.16.0.0": Private, "172.31.255.255": Private, "192.168.1.1": Private,
		"fc00::1": Private, "fdff::1": Private, "fec0::1": Private,
		"169.254.0.1": LinkLocal, "169.254.169.253": LinkLocal, "fe80::1": LinkLocal, "febf::1": LinkLocal, "fe80::1%eth0": LinkLocal, "2606:4700::1%1": LinkLocal,
		"169.254.169.254": Metadata, "169.254.170.2": Metadata, "169.254.171.255": Metadata, "100.100.100.200": Metadata,
		"192.0.0.192": Metadata, "168.63.129.16": Metadata, "fd00:ec2::254": Metadata, "fd20:ce::254": Metadata,
		"169.254.42.42": Metadata, "169.254.0.23": Metadata, "169.254.10.10": Metadata, "fd00:42::42": Metadata, "fd00:c1::a9fe:a9fe": Metadata,
		"fd00:a9fe:a9fe::1": Metadata, "fd00:100::100:200": Metadata,
		"100.64.0.0": Shared, "100.127.255.255": Shared,
		"224.0.0.1": Multicast, "239.255.255.255": Multicast, "ff02::1": Multicast,
		"255.255.255.255": Broadcast, "240.0.0.1": Reserved, "255.255.255.254": Reserved, "192.0.0.1": Reserved,
		"192.0.2.1": Documentation, "198.51.100.1": Documentation, "203.0.113.1": Documentation, "2001:db8::1": Documentation, "3fff::1": Documentation,
		"198.18.0.1": Benchmark, "198.19.255.255": Benchmark, "2001:2::1": Benchmark,
		"192.88.99.1": Translated, "::ffff:1.1.1.1": Translated, "::ffff:127.0.0.1": Translated, "::1.1.1.1": Translated, "::ffff:0:1.1.1.1": Translated,
		"64:ff9b::1.1.1.1": Translated, "64:ff9b:1::7f00:1": Translated, "2002:7f00:1::1": Translated, "2001:0:7f00::1": Translated,
		"2606:4700::5efe:7f00:1": Translated, "2606:4700::200:5efe:7f00:1": Translated, "fe80::5efe:a00:1": Translated,
		"100::1": Reserved, "2001:10::1": Reserved, "2001:20::1": Reserved, "5f00::1": Reserved, "4000::1": Reserved, "e000::1": Reserved, "64:ff9b:2::1": Reserved,
	} {
		if got := Classify(netip.MustParseAddr(text)); got != want {
			t.Errorf("%s is %s, want %s", text, got, want)
		}
	}
	if got := Classify(netip.Addr{}); got != Invalid {
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
		if !ok || Classify(a) != Public {
			return
		}
		if a.Is4In6() || !a.IsGlobalUnicast() || a.IsPrivate() {
			t.Errorf("%s is public", a)
		}
	})
}
