//go:build integration

package egress

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

// decoy listens where no sandbox may come, on every address of the machine.
type decoy struct {
	net.Listener
	reached atomic.Int32
}

func newDecoy(t *testing.T) *decoy {
	t.Helper()
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	d := &decoy{Listener: l}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			d.reached.Add(1)
			conn.Close()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
		if n := d.reached.Load(); n != 0 {
			t.Errorf("sandboxes came to where none may come, %d times", n)
		}
	})
	return d
}

func (d *decoy) port() int { return d.Addr().(*net.TCPAddr).Port }

// machine are the machine's addresses but for the loopback's.
func machine(t *testing.T) (addrs []netip.Addr) {
	t.Helper()
	list, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range list {
		a, _ := netip.AddrFromSlice(one.(*net.IPNet).IP)
		if a = a.Unmap(); !a.IsLoopback() && !a.IsLinkLocalUnicast() {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// refused requests a URL and expects to be refused, without a wait: curl's code 28 would be
// that it waited.
func (b *box) refused(url string, more ...string) {
	b.t.Helper()
	r := b.try("curl -sS -g --noproxy '*' --max-time 20 " + strings.Join(more, " ") + " '" + url + "'")
	switch r.ExitCode {
	case 6, 7, 35, 52, 56: // no name, no connection, no TLS, nothing, a reset
	default:
		b.t.Errorf("%s: %+v", url, r)
	}
}

// audited waits until the audit log has an entry that the filter selects, refused for a reason.
func (b *box) audited(filter client.FlowFilter, reason string) {
	b.t.Helper()
	if filter.Verdict == "" {
		filter.Verdict = "deny"
	}
	testkit.Eventually(b.t, fmt.Sprintf("the audit log has %q with %q", filter.Host, reason), func() bool {
		for _, f := range b.flows(filter) {
			if strings.Contains(f.Reason, reason) {
				return true
			}
		}
		return false
	}, func() string { return fmt.Sprintf("it has %+v", b.flows(client.FlowFilter{})) })
}

// auditedAddress is audited for a connection to an address without a name.
func (b *box) auditedAddress(address, reason string) {
	b.t.Helper()
	testkit.Eventually(b.t, fmt.Sprintf("the audit log has %s with %q", address, reason), func() bool {
		for _, f := range b.flows(client.FlowFilter{Kind: "connection", Verdict: "deny"}) {
			if f.Address == address && strings.Contains(f.Reason, reason) {
				return true
			}
		}
		return false
	}, func() string { return fmt.Sprintf("it has %+v", b.flows(client.FlowFilter{})) })
}

const unnamed = "the address was not looked up by a name"

func TestAddressesWithoutANameAreRefused(t *testing.T) {
	n := commonNode(t)
	d := newDecoy(t)
	b := n.newBox(t)
	// The node's API listens on one of them.
	for _, a := range machine(t) {
		for _, port := range []int{d.port(), n.Port} {
			b.refused(fmt.Sprintf("https://%s/", netip.AddrPortFrom(a, uint16(port))), "-k")
		}
		if a.Is4() {
			b.auditedAddress(a.String(), unnamed)
		}
	}
	for _, spelling := range []string{"169.254.169.254", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518", "0xa9.254.0251.0xfe"} {
		before := len(b.flows(client.FlowFilter{Kind: "connection"}))
		b.refused("http://" + spelling + "/latest/meta-data/")
		testkit.Eventually(t, spelling+" is audited", func() bool {
			flows := b.flows(client.FlowFilter{Kind: "connection"})
			return len(flows) > before && flows[len(flows)-1].Address == "169.254.169.254" && strings.Contains(flows[len(flows)-1].Reason, unnamed)
		})
	}
	for _, address := range []string{
		"8.8.8.8", "10.0.0.1", "192.168.1.1", "172.16.0.1", "100.64.0.1", "198.18.1.77", "198.19.255.254", "192.88.99.1", "198.18.0.6",
	} {
		b.refused("http://" + address + "/")
		b.auditedAddress(address, unnamed)
	}
	// The gateway has DNS and nothing else.
	for _, port := range []int{80, 443, d.port(), n.Port} {
		b.refused(fmt.Sprintf("http://198.18.0.1:%d/", port))
	}
	// There is no IPv6, so that nothing leaves the sandbox's kernel.
	for _, address := range []string{
		"2001:4860:4860::8888", "fd00:ec2::254", "fe80::1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe",
		"2002:a9fe:a9fe::1", "2001:0:a9fe:a9fe::1", "::ffff:0:a9fe:a9fe", "::a9fe:a9fe",
	} {
		b.refused("http://[" + address + "]/")
	}
	// It is one that the kernel takes for IPv4.
	before := len(b.flows(client.FlowFilter{Kind: "connection"}))
	b.refused("http://[::ffff:169.254.169.254]/")
	if flows := b.flows(client.FlowFilter{Kind: "connection"}); len(flows) > before && flows[len(flows)-1].Verdict != "deny" {
		t.Errorf("mapped: %+v", flows[len(flows)-1])
	}
	// Its own addresses lead into the sandbox.
	b.refused(fmt.Sprintf("http://127.0.0.1:%d/", d.port()))
	b.refused(fmt.Sprintf("http://[::1]:%d/", d.port()))
	b.refused(fmt.Sprintf("http://localhost:%d/", d.port()))
	b.refused(fmt.Sprintf("http://198.18.0.2:%d/", d.port()))
}

// A rule for all addresses and all hosts does not mean the node.
func TestWideRuleDoesNotReachTheNode(t *testing.T) {
	n := ownNode(t, "rule wide {\naddresses 0.0.0.0/0 ::/0\nallow_private\nallow\n}")
	d := newDecoy(t)
	b := n.newBox(t)
	for _, a := range machine(t) {
		if !a.Is4() {
			continue
		}
		b.refused(fmt.Sprintf("http://%s/", netip.AddrPortFrom(a, uint16(d.port()))))
		b.auditedAddress(a.String(), "this node")
	}
	b.refused("http://169.254.169.254/latest/meta-data/")
	b.auditedAddress("169.254.169.254", "(metadata)")
	b.refused("http://198.18.0.1/")
}

func TestSandboxDoesNotReachAnother(t *testing.T) {
	n := commonNode(t)
	one, two := n.newBox(t), n.newBox(t)
	server, err := n.API.StartProcess(testkit.Context(t), two.id, types.StartProcessRequest{Command: types.Command{Argv: []string{"python3", "-m", "http.server", "-b", "0.0.0.0", "8077"}}})
	if err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "it serves", func() bool { return two.try("curl -sS http://127.0.0.1:8077/").ExitCode == 0 })
	t.Logf("process %d serves", server.PID)
	for _, address := range []string{"198.18.0.2", "127.0.0.1", "198.18.0.1"} {
		one.refused("http://" + address + ":8077/")
	}
	// The address that stands for a name belongs to the sandbox that resolved it.
	address := strings.Fields(two.exec("getent ahostsv4 echo-two.echo.test"))[0]
	one.refused("http://" + address + ":7/")
	one.auditedAddress(address, unnamed)
	if mounts := one.exec("cat /proc/self/mountinfo"); strings.Contains(mounts, two.id) {
		t.Errorf("the run folder of another sandbox is mounted: %s", mounts)
	}
}

func TestDatagramsAreRefusedImmediately(t *testing.T) {
	b := commonNode(t).newBox(t).canSay()
	for _, to := range []string{"a.pass.test 443", "a.look.test 443", "8.8.8.8 53", "198.18.0.1 443", "192.0.2.1 51820"} {
		if r := b.try("echo hello | python3 /tmp/say.py udp " + to); r.ExitCode != 7 || !strings.Contains(r.Stderr, "ConnectionRefusedError") {
			t.Errorf("%s: %+v", to, r)
		}
	}
	b.audited(client.FlowFilter{Host: "a.pass.test", Kind: "connection"}, "UDP")
	b.auditedAddress("8.8.8.8", "UDP")
}
