// Package inuse finds out whether another process listens on an address.
//
// Caddy listens with SO_REUSEPORT, so that a new configuration can listen before the
// old one stops. With it a second process of the same user listens on the same
// address without an error, and the kernel spreads connections over both.
package inuse

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"

	"github.com/prometheus/procfs"
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
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return err
	}
	owners, err := listeners(proc, network, address)
	if err != nil {
		return err
	}
	self, err := proc.Self()
	if err != nil {
		return err
	}
	own, err := sockets(self)
	if err != nil {
		return err
	}
	owners = slices.DeleteFunc(owners, func(inode uint64) bool { return own[inode] })
	if len(owners) == 0 {
		return nil // our own, from the configuration before
	}
	e := &Error{Network: network, Address: address}
	e.PID, e.Program = process(proc, owners)
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

// States of sockets in /proc/net/tcp and udp (TCP_LISTEN and TCP_CLOSE): a UDP socket that
// only receives is unconnected.
const (
	stateListen      = 0x0a
	stateUnconnected = 0x07
)

// listeners returns the inodes of the sockets that listen on an address, on all
// addresses, or on any address if this one stands for all.
func listeners(fs procfs.FS, network string, address netip.AddrPort) ([]uint64, error) {
	var all procfs.NetIPSocket
	var err, err6 error // the second one if there is no IPv6
	state := uint64(stateListen)
	if network == "udp" {
		state = stateUnconnected
		var v4, v6 procfs.NetUDP
		v4, err = fs.NetUDP()
		v6, err6 = fs.NetUDP6()
		all = slices.Concat(procfs.NetIPSocket(v4), procfs.NetIPSocket(v6))
	} else {
		var v4, v6 procfs.NetTCP
		v4, err = fs.NetTCP()
		v6, err6 = fs.NetTCP6()
		all = slices.Concat(procfs.NetIPSocket(v4), procfs.NetIPSocket(v6))
	}
	if !errors.Is(err6, os.ErrNotExist) {
		err = cmp.Or(err, err6)
	}
	var inodes []uint64
	for _, s := range all {
		local, _ := netip.AddrFromSlice(s.LocalAddr)
		if s.St == state && s.LocalPort == uint64(address.Port()) && overlap(local.Unmap(), address.Addr().Unmap()) {
			inodes = append(inodes, s.Inode)
		}
	}
	return inodes, err
}

func overlap(a, b netip.Addr) bool {
	return a.IsUnspecified() || b.IsUnspecified() || a == b.WithZone("")
}

// sockets returns the inodes of a process' sockets.
func sockets(p procfs.Proc) (map[uint64]bool, error) {
	targets, err := p.FileDescriptorTargets()
	inodes := map[uint64]bool{}
	for _, target := range targets {
		var inode uint64
		if n, _ := fmt.Sscanf(target, "socket:[%d]", &inode); n == 1 {
			inodes[inode] = true
		}
	}
	return inodes, err
}

// process finds a process that has one of these sockets, among those that this user
// may inspect.
func process(fs procfs.FS, inodes []uint64) (pid int, program string) {
	all, _ := fs.AllProcs()
	for _, p := range all {
		has, err := sockets(p)
		if err == nil && slices.ContainsFunc(inodes, func(inode uint64) bool { return has[inode] }) {
			program, _ = p.Comm()
			return p.PID, program
		}
	}
	return 0, ""
}
