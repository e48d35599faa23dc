// Package tun creates the network device of a sandbox, as package link describes it.
package tun

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
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
	control, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(control)
	address := link.Sandbox.As4()
	var mask [4]byte
	binary.BigEndian.PutUint32(mask[:], ^uint32(0)<<(32-link.Prefix.Bits()))
	for _, step := range []struct {
		what    string
		device  string
		request uint
		set     func(*unix.Ifreq) error
	}{
		{"lo up", "lo", unix.SIOCSIFFLAGS, func(r *unix.Ifreq) error { r.SetUint16(unix.IFF_UP); return nil }},
		{"its MTU", link.Device, unix.SIOCSIFMTU, func(r *unix.Ifreq) error { r.SetUint32(link.MTU); return nil }},
		{"its address", link.Device, unix.SIOCSIFADDR, func(r *unix.Ifreq) error { return r.SetInet4Addr(address[:]) }},
		{"its netmask", link.Device, unix.SIOCSIFNETMASK, func(r *unix.Ifreq) error { return r.SetInet4Addr(mask[:]) }},
		{"it up", link.Device, unix.SIOCSIFFLAGS, func(r *unix.Ifreq) error {
			r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
			return nil
		}},
	} {
		request, err := unix.NewIfreq(step.device) // the value is a union: a fresh one each time
		if err == nil {
			err = step.set(request)
		}
		if err == nil {
			err = unix.IoctlIfreq(control, step.request, request)
		}
		if err != nil {
			return fmt.Errorf("set %s: %w", step.what, err)
		}
	}
	device, err := unix.NewIfreq(link.Device)
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(control, unix.SIOCGIFINDEX, device); err != nil {
		return fmt.Errorf("find its index: %w", err)
	}
	if err := defaultRoute(device.Uint32()); err != nil {
		return err
	}
	return configureRedirect()
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

// defaultRoute adds a default route to the gateway, through the device with this index.
func defaultRoute(index uint32) error {
	gateway := link.Gateway.As4()
	route := unix.RtMsg{
		Family:   unix.AF_INET,
		Table:    unix.RT_TABLE_MAIN,
		Protocol: unix.RTPROT_BOOT,
		Scope:    unix.RT_SCOPE_UNIVERSE,
		Type:     unix.RTN_UNICAST,
	}
	return rtnetlink(unix.RTM_NEWROUTE, netlink.Create|netlink.Replace, route,
		netlink.Attribute{Type: unix.RTA_GATEWAY, Data: gateway[:]}, number(unix.RTA_OIF, index))
}
