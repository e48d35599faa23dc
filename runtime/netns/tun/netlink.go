package tun

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// netlink sends one request to the kernel's rtnetlink(7) and waits for its acknowledgement.
// Routes and a routing rule do not justify a library in a process with privileges.
func netlink(kind, flags uint16, body []byte) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open rtnetlink: %w", err)
	}
	defer unix.Close(fd)
	request := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(body)))
	request = binary.NativeEndian.AppendUint16(request, kind)
	request = binary.NativeEndian.AppendUint16(request, flags|unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	request = binary.NativeEndian.AppendUint32(request, 1) // sequence number
	request = binary.NativeEndian.AppendUint32(request, 0) // to the kernel
	request = append(request, body...)
	if err := unix.Sendto(fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("send to rtnetlink: %w", err)
	}
	var response [512]byte // the acknowledgement: our header and an errno
	for {
		n, _, err := unix.Recvfrom(fd, response[:], 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("read rtnetlink's response: %w", err)
		}
		if n < unix.SizeofNlMsghdr+4 || binary.NativeEndian.Uint16(response[4:]) != unix.NLMSG_ERROR {
			return errors.New("rtnetlink's response is not an acknowledgement")
		}
		if errno := -int32(binary.NativeEndian.Uint32(response[unix.SizeofNlMsghdr:])); errno != 0 {
			return fmt.Errorf("rtnetlink: %w", unix.Errno(errno))
		}
		return nil
	}
}

// appendAttribute appends an rtattr, rtnetlink(7). The length of value must be a multiple of
// four, because no padding is added.
func appendAttribute(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofRtAttr+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	return append(b, value...)
}

func appendRtMsg(b []byte, m unix.RtMsg) []byte {
	b = append(b, m.Family, m.Dst_len, m.Src_len, m.Tos, m.Table, m.Protocol, m.Scope, m.Type)
	return binary.NativeEndian.AppendUint32(b, m.Flags)
}
