package stack

import (
	"net"
	"os"
	"testing"

	"github.com/doze-run/doze/egress/network/stack/stacktest"
	"github.com/doze-run/doze/runtime/netns/tun/tuntest"
	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) { tuntest.Main(m) }

// kernel is a sandbox's network namespace.
type kernel struct{ *stacktest.Network }

// newKernel creates a network namespace with a sandbox's device, and returns it with the
// device's other end and the listener, which the caller owns.
func newKernel(t testing.TB) (*kernel, *os.File, *net.TCPListener) {
	t.Helper()
	k := &kernel{stacktest.New(t)}
	device, listener := k.Device(t)
	return k, device, listener
}

// dial connects from the namespace.
func (k *kernel) dial(network, address string) (conn net.Conn, err error) {
	err = k.In(func() (err error) {
		conn, err = (&net.Dialer{Timeout: testkit.Patience, FallbackDelay: -1}).Dial(network, address)
		return err
	})
	return conn, err
}
