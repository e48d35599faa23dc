// Package sockets finds the TCP sockets that listen on a port, in the tables of a network
// namespace.
package sockets

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
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
// listen on the port, IPv4 first. proc is the folder of the process, such as /proc/self.
func Listeners(proc string, port uint16) []netip.Addr {
	var found []netip.Addr
	for _, table := range []string{"/net/tcp", "/net/tcp6"} {
		f, err := os.Open(proc + table)
		if err != nil {
			continue // the process is gone, or has no IPv6
		}
		found = append(found, listed(io.LimitReader(f, maxSocketTable), port)...)
		f.Close()
	}
	return found[:min(len(found), maxListeners)]
}

// listed parses a table of sockets: "sl local_address rem_address st …" with hexadecimal
// ADDRESS:PORT, and 0A for a listening socket (proc_net_tcp in the kernel's documentation).
// It returns the loopback address in place of an unspecified one.
func listed(table io.Reader, port uint16) []netip.Addr {
	var found []netip.Addr
	service := fmt.Appendf(nil, ":%04X", port)
	for lines := bufio.NewScanner(table); lines.Scan(); {
		fields := bytes.Fields(lines.Bytes())
		if len(fields) < 4 || string(fields[3]) != "0A" || !bytes.HasSuffix(fields[1], service) {
			continue
		}
		addr, ok := socketAddress(string(bytes.TrimSuffix(fields[1], service)))
		if ok && !slices.Contains(found, addr) {
			found = append(found, addr)
		}
	}
	return found
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
	addr = addr.Unmap()
	switch {
	case !ok:
		return netip.Addr{}, false
	case addr == netip.IPv4Unspecified():
		return netip.AddrFrom4([4]byte{127, 0, 0, 1}), true
	case addr == netip.IPv6Unspecified():
		return netip.IPv6Loopback(), true
	}
	return addr, true
}
