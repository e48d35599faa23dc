package netns

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
)

const (
	// The kernel lists sockets that listen before all others, in lines of 150
	// bytes. The sandbox decides how many there are.
	maxSocketTable = 256 << 10
	// A port has few listeners on addresses that are not the usual ones.
	maxListeners = 4
)

// listeners returns the addresses on which sockets in the network namespace of
// a process listen on the port, those of IPv4 first. It only reads, so a process
// number that was used again does no harm: it leads into no connection.
func listeners(pid int, port uint16) []netip.Addr {
	var found []netip.Addr
	for _, table := range []string{"tcp", "tcp6"} {
		f, err := os.Open(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		if err != nil {
			continue // the process is gone, or has no IPv6
		}
		found = append(found, listed(io.LimitReader(f, maxSocketTable), port)...)
		f.Close()
	}
	return found[:min(len(found), maxListeners)]
}

// listed reads a table of sockets: "sl local_address rem_address st …" with
// hexadecimal ADDRESS:PORT, and 0A for a socket that listens (proc_net_tcp in the
// kernel's documentation). An address that stands for all is the loopback's.
func listed(table io.Reader, port uint16) []netip.Addr {
	var found []netip.Addr
	lines := bufio.NewScanner(table)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 4 || fields[3] != "0A" {
			continue
		}
		host, service, _ := strings.Cut(fields[1], ":")
		if n, err := strconv.ParseUint(service, 16, 16); err != nil || uint16(n) != port {
			continue
		}
		addr, ok := socketAddress(host)
		if ok && !slices.Contains(found, addr) {
			found = append(found, addr)
		}
	}
	return found
}

// socketAddress parses an address of 4 or 16 bytes, which the kernel writes as
// words in the machine's order.
func socketAddress(text string) (netip.Addr, bool) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b)%4 != 0 {
		return netip.Addr{}, false
	}
	for word := range slices.Chunk(b, 4) {
		binary.BigEndian.PutUint32(word, binary.NativeEndian.Uint32(word))
	}
	addr, ok := netip.AddrFromSlice(b)
	addr = addr.Unmap()
	switch {
	case !ok:
		return netip.Addr{}, false
	case addr == netip.IPv4Unspecified():
		return loopback4, true
	case addr == netip.IPv6Unspecified():
		return netip.IPv6Loopback(), true
	}
	return addr, true
}

var loopback4 = netip.AddrFrom4([4]byte{127, 0, 0, 1})
