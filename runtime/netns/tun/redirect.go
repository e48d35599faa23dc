package tun

import (
	"errors"
	"fmt"
	"os"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/link"
)

const (
	// table is the routing table in which every address is local.
	table = 100
	// loopbackIndex is the interface index of lo, the first device of every namespace.
	loopbackIndex = 1
)

// configureRedirect makes the kernel deliver the TCP packets of the sandbox to sockets in its
// network namespace, see package link.
func configureRedirect() error {
	for name, value := range map[string]string{
		// The source of the SYN that comes back through the device is the namespace's own
		// address.
		"conf/" + link.Device + "/accept_local": "1",
		// The larger of the two applies.
		"conf/all/rp_filter":                 "0",
		"conf/" + link.Device + "/rp_filter": "0",
		// The minimum, initial and maximum sizes of a buffer.
		"tcp_rmem": fmt.Sprint("4096 131072 ", link.MaxReceiveBuffer),
		"tcp_wmem": fmt.Sprint("4096 65536 ", link.MaxSendBuffer),
		// The remains of closed connections, of both ends, for a minute.
		"tcp_max_tw_buckets": fmt.Sprint(link.MaxTimeWait),
		// The host's default may be BBR, which paces packets and leaves processors idle.
		"tcp_congestion_control": "reno", // part of every kernel, allowed in every namespace
	} {
		if err := os.WriteFile("/proc/sys/net/ipv4/"+name, []byte(value), 0); err != nil {
			return err
		}
	}
	if err := addLocalTable(); err != nil {
		return err
	}
	return addRules()
}

// addLocalTable makes the kernel deliver marked packets locally.
func addLocalTable() error {
	route := unix.RtMsg{Family: unix.AF_INET, Table: table, Protocol: unix.RTPROT_BOOT, Scope: unix.RT_SCOPE_HOST, Type: unix.RTN_LOCAL}
	if err := rtnetlink(unix.RTM_NEWROUTE, netlink.Create|netlink.Replace, route, number(unix.RTA_OIF, loopbackIndex)); err != nil {
		return fmt.Errorf("add a local route: %w", err)
	}
	// struct fib_rule_hdr has the layout of struct rtmsg; its last byte before the flags is the action.
	rule := unix.RtMsg{Family: unix.AF_INET, Table: table, Type: unix.FR_ACT_TO_TBL}
	err := rtnetlink(unix.RTM_NEWRULE, netlink.Create|netlink.Excl, rule, number(unix.FRA_FWMARK, link.Mark))
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add a routing rule: %w", err)
	}
	return nil
}

// rules is the name of the nftables table. It must change with the rules: a sandbox that is
// attached again, even by a later version of the node, keeps an existing table of this name.
const rules = "doze"

// addRules adds the nftables rules of the namespace unless they exist. Adding rules takes
// less than a millisecond. If rules are removed or a batch fails, the kernel waits for all
// processors (RCU), which takes 8 to 20 ms.
func addRules() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	_, err = c.ListTableOfFamily(rules, nftables.TableFamilyIPv4)
	if err == nil || !errors.Is(err, unix.ENOENT) {
		return err
	}
	t := c.CreateTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: rules})
	out := c.AddChain(&nftables.Chain{
		Name: "output", Table: t, Type: nftables.ChainTypeRoute,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityMangle,
	})
	c.AddRule(&nftables.Rule{Table: t, Chain: out, Exprs: append(
		append(device(expr.MetaKeyOIFNAME), tcpFlags(expr.CmpOpNeq)...), setMark()...,
	)})
	in := c.AddChain(&nftables.Chain{
		Name: "prerouting", Table: t, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityMangle,
	})
	address := link.Listener.Addr().As4()
	c.AddRule(&nftables.Rule{Table: t, Chain: in, Exprs: append(append(append(
		device(expr.MetaKeyIIFNAME), tcpFlags(expr.CmpOpEq)...), setMark()...),
		&expr.Immediate{Register: 1, Data: address[:]},
		&expr.Immediate{Register: 2, Data: binaryutil.BigEndian.PutUint16(link.Listener.Port())},
		&expr.TProxy{Family: unix.NFPROTO_IPV4, TableFamily: unix.NFPROTO_IPV4, RegAddr: 1, RegPort: 2},
	)})
	return c.Flush()
}

func device(key expr.MetaKey) []expr.Any {
	name := make([]byte, unix.IFNAMSIZ)
	copy(name, link.Device)
	return []expr.Any{
		&expr.Meta{Key: key, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: name},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
	}
}

// Flags of TCP, RFC 9293, 3.1.
const (
	tcpFlagsOffset = 13
	syn            = 0x02
	rst            = 0x04
	ack            = 0x10
)

// tcpFlags tests whether a packet is (or with CmpOpNeq is not) the first of a connection.
func tcpFlags(op expr.CmpOp) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: tcpFlagsOffset, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{syn | ack | rst}, Xor: []byte{0}},
		&expr.Cmp{Op: op, Register: 1, Data: []byte{syn}},
	}
}

func setMark() []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(link.Mark)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
	}
}

// Listen creates, in the network namespace of the calling thread, the socket that accepts
// the connections whose first packet comes back through the device. The descriptor is
// non-blocking and close-on-exec; the caller closes it.
func Listen() (fd int, err error) {
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("create a socket: %w", err)
	}
	for option, level := range map[int]int{unix.SO_REUSEADDR: unix.SOL_SOCKET, unix.IP_TRANSPARENT: unix.SOL_IP} {
		if err == nil {
			err = unix.SetsockoptInt(fd, level, option, 1)
		}
	}
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Port: int(link.Listener.Port()), Addr: link.Listener.Addr().As4()})
	}
	if err == nil {
		err = unix.Listen(fd, backlog)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("listen on %s: %w", link.Listener, err)
	}
	return fd, nil
}

// backlog is how many connections may wait to be accepted: more than there are concurrent
// attempts.
const backlog = 1024
