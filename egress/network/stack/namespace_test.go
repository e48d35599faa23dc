package stack

import (
	"net"
	"os"
	"testing"

	"github.com/doze-run/doze/egress/network/stack/stacktest"
	"github.com/doze-run/doze/runtime/netns/tun/tuntest"
)

func TestMain(m *testing.M) { tuntest.Main(m) }

// kernel is the network namespace of a sandbox.
type kernel struct{ *stacktest.Network }

// newKernel makes a network namespace with the device of a sandbox, and returns the
// device's other end.
func newKernel(t testing.TB) (*kernel, *os.File, *net.TCPListener) {
	t.Helper()
	k := &kernel{stacktest.New(t)}
	device, listener := k.Device(t)
	return k, device, listener
}

// dial dials from the namespace.
func (k *kernel) dial(network, address string) (conn net.Conn, err error) {
	err = k.In(func() (err error) {
		conn, err = (&net.Dialer{Timeout: patience, FallbackDelay: -1}).Dial(network, address)
		return err
	})
	return conn, err
}
