// Package address classifies network addresses: unless an operator permits more, a
// sandbox reaches only addresses that are globally reachable according to the IANA
// registries and do not lead to others by translation or tunneling.
package address

import (
	"net/netip"
)

// Class is the kind of destination that an address is. Its text is for people and logs
// and is stable.
type Class string

// Public is the only class that may be dialed unless a rule names the host.
const (
	Public        Class = "public"
	Invalid       Class = "invalid"
	Unspecified   Class = "unspecified"   // this host, or this network
	Loopback      Class = "loopback"      //
	Private       Class = "private"       // RFC 1918, RFC 4193, RFC 3879
	LinkLocal     Class = "link-local"    // RFC 3927, RFC 4291
	Metadata      Class = "metadata"      // where clouds provide a machine's secrets
	Shared        Class = "shared"        // between a carrier and its customers (CGNAT), RFC 6598
	Multicast     Class = "multicast"     //
	Broadcast     Class = "broadcast"     //
	Reserved      Class = "reserved"      // assigned to no host: future use, protocols, discard
	Documentation Class = "documentation" // RFC 5737, RFC 3849, RFC 9637
	Benchmark     Class = "benchmark"     // RFC 2544, RFC 5180
	Translated    Class = "translated"    // contains an IPv4 address: mapped, NAT64, 6to4, Teredo, ISATAP
)

type block struct {
	prefix netip.Prefix
	class  Class
}

// blocks are searched in order: the first one that contains an address determines its
// class. They are from the IANA IPv4 and IPv6 Special-Purpose Address Registries (RFC 6890
// and its updates); the addresses of metadata services are from the documentation of
// clouds.
var blocks = parse([][2]string{
	{"169.254.169.254/32", string(Metadata)},     // AWS, Azure, Google, DigitalOcean, OpenStack
	{"169.254.170.0/23", string(Metadata)},       // AWS: credentials of containers
	{"169.254.42.42/32", string(Metadata)},       // Scaleway
	{"169.254.0.23/32", string(Metadata)},        // Tencent
	{"169.254.10.10/32", string(Metadata)},       // Tencent
	{"100.100.100.200/32", string(Metadata)},     // Alibaba
	{"192.0.0.192/32", string(Metadata)},         // Oracle
	{"168.63.129.16/32", string(Metadata)},       // Azure's wire server, in public space
	{"fd00:ec2::/64", string(Metadata)},          // AWS
	{"fd20:ce::254/128", string(Metadata)},       // Google
	{"fd00:c1::a9fe:a9fe/128", string(Metadata)}, // Oracle
	{"fd00:42::42/128", string(Metadata)},        // Scaleway
	{"fd00:a9fe:a9fe::1/128", string(Metadata)},  // Akamai
	{"fd00:100::100:200/128", string(Metadata)},  // Alibaba

	{"0.0.0.0/8", string(Unspecified)},
	{"10.0.0.0/8", string(Private)},
	{"100.64.0.0/10", string(Shared)},
	{"127.0.0.0/8", string(Loopback)},
	{"169.254.0.0/16", string(LinkLocal)},
	{"172.16.0.0/12", string(Private)},
	{"192.0.0.0/24", string(Reserved)}, // IETF protocols, DS-Lite, NAT64 discovery
	{"192.0.2.0/24", string(Documentation)},
	{"192.31.196.0/24", string(Reserved)},  // AS112
	{"192.52.193.0/24", string(Reserved)},  // AMT relays tunnel
	{"192.88.99.0/24", string(Translated)}, // 6to4 relays
	{"192.168.0.0/16", string(Private)},
	{"192.175.48.0/24", string(Reserved)}, // AS112
	{"198.18.0.0/15", string(Benchmark)},
	{"198.51.100.0/24", string(Documentation)},
	{"203.0.113.0/24", string(Documentation)},
	{"224.0.0.0/4", string(Multicast)},
	{"255.255.255.255/32", string(Broadcast)},
	{"240.0.0.0/4", string(Reserved)},
	{"0.0.0.0/0", string(Public)},

	{"::/128", string(Unspecified)},
	{"::1/128", string(Loopback)},
	{"::/96", string(Translated)},            // IPv4-compatible, withdrawn
	{"::ffff:0:0/96", string(Translated)},    // IPv4-mapped
	{"::ffff:0:0:0/96", string(Translated)},  // IPv4-translated, RFC 2765
	{"64:ff9b::/96", string(Translated)},     // NAT64, RFC 6052
	{"64:ff9b:1::/48", string(Translated)},   // NAT64 for local use, RFC 8215
	{"100::/64", string(Reserved)},           // discard, RFC 6666
	{"100:0:0:1::/64", string(Reserved)},     // dummy, RFC 9780
	{"2001::/32", string(Translated)},        // Teredo, RFC 4380
	{"2001:2::/48", string(Benchmark)},       //
	{"2001:db8::/32", string(Documentation)}, //
	{"2001::/23", string(Reserved)},          // IETF protocols: ORCHID, AMT, AS112 and others
	{"2002::/16", string(Translated)},        // 6to4, RFC 3056
	{"2620:4f:8000::/48", string(Reserved)},  // AS112
	{"3fff::/20", string(Documentation)},     //
	{"5f00::/16", string(Reserved)},          // segment routing, RFC 9602
	{"fc00::/7", string(Private)},            //
	{"fe80::/10", string(LinkLocal)},         //
	{"fec0::/10", string(Private)},           // site-local, withdrawn
	{"ff00::/8", string(Multicast)},          //
	{"2000::/3", string(Public)},             // global unicast: nothing else is assigned
	{"::/0", string(Reserved)},
})

func parse(rows [][2]string) []block {
	all := make([]block, len(rows))
	for i, row := range rows {
		all[i] = block{netip.MustParsePrefix(row[0]), Class(row[1])}
	}
	return all
}

// Classify returns the class of an address. An IPv4-mapped IPv6 address (::ffff:a.b.c.d)
// is Translated, whichever address it contains: DNS records do not contain one, and sockets
// accept both forms. An address with a zone is LinkLocal.
func Classify(a netip.Addr) Class {
	switch {
	case !a.IsValid():
		return Invalid
	case a.Zone() != "":
		return LinkLocal
	case isISATAP(a):
		return Translated
	}
	for _, b := range blocks {
		if b.prefix.Contains(a) {
			return b.class
		}
	}
	return Reserved
}

// isISATAP reports whether an interface identifier contains an IPv4 address (RFC 5214,
// section 6.1), with any prefix.
func isISATAP(a netip.Addr) bool {
	if !a.Is6() {
		return false
	}
	b := a.As16()
	return b[8]&^0x03 == 0 && b[9] == 0 && b[10] == 0x5e && b[11] == 0xfe
}
