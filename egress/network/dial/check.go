package dial

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/doze-run/doze/egress/network/address"
)

// RefusedError reports that a target is not allowed, with a reason for people to
// read. Nothing was dialed.
type RefusedError struct {
	Host    string
	Address netip.Addr // the first refused one
	Reason  string
}

func (e *RefusedError) Error() string { return "refused: " + e.Reason }

// grant is how far a target may reach; each one includes those before it.
type grant int

const (
	grantPublic  grant = iota
	grantPrivate       // a rule allows the host a private address
	grantListed        // a rule lists the address, perhaps as part of a large network
	grantNamed         // the operator configured the host's address
)

func (t Target) grant() grant {
	switch {
	case t.Host == "" && t.Listed:
		return grantListed
	case t.Private:
		return grantPrivate
	}
	return grantPublic
}

// need is the minimum grant for an address of each class. Classes that are not
// listed are never dialed: some of them mean this host or several hosts.
var need = map[address.Class]grant{
	address.Public:        grantPublic,
	address.Private:       grantPrivate,
	address.Shared:        grantPrivate,
	address.LinkLocal:     grantListed,
	address.Documentation: grantListed,
	address.Benchmark:     grantListed,
	address.Reserved:      grantListed,
	// A rule for 0.0.0.0/0, or a name that belongs to another party, must not
	// lead here by accident.
	address.Loopback:   grantNamed,
	address.Metadata:   grantNamed,
	address.Translated: grantNamed,
}

// maxAddresses is how many addresses of a name are tried: names of large
// services have about eight of each family, and the owner of a name controls
// their number.
const maxAddresses = 8

// check returns the addresses that may be dialed, in their order but with the
// families alternating (RFC 8305, section 4), and at most maxAddresses. If none may
// be dialed, the error is about the first address. A refused address is left out
// and does not disqualify the others, which were checked themselves.
func (d *Dialer) check(t Target, g grant, found []netip.Addr) ([]netip.Addr, error) {
	var checked []netip.Addr
	var refused error
	for _, a := range found {
		a = a.Unmap() // resolvers return mapped IPv4 addresses, and a socket treats both forms alike
		err := d.allow(t, g, a)
		switch {
		case err == nil && !slices.Contains(checked, a):
			checked = append(checked, a)
		case err != nil && refused == nil:
			refused = err
		}
	}
	if len(checked) == 0 {
		return nil, refused
	}
	checked = interleave(checked)
	return checked[:min(len(checked), maxAddresses)], nil
}

// allow checks one address.
func (d *Dialer) allow(t Target, g grant, a netip.Addr) error {
	class := address.Classify(a)
	least, known := need[class]
	switch {
	case !known:
		return refuse(t, a, fmt.Sprintf("(%s), to which nothing can be sent", class))
	case g < least:
		return refuse(t, a, fmt.Sprintf("(%s), which the node's operator has not allowed", class))
	case g == grantNamed:
		return nil
	}
	own, err := d.own.has(a)
	if err != nil {
		return err
	}
	if own {
		return refuse(t, a, "which is this node")
	}
	return nil
}

func refuse(t Target, a netip.Addr, what string) error {
	subject := a.String()
	if t.Host != "" {
		subject = t.Host + " is at " + subject
	}
	return &RefusedError{t.Host, a, subject + " " + what}
}

func isPublic(addrs []netip.Addr) bool {
	return !slices.ContainsFunc(addrs, func(a netip.Addr) bool { return address.Classify(a) != address.Public })
}

// interleave alternates the families, beginning with the first address's.
func interleave(addrs []netip.Addr) []netip.Addr {
	var first, second []netip.Addr
	for _, a := range addrs {
		if a.Is4() == addrs[0].Is4() {
			first = append(first, a)
		} else {
			second = append(second, a)
		}
	}
	alternating := make([]netip.Addr, 0, len(addrs))
	for i := range max(len(first), len(second)) {
		alternating = append(alternating, first[min(i, len(first)):min(i+1, len(first))]...)
		alternating = append(alternating, second[min(i, len(second)):min(i+1, len(second))]...)
	}
	return alternating
}
