package sockets

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func openDiag(t testing.TB) *Diag {
	t.Helper()
	d, err := OpenDiag()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func list(t testing.TB, d *Diag) []Listener {
	t.Helper()
	found, err := d.Listening(nil)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestDiagFindsListenersOnEveryAddress(t *testing.T) {
	d := openDiag(t)
	for _, address := range []string{"127.0.0.1:0", "127.0.0.2:0", "[::1]:0", "0.0.0.0:0", "[::]:0"} {
		ln, err := net.Listen("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		file, err := ln.(*net.TCPListener).File()
		if err != nil {
			t.Fatal(err)
		}
		inode := inodeOf(t, file)
		want := Listener{ln.Addr().(*net.TCPAddr).AddrPort(), inode}
		for name, found := range map[string][]Listener{"diag": list(t, d), "table": Listening(nil)} {
			if !slices.Contains(found, want) {
				t.Errorf("%s: %v is not among %v", name, want, found)
			}
		}
		file.Close()
		ln.Close()
		for name, found := range map[string][]Listener{"diag": list(t, d), "table": Listening(nil)} {
			if slices.Contains(found, want) {
				t.Errorf("%s: %v is closed, and among %v", name, want, found)
			}
		}
	}
}

func inodeOf(t *testing.T, f *os.File) uint32 {
	t.Helper()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return uint32(info.Sys().(*syscall.Stat_t).Ino)
}

// More than one message of the kernel, and connections, which are not listed.
func TestDiagListsManySockets(t *testing.T) {
	d := openDiag(t)
	before := list(t, d)
	var want []netip.AddrPort
	for range 200 {
		want = append(want, listen(t, "127.0.0.1:0"))
	}
	for range 20 {
		conn, err := net.Dial("tcp", want[0].String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	found := list(t, d)
	for _, address := range want {
		n := 0
		for _, l := range found {
			if l.Addr == address {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%v is listed %d times", address, n)
		}
	}
	if after, err := d.Listening(slices.Clone(before)); err != nil || len(after) < len(before)+200 {
		t.Errorf("appended to %d sockets: %d, %v", len(before), len(after), err)
	}
}

// message is one netlink message.
func message(kind uint16, sequence uint32, payload []byte) []byte {
	b := make([]byte, unix.SizeofNlMsghdr, unix.SizeofNlMsghdr+len(payload))
	binary.NativeEndian.PutUint32(b, uint32(cap(b)))
	binary.NativeEndian.PutUint16(b[4:], kind)
	binary.NativeEndian.PutUint32(b[8:], sequence)
	return append(b, payload...)
}

func socketMessage(family, state byte, port uint16, address string, inode uint32) []byte {
	b := make([]byte, sizeofDiagMessage)
	b[0], b[1] = family, state
	binary.BigEndian.PutUint16(b[4:], port)
	copy(b[8:], netip.MustParseAddr(address).AsSlice())
	binary.NativeEndian.PutUint32(b[68:], inode)
	return b
}

func errno(n int32) []byte {
	b := make([]byte, 4)
	binary.NativeEndian.PutUint32(b, uint32(n))
	return b
}

func TestDiagMessages(t *testing.T) {
	four := socketMessage(unix.AF_INET, stateListen, 3000, "127.0.0.1", 7)
	six := socketMessage(unix.AF_INET6, stateListen, 3001, "::1", 8)
	mapped := socketMessage(unix.AF_INET6, stateListen, 3002, "::ffff:127.0.0.1", 9)
	for _, tt := range []struct {
		name string
		b    []byte
		want string
		done bool
		err  error
	}{
		{name: "sockets", b: slices.Concat(message(unix.SOCK_DIAG_BY_FAMILY, 5, four), message(unix.SOCK_DIAG_BY_FAMILY, 5, six), message(unix.SOCK_DIAG_BY_FAMILY, 5, mapped)),
			want: "[{127.0.0.1:3000 7} {[::1]:3001 8} {127.0.0.1:3002 9}]"},
		{name: "with attributes", b: message(unix.SOCK_DIAG_BY_FAMILY, 5, append(slices.Clone(four), 5, 0, 8, 0, 0)), want: "[{127.0.0.1:3000 7}]"},
		{name: "last", b: slices.Concat(message(unix.SOCK_DIAG_BY_FAMILY, 5, four), message(unix.NLMSG_DONE, 5, errno(0))), want: "[{127.0.0.1:3000 7}]", done: true},
		{name: "error", b: message(unix.NLMSG_ERROR, 5, errno(-int32(unix.ENOENT))), want: "[]", done: true, err: unix.ENOENT},
		{name: "error at the end", b: message(unix.NLMSG_DONE, 5, errno(-int32(unix.ENOMEM))), want: "[]", done: true, err: unix.ENOMEM},
		{name: "another dump", b: slices.Concat(message(unix.NLMSG_DONE, 4, errno(0)), message(unix.SOCK_DIAG_BY_FAMILY, 5, four)), want: "[{127.0.0.1:3000 7}]"},
		{name: "no operation", b: message(unix.NLMSG_NOOP, 5, nil), want: "[]"},
		{name: "short header", b: make([]byte, 8), want: "[]", err: errDiagMalformed},
		{name: "short message", b: message(unix.SOCK_DIAG_BY_FAMILY, 5, four[:40]), want: "[]", err: errDiagMalformed},
		{name: "length beyond the end", b: message(unix.SOCK_DIAG_BY_FAMILY, 5, four)[:60], want: "[]", err: errDiagMalformed},
		{name: "length of zero", b: make([]byte, 16), want: "[]", err: errDiagMalformed},
		{name: "another state", b: message(unix.SOCK_DIAG_BY_FAMILY, 5, socketMessage(unix.AF_INET, 1, 3000, "127.0.0.1", 7)), want: "[]", err: errDiagMalformed},
		{name: "another family", b: message(unix.SOCK_DIAG_BY_FAMILY, 5, socketMessage(unix.AF_UNIX, stateListen, 3000, "127.0.0.1", 7)), want: "[]", err: errDiagMalformed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			found, done, err := parseDiag(tt.b, 5, nil)
			if fmt.Sprint(found) != tt.want || done != tt.done || !errors.Is(err, tt.err) {
				t.Errorf("found %v, done %v, %v", found, done, err)
			}
		})
	}
}

func FuzzDiag(f *testing.F) {
	four := message(unix.SOCK_DIAG_BY_FAMILY, 5, socketMessage(unix.AF_INET, stateListen, 3000, "127.0.0.1", 7))
	f.Add(slices.Concat(four, message(unix.NLMSG_DONE, 5, errno(0))))
	f.Add(slices.Concat(message(unix.NLMSG_ERROR, 5, errno(-2)), four[:50]))
	f.Add(message(unix.SOCK_DIAG_BY_FAMILY, 5, socketMessage(unix.AF_INET6, stateListen, 80, "::1", 1)))
	f.Fuzz(func(t *testing.T, b []byte) {
		given := bytes.Clone(b)
		found, done, err := parseDiag(b, 5, nil)
		if len(found) > len(b)/sizeofDiagMessage {
			t.Errorf("%d sockets in %d bytes", len(found), len(b))
		}
		for _, l := range found {
			if !l.Addr.IsValid() || l.Addr.Addr().Is4In6() {
				t.Errorf("%+v", l)
			}
		}
		if !bytes.Equal(b, given) || done && err == errDiagMalformed {
			t.Errorf("done %v, %v", done, err)
		}
	})
}

func BenchmarkListening(b *testing.B) {
	b.Run("diag", func(b *testing.B) {
		d := openDiag(b)
		var found []Listener
		for b.Loop() {
			var err error
			if found, err = d.Listening(found[:0]); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("table", func(b *testing.B) {
		var found []Listener
		for b.Loop() {
			found = Listening(found[:0])
		}
	})
}
