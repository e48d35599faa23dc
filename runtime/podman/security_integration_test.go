//go:build integration

package podman

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/testkit"
)

// allowed is what capabilities says, as the kernel does.
const allowed = 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID |
	1<<unix.CAP_KILL | 1<<unix.CAP_SETGID | 1<<unix.CAP_SETUID | 1<<unix.CAP_NET_BIND_SERVICE

func TestSandboxHasNoMorePrivilegesThanItNeeds(t *testing.T) {
	b := open(t).boot(t, baseImage)
	status := statusOf(t, b.PID)
	for field, want := range map[string]string{
		"NoNewPrivs": "1",
		"Seccomp":    "2", // filtered
		"CapEff":     fmt.Sprintf("%016x", allowed),
		"CapPrm":     fmt.Sprintf("%016x", allowed),
		"CapBnd":     fmt.Sprintf("%016x", allowed),
		"CapInh":     fmt.Sprintf("%016x", 0),
		"CapAmb":     fmt.Sprintf("%016x", 0),
	} {
		if got := status[field]; got != want {
			t.Errorf("%s is %q, want %q", field, got, want)
		}
	}
	score, err := os.ReadFile("/proc/" + strconv.Itoa(b.PID) + "/oom_score_adj")
	if err != nil || strings.TrimSpace(string(score)) != strconv.Itoa(oomScore) {
		t.Errorf("its OOM score is %s, %v", score, err)
	}
	inside := b.must("grep CapBnd /proc/self/status")
	if !strings.HasSuffix(inside, fmt.Sprintf("%016x", allowed)) {
		t.Errorf("a command has %s", inside)
	}
}

func TestSandboxRootIsNotTheNodesUser(t *testing.T) {
	b := open(t).boot(t, baseImage)
	uid, _, _ := strings.Cut(statusOf(t, b.PID)["Uid"], "\t")
	if uid == "0" || uid == strconv.Itoa(os.Getuid()) {
		t.Errorf("the sandbox's root is user %s of the host", uid)
	}
	for _, file := range []string{"uid_map", "gid_map"} {
		ids := strings.Fields(b.must("cat /proc/self/" + file))
		if len(ids) != 3 || ids[0] != "0" || ids[1] != "1" || ids[2] != "65535" {
			t.Errorf("%s is %v", file, ids)
		}
	}
}

func TestSandboxReachesOnlyItsLoopback(t *testing.T) {
	b := open(t).boot(t, baseImage)
	if devices := b.must("ls /sys/class/net"); devices != "lo" {
		t.Errorf("its network devices are %q", devices)
	}
	b.must(`python3 -c '
import socket
l = socket.create_server(("127.0.0.1", 80))
c = socket.create_connection(("localhost", 80), timeout=5)
s, _ = l.accept()
c.sendall(b"x")
assert s.recv(1) == b"x"'`)
	out, code := b.try(`python3 -c 'import socket; socket.create_connection(("192.0.2.1", 80), timeout=5)'`)
	if code == 0 || !strings.Contains(out, "unreachable") {
		t.Errorf("a connection to the outside: code %d, %s", code, out)
	}
}

func TestSandboxCannotAlterItsGuest(t *testing.T) {
	b := open(t).boot(t, baseImage)
	before := b.must("sha256sum " + guest.BinaryPath)
	for _, attempt := range []string{
		"echo x >>" + guest.BinaryPath,
		"rm " + guest.BinaryPath,
		"mv " + guest.BinaryPath + " /tmp/g",
		"ln -sf /bin/true " + guest.BinaryPath,
		"chmod 777 " + guest.BinaryPath,
		"mv /.doze/bin /.doze/b",
		"mv /.doze /d",
		"rm -rf /.doze/bin",
		"touch /.doze/x",
		"mkdir /.doze/bin/x",
		"umount " + guest.BinaryPath,
		"umount -l /.doze",
		"mount -o remount,rw,bind " + guest.BinaryPath,
		"mount -o bind /bin/true " + guest.BinaryPath,
		"unshare -m true",
		"nsenter -t 1 -m true",
		// The default seccomp profile allows namespaces of a sandbox's own. Without
		// CAP_SETFCAP it cannot be root there.
		"unshare -Urm true",
		"unshare -Um umount " + guest.BinaryPath,
	} {
		b.mustNot(attempt)
	}
	if after := b.must("sha256sum " + guest.BinaryPath); after != before {
		t.Error("the guest binary has changed")
	}
	for line := range strings.Lines(b.must("cat /proc/self/mountinfo")) {
		fields := strings.Fields(line)
		if fields[4] == guest.BinaryPath && !strings.HasPrefix(fields[5], "ro,nosuid,nodev") {
			t.Errorf("%s is mounted with %s", fields[4], fields[5])
		}
	}
}

