// Package sockets finds the TCP sockets that listen in a network namespace.
package sockets

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"io"
	"iter"
	"net/netip"
	"os"
	"slices"
	"strconv"
)

const (
	// maxSocketTable bounds, in bytes, how much of the table is read. The kernel lists
	// listening sockets first, in lines of 150 bytes. Their number is up to the sandbox.
	maxSocketTable = 256 << 10
	// maxListeners bounds the returned addresses. A port rarely has listeners on more
	// than one or two.
	maxListeners = 4
)

// Listeners returns the addresses on which sockets in the network namespace of a process
// listen on the port, IPv4 first, and the loopback address in place of an unspecified one.
// proc is the folder of the process, such as /proc/self.
func Listeners(proc string, port uint16) []netip.Addr {
	var found []netip.Addr
	for _, table := range tables(proc) {
		for l := range table {
			addr := Reachable(l.Addr.Addr())
			if l.Addr.Port() == port && !slices.Contains(found, addr) {
				found = append(found, addr)
			}
		}
	}
	return found[:min(len(found), maxListeners)]
}

// Reachable returns the address at which a socket that is bound to addr can be reached from
// its own namespace: the loopback address in place of an unspecified one.
func Reachable(addr netip.Addr) netip.Addr {
	switch addr {
	case netip.IPv4Unspecified():
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	case netip.IPv6Unspecified():
		return netip.IPv6Loopback()
	}
	return addr
}

// tables returns the listening sockets in the network namespace of a process, of IPv4 and of
// IPv6. A table is empty if the process is gone, or has no IPv6.
func tables(proc string) []iter.Seq[Listener] {
	var all []iter.Seq[Listener]
	for _, path := range []string{"/net/tcp", "/net/tcp6"} {
		all = append(all, func(yield func(Listener) bool) {
			f, err := os.Open(proc + path)
			if err != nil {
				return
			}
			defer f.Close()
			listed(io.LimitReader(f, maxSocketTable))(yield)
		})
	}
	return all
}

// listed parses a table of sockets: "sl local_address rem_address st tx_queue:rx_queue
// tr:tm->when retrnsmt uid timeout inode …" with hexadecimal ADDRESS:PORT, and 0A for a
// listening socket (proc_net_tcp in the kernel's documentation).
func listed(table io.Reader) iter.Seq[Listener] {
	return func(yield func(Listener) bool) {
		for lines := bufio.NewScanner(table); lines.Scan(); {
			fields := bytes.Fields(lines.Bytes())
			if len(fields) < 10 || string(fields[3]) != "0A" {
				continue
			}
			address, service, _ := bytes.Cut(fields[1], []byte(":"))
			addr, ok := socketAddress(string(address))
			port, err := strconv.ParseUint(string(service), 16, 16)
			inode, _ := strconv.ParseUint(string(fields[9]), 10, 32)
			if ok && err == nil && !yield(Listener{netip.AddrPortFrom(addr, uint16(port)), uint32(inode)}) {
				return
			}
		}
	}
}

// socketAddress parses an address of 4 or 16 bytes, which the kernel writes as words in
// native byte order.
func socketAddress(text string) (netip.Addr, bool) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b)%4 != 0 {
		return netip.Addr{}, false
	}
	for word := range slices.Chunk(b, 4) {
		binary.BigEndian.PutUint32(word, binary.NativeEndian.Uint32(word))
	}
	addr, ok := netip.AddrFromSlice(b)
	return addr.Unmap(), ok
}
