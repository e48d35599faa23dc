//go:build integration

package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/netns/link"
)

// Package podman tests the privileges of a container. These tests are of what
// only a whole node has: its home, its sockets, other sandboxes.

func TestASandboxsOnlyNetworkIsTheNodesEgress(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	if devices := strings.Fields(b.exec("ls /sys/class/net")); len(devices) != 2 || devices[0] != link.Device || devices[1] != "lo" {
		t.Errorf("its network devices are %q", devices)
	}
	if routes := b.exec("tail -n +2 /proc/net/route | grep -v '^" + link.Device + "' || true; grep -v ' lo$' /proc/net/ipv6_route || true"); routes != "" {
		t.Errorf("it has routes elsewhere: %q", routes)
	}
	if got := b.exec("cat /etc/resolv.conf"); !strings.Contains(got, "nameserver "+link.Gateway.String()) {
		t.Errorf("its name server is %q", got)
	}
	// The node itself listens on the loopback of the host.
	for _, address := range []string{fmt.Sprintf("127.0.0.1/%d", n.Port), fmt.Sprintf("10.0.2.2/%d", n.Port), "169.254.169.254/80", "1.1.1.1/53"} {
		if result := b.try("timeout 60 bash -c ': </dev/tcp/" + address + "'"); result.ExitCode != 1 { // refused, and not silent
			t.Errorf("%s: %+v", address, result)
		}
	}
	// A name has an address that stands for it, and no query leaves.
	found := b.exec("getent ahostsv4 example.com | head -n 1")
	if a, err := netip.ParseAddr(strings.Fields(found + " ")[0]); err != nil || !link.Pool.Contains(a) || link.Reserved.Contains(a) {
		t.Errorf("example.com is at %q", found)
	}
}

// A client of the guest commands the sandbox, and could respond in its name.
func TestSandboxCannotSpeakToItsGuestAsTheNodeDoes(t *testing.T) {
	b := commonNode(t).newBox(t)
	sockets := strings.Fields(b.exec("find /.doze -type s"))
	if len(sockets) == 0 {
		t.Fatal("the guest has no socket")
	}
	for _, socket := range sockets {
		for _, request := range []string{"GET /hello", "GET /processes", "POST /exec", "GET /events"} {
			out := b.exec(`python3 - <<'EOF'
import socket
s = socket.socket(socket.AF_UNIX)
s.settimeout(20)
try:
    s.connect("` + socket + `")
    s.sendall(b"` + request + ` HTTP/1.1\r\nHost: guest\r\nContent-Length: 0\r\n\r\n")
    print(s.recv(100).decode().split("\r\n")[0])
except OSError as e:
    print("refused:", e)
EOF`)
			// The socket for holds serves nothing else.
			if out != "" && !strings.HasPrefix(out, "refused") && !strings.Contains(out, " 404 ") {
				t.Errorf("%s on %s got %q", request, socket, out)
			}
		}
	}
}

func TestSandboxCannotReplaceItsGuestOrItsSocket(t *testing.T) {
	b := commonNode(t).newBox(t)
	for _, attempt := range []string{
		"touch /.doze/x",
		"touch /.doze/bin/x",
		"echo x >>/.doze/bin/doze-guest",
		"mv /.doze/bin/doze-guest /tmp/g",
		"umount /.doze/bin/doze-guest",
		"mount -t tmpfs none /.doze",
		"kill -9 1 && sleep 1 && ! kill -0 1", // the first process is immune from inside
		// Another user of the sandbox, into whose reach the folder is by its mode.
		"useradd -m other; s=$(find /.doze -type s | head -1); runuser -u other -- rm -f $s && ! test -e $s",
		"useradd -m other; s=$(find /.doze -type s | head -1); runuser -u other -- mv $s $s.old",
	} {
		if result := b.try(attempt); result.ExitCode == 0 {
			t.Errorf("%s: it succeeded: %s", attempt, result.Stdout)
		}
	}
	b.exec("true")
}

func TestSandboxHasFewPrivilegesAndAnotherUser(t *testing.T) {
	b := commonNode(t).newBox(t)
	status := b.exec("cat /proc/self/status")
	for _, want := range []string{"NoNewPrivs:\t1", "Seccomp:\t2", "CapInh:\t0000000000000000", "CapAmb:\t0000000000000000"} {
		if !strings.Contains(status, want) {
			t.Errorf("no %q in\n%s", want, status)
		}
	}
	for name, bit := range map[string]int{"net_admin": 12, "net_raw": 13, "sys_ptrace": 19, "sys_admin": 21, "mknod": 27, "setfcap": 31} {
		if result := b.try(fmt.Sprintf("exit $(( 0x$(sed -n 's/^CapBnd:\t//p' /proc/self/status) >> %d & 1 ))", bit)); result.ExitCode != 0 {
			t.Errorf("it may get the capability %s", name)
		}
	}
	info, err := os.Stat(fmt.Sprintf("/proc/%d", b.hostPID()))
	b.must(err)
	if owner := fmt.Sprint(info.Sys()); strings.Contains(owner, fmt.Sprintf(" %d %d ", os.Getuid(), os.Getgid())) {
		t.Error("its root is the node's user")
	}
	if ids := strings.Fields(b.exec("cat /proc/self/uid_map")); len(ids) != 3 || ids[0] != "0" || ids[1] != "1" {
		t.Errorf("its uid map is %v", ids)
	}
}

func TestSandboxSeesNeitherTheNodeNorItsNeighbors(t *testing.T) {
	n := commonNode(t)
	b, other := n.newWebBox(t), n.newBox(t)
	b.write("/srv/secret", []byte("of b"))
	for _, path := range []string{n.Home, filepath.Join(n.Home, "token"), "/run/doze", "/srv/secret", "/sys/fs/cgroup/sandboxes"} {
		if result := other.try("ls " + path); result.ExitCode == 0 {
			t.Errorf("it sees %s: %s", path, result.Stdout)
		}
	}
	for _, b := range []*box{b, other} {
		for _, file := range []string{"/proc/self/mountinfo", "/proc/self/environ", "/proc/self/cgroup", "/proc/1/cmdline", "/etc/hosts", "/etc/resolv.conf"} {
			text := b.exec("cat " + file + " | tr '\\0' '\\n'")
			if strings.Contains(text, n.Token) {
				t.Errorf("%s has the node's token", file)
			}
		}
	}
	// Its processes, its loopback, its semaphores are its own.
	if processes := other.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '"); strings.Contains(processes, "server.js") {
		t.Errorf("it sees its neighbor's processes: %s", processes)
	}
	if result := other.try(fmt.Sprintf("timeout 5 bash -c ': </dev/tcp/127.0.0.1/%d'", webPort)); result.ExitCode == 0 {
		t.Error("it reaches its neighbor's server")
	}
	b.exec("echo of b >/dev/shm/shared")
	if result := other.try("cat /dev/shm/shared"); result.ExitCode == 0 {
		t.Error("it shares memory with its neighbor")
	}
	for _, namespace := range []string{"pid", "net", "ipc", "mnt", "uts", "cgroup"} {
		const read = "readlink /proc/self/ns/"
		own, err := os.Readlink("/proc/self/ns/" + namespace)
		b.must(err)
		if a, c := b.exec(read+namespace), other.exec(read+namespace); a == c || a == own || c == own {
			t.Errorf("namespaces %s: %s, %s, the host's %s", namespace, a, c, own)
		}
	}
}
