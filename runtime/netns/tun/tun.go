// Package tun creates the network device of a sandbox, as package link describes it.
package tun

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/link"
)

// Make creates the device in the network namespace of the calling thread and brings it up,
// with its address, a default route and no IPv6. The descriptor is the other end of the
// device: each read returns one IP packet that the sandbox sent, each write delivers one to
// it. Closing the descriptor removes the device.
//
// The descriptor is non-blocking and close-on-exec. Errors wrap unix.EBUSY if the namespace
// already has the device and its other end is open, and unix.EINVAL if it has another device
// of that name.
func Make() (fd int, err error) {
	fd, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	if err := makeDevice(fd); err != nil {
		unix.Close(fd) // otherwise the device could not be created again
		return -1, err
	}
	return fd, nil
}

// makeDevice creates the device whose other end is the descriptor.
func makeDevice(fd int) error {
	device, err := unix.NewIfreq(link.Device)
	if err != nil {
		return err
	}
	device.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, device); err != nil {
		return fmt.Errorf("create %s: %w", link.Device, err)
	}
	if err := configure(); err != nil {
		return fmt.Errorf("configure %s: %w", link.Device, err)
	}
	return nil
}

func configure() error {
	if err := withoutIPv6(); err != nil {
		return err
	}
	device, err := net.InterfaceByName(link.Device) // in the network namespace of the thread
	if err != nil {
		return fmt.Errorf("find its index: %w", err)
	}
	index := uint32(device.Index)
	address, gateway := link.Sandbox.As4(), link.Gateway.As4()
	if err := LoopbackUp(); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	if err := rtnetlink(unix.RTM_NEWADDR, netlink.Create|netlink.Replace,
		unix.IfAddrmsg{Family: unix.AF_INET, Prefixlen: uint8(link.Prefix.Bits()), Index: index},
		netlink.Attribute{Type: unix.IFA_LOCAL, Data: address[:]}); err != nil {
		return fmt.Errorf("set its address: %w", err)
	}
	if err := rtnetlink(unix.RTM_NEWLINK, 0, unix.IfInfomsg{Index: int32(index), Flags: unix.IFF_UP, Change: unix.IFF_UP},
		number(unix.IFLA_MTU, link.MTU)); err != nil {
		return fmt.Errorf("set it up: %w", err)
	}
	if err := rtnetlink(unix.RTM_NEWROUTE, netlink.Create|netlink.Replace,
		unix.RtMsg{Family: unix.AF_INET, Table: unix.RT_TABLE_MAIN, Protocol: unix.RTPROT_BOOT, Scope: unix.RT_SCOPE_UNIVERSE, Type: unix.RTN_UNICAST},
		netlink.Attribute{Type: unix.RTA_GATEWAY, Data: gateway[:]}, number(unix.RTA_OIF, index)); err != nil {
		return fmt.Errorf("add a default route: %w", err)
	}
	return configureRedirect()
}

// LoopbackUp makes 127.0.0.1 usable in the network namespace of the thread.
func LoopbackUp() error {
	return rtnetlink(unix.RTM_NEWLINK, 0, unix.IfInfomsg{Index: loopbackIndex, Flags: unix.IFF_UP, Change: unix.IFF_UP})
}

// withoutIPv6 prevents the kernel from assigning IPv6 addresses to the device. It has to be
// called before the device is up. /proc/sys/net shows the namespace of the thread that opens
// it, in every /proc.
func withoutIPv6() error {
	path := "/proc/sys/net/ipv6/conf/" + link.Device + "/disable_ipv6"
	err := os.WriteFile(path, []byte("1"), 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a kernel without IPv6
	}
	return err
}
