package sockets

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Listener is a TCP socket that listens.
type Listener struct {
	Addr  netip.AddrPort // as bound, so its address may be unspecified
	Inode uint32
}

// Diag lists the listening sockets of the network namespace in which it was opened, by
// NETLINK_SOCK_DIAG (sock_diag(7)). The kernel walks its table of listening sockets alone,
// whereas a read of /proc/net/tcp walks the table of all connections. A Diag is not safe for
// concurrent use.
type Diag struct {
	fd       int
	sequence uint32
	request  [unix.SizeofNlMsghdr + sizeofDiagRequest]byte
	buf      [diagBuffer]byte
}

const (
	// maxDumped bounds the sockets of one list. Their number is up to the sandbox.
	maxDumped = 4096
	// diagBuffer holds any message of a dump: the kernel makes them of at most 8 KiB, or as
	// large as the reader's buffer (netlink_dump).
	diagBuffer = 16 << 10
	// diagTimeout bounds a read. The kernel has queued each message before it is read.
	diagTimeout = time.Second

	// Sizes of struct inet_diag_req_v2 and inet_diag_msg (linux/inet_diag.h).
	sizeofDiagRequest = 56
	sizeofDiagMessage = 72

	stateListen = 10 // TCP_LISTEN
)

// OpenDiag opens the socket. The caller closes it.
func OpenDiag() (*Diag, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, fmt.Errorf("open a socket for sock_diag: %w", err)
	}
	timeout := unix.NsecToTimeval(diagTimeout.Nanoseconds())
	err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout)
	if err == nil {
		// Then only the kernel can send to it.
		err = unix.Connect(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("connect to sock_diag: %w", err)
	}
	return &Diag{fd: fd}, nil
}

// Close closes the socket.
func (d *Diag) Close() error { return unix.Close(d.fd) }

// Listening appends the sockets that listen, at most 4,096, to list. After an error the Diag
// is unusable. Errors: syscall.ENOENT (wrapped) if the kernel has no inet_diag or tcp_diag.
func (d *Diag) Listening(list []Listener) ([]Listener, error) {
	limit := len(list) + maxDumped
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		var err error
		if list, err = d.dump(family, list, limit); err != nil {
			return list, fmt.Errorf("list listening sockets: %w", err)
		}
	}
	return list, nil
}

// dump appends the sockets of a family up to the limit of the list's length.
func (d *Diag) dump(family byte, list []Listener, limit int) ([]Listener, error) {
	d.putRequest(family)
	if _, err := unix.Write(d.fd, d.request[:]); err != nil {
		return list, err
	}
	for {
		n, err := unix.Read(d.fd, d.buf[:])
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return list, err
		}
		var done bool
		if list, done, err = parseDiag(d.buf[:n], d.sequence, list); done || err != nil {
			return list[:min(len(list), limit)], err
		}
		list = list[:min(len(list), limit)]
	}
}

// putRequest prepares the next request: a dump of the listening TCP sockets of a family.
func (d *Diag) putRequest(family byte) {
	d.sequence++
	b, order := d.request[:], binary.NativeEndian
	order.PutUint32(b, uint32(len(b)))
	order.PutUint16(b[4:], unix.SOCK_DIAG_BY_FAMILY)
	order.PutUint16(b[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	order.PutUint32(b[8:], d.sequence)
	b[16], b[17] = family, unix.IPPROTO_TCP
	order.PutUint32(b[20:], 1<<stateListen)
}

var errDiagMalformed = errors.New("malformed netlink message")

// parseDiag appends the sockets in one datagram to list and reports whether it was the last
// of the dump with that sequence number. It ignores the datagrams of other dumps.
func parseDiag(b []byte, sequence uint32, list []Listener) (_ []Listener, done bool, err error) {
	order := binary.NativeEndian
	for len(b) > 0 {
		if len(b) < unix.SizeofNlMsghdr {
			return list, false, errDiagMalformed
		}
		length := order.Uint32(b)
		if length < unix.SizeofNlMsghdr || uint64(length) > uint64(len(b)) {
			return list, false, errDiagMalformed
		}
		kind, number, payload := order.Uint16(b[4:]), order.Uint32(b[8:]), b[unix.SizeofNlMsghdr:length]
		b = b[min(len(b), int(length+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1)):]
		if number != sequence {
			continue
		}
		switch kind {
		case unix.NLMSG_DONE, unix.NLMSG_ERROR:
			if len(payload) >= 4 {
				if errno := int32(order.Uint32(payload)); errno < 0 {
					return list, true, unix.Errno(-errno)
				}
			}
			return list, true, nil
		case unix.SOCK_DIAG_BY_FAMILY:
			l, err := parseListener(payload)
			if err != nil {
				return list, false, err
			}
			list = append(list, l)
		}
	}
	return list, false, nil
}

// parseListener parses a struct inet_diag_msg: family and state, then struct
// inet_diag_sockid with the port and the address in network byte order, and last the inode.
func parseListener(b []byte) (Listener, error) {
	if len(b) < sizeofDiagMessage || b[1] != stateListen {
		return Listener{}, errDiagMalformed
	}
	var addr netip.Addr
	switch b[0] {
	case unix.AF_INET:
		addr = netip.AddrFrom4([4]byte(b[8:12]))
	case unix.AF_INET6:
		addr = netip.AddrFrom16([16]byte(b[8:24])).Unmap()
	default:
		return Listener{}, errDiagMalformed
	}
	return Listener{netip.AddrPortFrom(addr, binary.BigEndian.Uint16(b[4:])), binary.NativeEndian.Uint32(b[68:])}, nil
}

// Listening returns the listening sockets in the network namespace of this process from
// /proc/net/tcp and tcp6, for kernels on which a Diag does not work.
func Listening(list []Listener) []Listener {
	for _, table := range tables("/proc/self") {
		list = slices.AppendSeq(list, table)
	}
	return list
}
