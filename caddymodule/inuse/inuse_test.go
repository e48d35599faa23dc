package inuse_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/caddymodule/inuse"
)

// TestMain makes the test binary a process that listens on the addresses in its
// arguments, as Caddy does, until its input ends.
func TestMain(m *testing.M) {
	if os.Getenv("INUSE_TEST_LISTEN") == "" {
		os.Exit(m.Run())
	}
	for _, arg := range os.Args[1:] {
		network, address, _ := strings.Cut(arg, "/")
		closer, err := listen(network, address)
		if err != nil {
			os.Stdout.WriteString(err.Error() + "\n")
			os.Exit(1)
		}
		defer closer.Close()
	}
	os.Stdout.WriteString("listening\n")
	io.Copy(io.Discard, os.Stdin)
}

func listen(network, address string) (io.Closer, error) {
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) }), err)
	}}
	if strings.HasPrefix(network, "udp") {
		return config.ListenPacket(context.Background(), network, address)
	}
	return config.Listen(context.Background(), network, address)
}

// other starts a process that listens, and returns its process number.
func other(t *testing.T, addresses ...string) int {
	t.Helper()
	cmd := exec.Command(os.Args[0], addresses...)
	cmd.Env = append(os.Environ(), "INUSE_TEST_LISTEN=1", "GORACE=atexit_sleep_ms=0") // or -race has each wait for a second
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); cmd.Wait() })
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "listening\n" {
		t.Fatalf("%q, %v", line, err)
	}
	return cmd.Process.Pid
}

// free returns a port that is free on all addresses, for TCP and UDP.
func free(t *testing.T) string {
	t.Helper()
	for range 20 {
		ln, err := net.Listen("tcp", ":0")
		if err != nil {
			t.Fatal(err)
		}
		_, port, _ := net.SplitHostPort(ln.Addr().String())
		pc, err := net.ListenPacket("udp", ":"+port)
		ln.Close()
		if err == nil {
			pc.Close()
			return port
		}
	}
	t.Fatal("no port is free")
	return ""
}

func TestAnAddressOfAnotherProcessIsInUse(t *testing.T) {
	for _, tt := range []struct {
		name, theirs, network, ours string
		inUse                       bool
	}{
		{"same address", "tcp4/127.0.0.1:", "tcp", "127.0.0.1:", true},
		{"same address, UDP", "udp4/127.0.0.1:", "udp", "127.0.0.1:", true},
		{"IPv6", "tcp6/[::1]:", "tcp", "[::1]:", true},
		{"they have all addresses", "tcp4/0.0.0.0:", "tcp", "127.0.0.1:", true},
		{"they have all of both families", "tcp/[::]:", "tcp", "127.0.0.1:", true},
		{"we want all addresses", "tcp4/127.0.0.1:", "tcp", "0.0.0.0:", true},
		{"we want all of both families", "tcp4/127.0.0.1:", "tcp", "[::]:", true},
		{"another address", "tcp4/127.0.0.1:", "tcp", "127.0.0.2:", false},
		{"another protocol", "tcp4/127.0.0.1:", "udp", "127.0.0.1:", false},
		{"another protocol, UDP", "udp4/127.0.0.1:", "tcp", "127.0.0.1:", false},
		{"another family", "tcp6/[::1]:", "tcp", "127.0.0.1:", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			port := free(t)
			pid := other(t, tt.theirs+port)
			address := netip.MustParseAddrPort(tt.ours + port)
			// Whether it is in use or not: Caddy's way of listening does not notice.
			ln, err := listen(tt.network, address.String())
			if err != nil {
				t.Fatalf("listening with SO_REUSEPORT: %v", err)
			}
			ln.Close()
			err = inuse.Check(tt.network, address)
			var inUse *inuse.Error
			if errors.As(err, &inUse) != tt.inUse {
				t.Fatalf("got %v", err)
			}
			if tt.inUse && (inUse.PID != pid || inUse.Program == "" || !strings.Contains(err.Error(), tt.network+"/"+address.String()+";")) {
				t.Errorf("got %v; want process %d", err, pid)
			}
		})
	}
}

func TestWhatThisProcessListensOnIsItsOwn(t *testing.T) {
	port := free(t)
	for _, network := range []string{"tcp4", "udp4"} {
		ln, err := listen(network, "127.0.0.1:"+port)
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		for _, address := range []string{"127.0.0.1:", "0.0.0.0:", "[::]:"} {
			if err := inuse.Check(strings.TrimSuffix(network, "4"), netip.MustParseAddrPort(address+port)); err != nil {
				t.Errorf("%s: %v", address, err)
			}
		}
	}
	other(t, "tcp4/127.0.0.1:"+port)
	if err := inuse.Check("tcp", netip.MustParseAddrPort("127.0.0.1:"+port)); err == nil {
		t.Error("another process listens on the same address, and it is not an error")
	}
}

func TestNoPortAndForeignAddressesAreLeftToTheCaller(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "192.0.2.1:80"} {
		if err := inuse.Check("tcp", netip.MustParseAddrPort(address)); err != nil {
			t.Errorf("%s: %v", address, err)
		}
	}
}
