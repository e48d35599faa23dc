package tun

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// netlink sends one request to the kernel's rtnetlink(7) and waits for its
// acknowledgement. A default route is all that is asked of it here, for which
// a library would be a large thing to have in a process with privileges.
func netlink(kind, flags uint16, body []byte) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("opening rtnetlink: %w", err)
	}
	defer unix.Close(fd)
	request := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(body)))
	request = binary.NativeEndian.AppendUint16(request, kind)
	request = binary.NativeEndian.AppendUint16(request, flags|unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	request = binary.NativeEndian.AppendUint32(request, 1) // sequence number
	request = binary.NativeEndian.AppendUint32(request, 0) // to the kernel
	request = append(request, body...)
	if err := unix.Sendto(fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("asking rtnetlink: %w", err)
	}
	var answer [512]byte // the acknowledgement is our header and an errno
	for {
		n, _, err := unix.Recvfrom(fd, answer[:], 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("reading rtnetlink's answer: %w", err)
		}
		if n < unix.SizeofNlMsghdr+4 || binary.NativeEndian.Uint16(answer[4:]) != unix.NLMSG_ERROR {
			return errors.New("rtnetlink's answer is no acknowledgement")
		}
		if errno := -int32(binary.NativeEndian.Uint32(answer[unix.SizeofNlMsghdr:])); errno != 0 {
			return fmt.Errorf("rtnetlink: %w", unix.Errno(errno))
		}
		return nil
	}
}

// appendAttribute appends an rtattr, rtnetlink(7). All that are used here have
// lengths that are multiples of four, so that none needs padding.
func appendAttribute(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofRtAttr+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	return append(b, value...)
}

func appendRtMsg(b []byte, m unix.RtMsg) []byte {
	b = append(b, m.Family, m.Dst_len, m.Src_len, m.Tos, m.Table, m.Protocol, m.Scope, m.Type)
	return binary.NativeEndian.AppendUint32(b, m.Flags)
}
