// Package inuse finds out whether another process listens on an address.
//
// Caddy listens with SO_REUSEPORT, so that a new configuration can listen before the
// old one stops. With it a second process of the same user listens on the same
// address without an error, and the kernel spreads connections over both.
package inuse

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Error reports the process that listens on an address.
type Error struct {
	Network string // tcp or udp
	Address netip.AddrPort
	// PID and Program of the process; 0 and empty if it belongs to another user or
	// network namespace.
	PID     int
	Program string
}

func (e *Error) Error() string {
	by := "another process"
	if e.PID != 0 {
		by = fmt.Sprintf("process %d (%s)", e.PID, e.Program)
	}
	return fmt.Sprintf("%s already listens on %s/%s; stop it, or choose another port or address", by, e.Network, e.Address)
}

// Check returns an *Error if another process listens on an address so that this one
// cannot have it alone. An address of this process itself is not an error. network is
// tcp or udp, and an unspecified address stands for all.
func Check(network string, address netip.AddrPort) error {
	if address.Port() == 0 {
		return nil
	}
	err := bind(network, address)
	if err == nil || !errors.Is(err, unix.EADDRINUSE) {
		return nil // free, or Caddy's own attempt reports what is wrong
	}
	owners, err := listeners(network, address)
	if err != nil {
		return err
	}
	own, err := sockets("/proc/self/fd")
	if err != nil {
		return err
	}
	owners = slices.DeleteFunc(owners, func(inode string) bool { return own[inode] })
	if len(owners) == 0 {
		return nil // our own, from the configuration before
	}
	e := &Error{Network: network, Address: address}
	e.PID, e.Program = process(owners)
	return e
}

// bind tries to bind a socket without SO_REUSEPORT, and does not listen on it: no
// client gets to connect to it.
func bind(network string, address netip.AddrPort) error {
	kind := unix.SOCK_STREAM
	if network == "udp" {
		kind = unix.SOCK_DGRAM
	}
	ip := address.Addr().Unmap()
	zone, _ := strconv.ParseUint(ip.Zone(), 10, 32) // names of interfaces are left to the kernel's default
	domain := unix.AF_INET6
	var sockaddr unix.Sockaddr = &unix.SockaddrInet6{Port: int(address.Port()), Addr: ip.As16(), ZoneId: uint32(zone)}
	if ip.Is4() {
		domain = unix.AF_INET
		sockaddr = &unix.SockaddrInet4{Port: int(address.Port()), Addr: ip.As4()}
	}
	fd, err := unix.Socket(domain, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if network == "tcp" { // connections that ended a moment ago do not count
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return err
		}
	}
	return unix.Bind(fd, sockaddr)
}

// stateListen is the state of a listening socket in /proc/net/tcp (TCP_LISTEN); UDP sockets
// that only receive are in stateUnconnected (TCP_CLOSE).
const (
	stateListen      = "0A"
	stateUnconnected = "07"
)

// listeners returns the inodes of the sockets that listen on an address, on all
// addresses, or on any address if this one stands for all.
func listeners(network string, address netip.AddrPort) ([]string, error) {
	state := stateListen
	if network == "udp" {
		state = stateUnconnected
	}
	var inodes []string
	for _, suffix := range []string{"", "6"} {
		text, err := os.ReadFile("/proc/self/net/" + network + suffix)
		if errors.Is(err, os.ErrNotExist) {
			continue // no IPv6
		}
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(text)) {
			// sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode
			fields := strings.Fields(line)
			if len(fields) < 10 || fields[3] != state {
				continue
			}
			local, ok := parseLocal(fields[1])
			if ok && local.Port() == address.Port() && overlap(local.Addr(), address.Addr().Unmap()) {
				inodes = append(inodes, fields[9])
			}
		}
	}
	return inodes, nil
}

func overlap(a, b netip.Addr) bool {
	return a.IsUnspecified() || b.IsUnspecified() || a == b.WithZone("")
}

// parseLocal parses an address of /proc/net/tcp: 32-bit words in the byte order of
// the machine, which is little-endian on all that doze supports, and the port.
func parseLocal(text string) (netip.AddrPort, bool) {
	address, portText, _ := strings.Cut(text, ":")
	port, err := strconv.ParseUint(portText, 16, 16)
	if err != nil {
		return netip.AddrPort{}, false
	}
	raw, err := hex.DecodeString(address)
	if err != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for word := range slices.Chunk(raw, 4) {
		slices.Reverse(word)
	}
	ip, ok := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(ip.Unmap(), uint16(port)), ok
}

// sockets returns the inodes of the sockets in a folder of file descriptors.
func sockets(dir string) (map[string]bool, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	inodes := map[string]bool{}
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if inode, ok := strings.CutPrefix(target, "socket:["); err == nil && ok {
			inodes[strings.TrimSuffix(inode, "]")] = true
		}
	}
	return inodes, nil
}

// process finds a process that has one of these sockets, among those that this user
// may inspect.
func process(inodes []string) (pid int, program string) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		dir := filepath.Join("/proc", e.Name())
		has, err := sockets(filepath.Join(dir, "fd"))
		if err != nil || !slices.ContainsFunc(inodes, func(inode string) bool { return has[inode] }) {
			continue
		}
		comm, _ := os.ReadFile(filepath.Join(dir, "comm"))
		return pid, strings.TrimSpace(string(comm))
	}
	return 0, ""
}