func TestSandboxSeesNothingOfTheHost(t *testing.T) {
	n := open(t)
	b := n.boot(t, baseImage)
	for _, attempt := range []string{
		"ls " + n.dir,
		"ls " + os.Getenv("XDG_RUNTIME_DIR"),
		"echo 1 >/proc/sys/kernel/panic",
		"echo 1 >/proc/sys/vm/drop_caches",
		"echo x >/proc/sysrq-trigger",
		"echo 1 >/sys/fs/cgroup/cgroup.freeze",
		"mkdir /sys/fs/cgroup/x",
		"echo max >/sys/fs/cgroup/memory.max",
		"cat /proc/kcore",
		"dmesg",
		"mknod /tmp/sda b 8 0",
		"ls /dev/sda /dev/kvm /dev/net/tun",
	} {
		b.mustNot(attempt)
	}
	if processes := b.must("ls -d /proc/[0-9]* | wc -l"); processes > "9" || len(processes) > 1 {
		t.Errorf("it sees %s processes", processes)
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if name := b.must("cat /proc/sys/kernel/hostname"); name == host || name != "engine-test" {
		t.Errorf("its host name is %q", name)
	}
	if environment := b.must("env"); strings.Contains(environment, "DOZE_CGROUP") || !strings.Contains(environment, "DOZE_TEST=as asked") {
		t.Errorf("its environment is\n%s", environment)
	}
}

// everyImage has a libc and a shell, another libc, or nothing.
var everyImage = []string{baseImage, "localhost/doze/test-musl:latest", "localhost/doze/test-noshell:latest"}

// A sandbox writes only to its own disk, to bounded memory, and to its run folder.
func TestSandboxWritesToNoOtherFileOfTheHost(t *testing.T) {
	n := open(t)
	for _, image := range everyImage {
		b := n.boot(t, image)
		mounts, err := os.ReadFile("/proc/" + strconv.Itoa(b.PID) + "/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(mounts)) {
			before, after, _ := strings.Cut(line, " - ")
			fields, kind := strings.Fields(before), strings.Fields(after)[0]
			root, target, options := fields[3], fields[4], fields[5]
			switch {
			case strings.HasPrefix(options, "ro"), target == "/", target == "/dev/shm", target == guest.RunDir:
			case kind == "tmpfs" && root == "/", kind == "devtmpfs":
			case kind == "proc", kind == "sysfs", kind == "cgroup2", kind == "devpts", kind == "mqueue": // the kernel's
			default:
				t.Errorf("%s: it can write to %s", image, line)
			}
		}
	}
}

func TestSandboxHasHostsHostNameAndResolverOfItsOwn(t *testing.T) {
	n := open(t)
	for _, image := range everyImage {
		b := n.boot(t, image)
		for file, want := range map[string]string{
			"/etc/hosts":         "127.0.0.1 localhost engine-test\n::1 localhost\n",
			"/etc/hostname":      "engine-test\n",
			"/etc/resolv.conf":   "nameserver 198.18.0.1\nnameserver 198.18.0.53\noptions timeout:2 attempts:2\n",
			"/run/.containerenv": "",
		} {
			content, err := b.guest.ReadFile(testkit.Context(t), file, nil)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(content.Body)
			content.Body.Close()
			if err != nil || string(got) != want {
				t.Errorf("%s: %s is %q, %v; want %q", image, file, got, err, want)
			}
		}
		if image == baseImage {
			resolved := b.must("python3 -c 'from socket import *; print(gethostbyname(\"localhost\"), gethostbyname(gethostname()))'")
			if resolved != "127.0.0.1 127.0.0.1" {
				t.Errorf("localhost and its own name resolve to %s", resolved)
			}
		}
		if err := n.Remove(testkit.Context(t), b.spec.ID); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := os.ReadDir(filepath.Join(n.dir, "etc")); err != nil || len(left) > 0 {
		t.Errorf("files of removed sandboxes are left: %v, %v", left, err)
	}
}

// The bomb is bounded in time by its own command, and in number by RLIMIT_NPROC.
func TestForkBombStaysWithinTheLimit(t *testing.T) {
	n := open(t)
	b, other := n.boot(t, baseImage), n.boot(t, baseImage)
	_, _ = b.exec(guest.ExecRequest{Command: guest.Command{Argv: []string{"python3", "-c", bomb}}, Timeout: commandTimeout})
	out := b.must("cat /tmp/most")
	if count, err := strconv.Atoi(out); err != nil || int64(count) > limits.PIDs || int64(count) < limits.PIDs/2 {
		t.Errorf("it reached %q processes, limit %d", out, limits.PIDs)
	}
	other.must("true") // processes of the other sandbox are not counted
	testkit.Eventually(t, "the sandbox can start processes again", func() bool {
		_, code := b.try("true")
		return code == 0
	})
}

// bomb forks until that fails, writes the number of its children to /tmp/most, and ends.
const bomb = `
import os, signal
children = []
try:
    while len(children) < 5000:
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            signal.pause()
        children.append(pid)
except OSError:
    pass
open("/tmp/most", "w").write(str(len(children)))
for pid in children:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
`

// The kernel counts keyrings by user, and the sandboxes' users are the same.
func TestNoSandboxExhaustsTheKeyringsOfAnother(t *testing.T) {
	n := open(t)
	greedy := n.boot(t, baseImage)
	before := keyrings(t)
	if out := greedy.must("python3 -c '" + makeKeyrings + "'"); out != "38 38 38" { // ENOSYS
		t.Errorf("add_key, request_key and keyctl: errno %q, want 38 each", out)
	}
	if after := keyrings(t); after > before+100 { // other sandboxes may have started meanwhile
		t.Errorf("the users of sandboxes have %d keys, %d before", after, before)
	}
	n.boot(t, baseImage).must("true")
}

// makeKeyrings creates keyrings with each system call until that fails, and prints the errors.
const makeKeyrings = `
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
first = {"x86_64": 248, "aarch64": 217}[platform.machine()] # add_key, request_key, keyctl
def refused(call):
    for n in range(30000):
        ctypes.set_errno(0)
        if call(n) < 0:
            return str(ctypes.get_errno())
    return "none"
ring, mine = b"keyring", ctypes.c_int(-2)
print(refused(lambda n: libc.syscall(first, ring, b"%d" % n, None, 0, mine)),
      refused(lambda n: libc.syscall(first + 1, ring, b"%d" % n, None, mine)),
      refused(lambda n: libc.syscall(first + 2, 1, b"%d" % n)))
`

// keyrings counts the keys of the node user's sub-ids.
func keyrings(t *testing.T) (total int) {
	t.Helper()
	text, err := os.ReadFile("/proc/key-users")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line) // UID: usage nkeys/nikeys qnkeys/maxkeys qnbytes/maxbytes
		if len(fields) < 4 {
			t.Fatalf("unknown line %q", line)
		}
		count, _, _ := strings.Cut(fields[3], "/")
		n, err := strconv.Atoi(count)
		if err != nil {
			t.Fatalf("unknown line %q", line)
		}
		total += n
	}
	return total
}

