package tun

import (
	"encoding/binary"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// rtnetlink sends one request to the kernel, rtnetlink(7), and waits for its acknowledgement.
// The message is a structure such as unix.RtMsg.
func rtnetlink(kind netlink.HeaderType, flags netlink.HeaderFlags, message any, attributes ...netlink.Attribute) error {
	body, err := binary.Append(nil, binary.NativeEndian, message)
	if err != nil {
		return err
	}
	list, err := netlink.MarshalAttributes(attributes)
	if err != nil {
		return err
	}
	c, err := netlink.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = c.Execute(netlink.Message{
		Header: netlink.Header{Type: kind, Flags: netlink.Request | netlink.Acknowledge | flags},
		Data:   append(body, list...),
	})
	return err
}

// number returns an attribute that is a 32-bit number.
func number(kind uint16, n uint32) netlink.Attribute {
	return netlink.Attribute{Type: kind, Data: binary.NativeEndian.AppendUint32(nil, n)}
}