func TestAptPipNpmAndGitWorkAsRoot(t *testing.T) {
	b := open(t).boot(t, baseImage)
	for _, command := range []string{
		"pwd | grep -x /workspace",
		"[ \"$LANG\" = C.UTF-8 ]",
		"mkdir -p /tmp/p/DEBIAN /tmp/p/opt && printf 'Package: p\\nVersion: 1\\nArchitecture: all\\nMaintainer: p <p@p>\\nDescription: p\\n' >/tmp/p/DEBIAN/control && touch /tmp/p/opt/f && dpkg-deb -b /tmp/p /tmp/p.deb && apt-get install -y /tmp/p.deb && apt-get remove -y p",
		"python3 -m venv /tmp/venv && /tmp/venv/bin/pip --version",
		"mkdir /tmp/n && cd /tmp/n && npm init -y && npm install --offline --no-audit",
		"git init /tmp/g && cd /tmp/g && git -c user.name=a -c user.email=a@b commit --allow-empty -m x",
		"useradd -m someone && runuser -u someone -- touch /home/someone/f && chown root /home/someone/f",
		"node -e 'require(\"http\").createServer().listen(443, () => process.exit(0))'",
	} {
		if out, code := b.try(command); code != 0 {
			t.Errorf("%s: code %d: %s", command, code, out)
		}
	}
}

// statusOf reads the fields of /proc/PID/status.
func statusOf(t testing.TB, pid int) map[string]string {
	t.Helper()
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		t.Fatal(err)
	}
	fields := make(map[string]string)
	for line := range strings.Lines(string(data)) {
		key, value, _ := strings.Cut(line, ":")
		fields[key] = strings.TrimSpace(value)
	}
	return fields
}
