//go:build integration

package podman

import (
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/podman/ociruntime"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// roomy are limits whose quotas of each kind a test reaches quickly.
var roomy = sandbox.Limits{PIDs: 256, Quotas: sandbox.Quotas{
	InotifyInstances: 40, InotifyWatches: 300, PendingSignals: 50, MessageQueueBytes: 200 << 10,
}}

// The kernel counts by user. A sandbox has 65,535 users, and all sandboxes of a node have the
// same ones.
func TestNoSandboxExhaustsTheQuotasOfAnother(t *testing.T) {
	for _, c := range []struct {
		kind string
		most int64 // of all users of a sandbox
	}{
		{"inotify_instance", roomy.InotifyInstances},
		{"inotify_watch", roomy.InotifyWatches},
		{"fanotify_group", maxFanotifyGroups},
		{"signal", roomy.PendingSignals},
		{"message_queue", 2}, // each uses 80 KiB
		{"process", roomy.PIDs + ownProcesses},
	} {
		t.Run(c.kind, func(t *testing.T) {
			n := open(t)
			greedy, other := n.bootWithin(t, baseImage, roomy), n.bootWithin(t, baseImage, roomy)
			other.write(t, "/tmp/acquire.py", acquireScript)
			greedy.write(t, "/tmp/acquire.py", acquireScript)
			for _, users := range []int{1, 8} {
				got := greedy.acquireAll(t, c.kind, users)
				if got > c.most || got < c.most/2 {
					t.Errorf("%d users acquired %d, the limit of the sandbox is %d", users, got, c.most)
				}
				if out, code := other.try("python3 /tmp/acquire.py " + c.kind + " 1 1"); out != "1" || code != 0 {
					t.Errorf("the other sandbox, in addition to %d users: %q, code %d", users, out, code)
				}
				greedy.must("read -r holders </tmp/holders; kill -KILL $holders")
				testkit.Eventually(t, "it has processes and queues again", func() bool {
					_, code := greedy.try("rm -f /dev/mqueue/*")
					return code == 0
				})
			}
		})
	}
}

// A size determines whether programs may create user namespaces, in which they have all
// capabilities.
func TestQuotaOfUserNamespacesDependsOnTheSize(t *testing.T) {
	n := open(t)
	b := n.bootWithin(t, baseImage, roomy)
	try := func(when string, most int) {
		t.Helper()
		for _, c := range []struct {
			name, program string
		}{
			{"unshare", nestUserNamespaces},
			{"clone", forkInUserNamespaces},
		} {
			// The kernel frees namespaces some time after their last process.
			testkit.Eventually(t, when+", by "+c.name, func() bool {
				out, code := b.exec(guest.ExecRequest{Command: guest.Command{Argv: []string{"python3", "-c", c.program}}, Timeout: commandTimeout})
				got, errno, _ := strings.Cut(strings.TrimSpace(out), " ")
				if n, err := strconv.Atoi(got); err != nil || n > most || errno != "28" || code != 0 { // ENOSPC
					t.Fatalf("%s, by %s: %q, want \"%d 28\"", when, c.name, out, most)
				}
				return got == strconv.Itoa(most)
			})
		}
	}
	try("without", 0)
	if err := n.Stop(testkit.Context(t), b.spec.ID, grace); err != nil {
		t.Fatal(err)
	}
	b.limits.UserNamespaces = 3
	b.start()
	try("with three", 3)
	testkit.Eventually(t, "a sandbox within the sandbox", func() bool {
		out, code := b.try("setpriv --reuid 1000 --regid 1000 --clear-groups unshare --user --map-root-user --mount --net --pid --fork --uts --ipc --cgroup " +
			"sh -c 'mount -t tmpfs none /mnt && echo mounted'")
		return out == "mounted" && code == 0
	})
	if err := n.Stop(testkit.Context(t), b.spec.ID, grace); err != nil {
		t.Fatal(err)
	}
	b.limits.UserNamespaces = 0
	b.start()
	try("without, again", 0)
}

// nestUserNamespaces creates each namespace inside the previous one, and prints their number
// and the error of the last attempt. It does not run as root, which may not map itself
// without CAP_SETFCAP.
const nestUserNamespaces = `
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
os.setgid(1000)
os.setuid(1000)
libc.prctl(4, 1) # it may write its uid_map
n = 0
while True:
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(0x10000000) != 0:
        break
    for name, text in ("uid_map", f"0 {uid} 1"), ("setgroups", "deny"), ("gid_map", f"0 {gid} 1"):
        with open(f"/proc/self/{name}", "w") as f:
            f.write(text)
    n += 1
print(n, ctypes.get_errno())
`

// forkInUserNamespaces creates each namespace with a process of its own, next to the others,
// and prints their number and the error of the last attempt.
const forkInUserNamespaces = `
import ctypes, os, platform, signal
libc = ctypes.CDLL(None, use_errno=True)
clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
children = []
while True:
    pid = libc.syscall(clone, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        signal.pause()
    if pid < 0:
        print(len(children), ctypes.get_errno())
        break
    children.append(pid)
for pid in children:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
`

// The kernel counts the pages of pipes by user, and the users of sandboxes are the same.
// packaging/host/setup lifts the limit.
func TestNoSandboxShrinksThePipesOfAnother(t *testing.T) {
	n := open(t)
	greedy, other := n.boot(t, baseImage), n.boot(t, baseImage)
	greedy.must("setsid python3 -c '" + `
import os, signal
pipes = [os.pipe() for _ in range(3000)]
open("/tmp/acquired", "w").write("all")
signal.alarm(60)
signal.pause()
` + "' >/dev/null 2>&1 </dev/null & until [ -s /tmp/acquired ]; do sleep 0.01; done")
	if out := other.must("python3 -c 'import fcntl, os; print(fcntl.fcntl(os.pipe()[0], fcntl.F_GETPIPE_SZ))'"); out != "65536" {
		t.Errorf("a pipe of the other sandbox holds %s bytes, want 65536", out)
	}
}

// The kernel counts asynchronous I/O for the whole machine. packaging/host/setup raises the
// limit.
func TestNoSandboxExhaustsTheAsynchronousIOOfAnother(t *testing.T) {
	n := open(t)
	greedy, other := n.boot(t, baseImage), n.boot(t, baseImage)
	const program = `
import ctypes, platform, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
setup = {"x86_64": 206, "aarch64": 0}[platform.machine()]
made, want = 0, int(sys.argv[1])
while made < want and libc.syscall(setup, 1000, ctypes.byref(ctypes.c_ulong())) == 0:
    made += 1
print(made, flush=True)
if want > 1:
    signal.alarm(60)
    signal.pause()
`
	for _, b := range []*box{greedy, other} {
		b.write(t, "/tmp/aio.py", program)
	}
	// 100,000, of 65,536 by the kernel's default.
	greedy.must("setsid python3 /tmp/aio.py 100 >/tmp/acquired 2>&1 </dev/null & until [ -s /tmp/acquired ]; do sleep 0.01; done")
	if out := other.must("python3 /tmp/aio.py 1"); out != "1" {
		t.Errorf("the other sandbox made %s contexts, want 1", out)
	}
}

func TestSandboxHasItsOwnTerminals(t *testing.T) {
	n := open(t)
	b := n.boot(t, baseImage)
	out := b.must("python3 -c '" + `
import os
n, fds = 0, []
try:
    while n < 1000:
        fds.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
        n += 1
except OSError as e:
    print(n, e.errno)
` + "'")
	if want := fmt.Sprintf("%d 28", maxTerminals); out != want {
		t.Errorf("it opened %s terminals, want %s", out, want)
	}
	b.must("script -qec true /dev/null")
}

// The service of an earlier node without quotas would start sandboxes without them.
func TestServiceOfAnEarlierNodeIsReplaced(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "podman.sock")
	earlier := exec.Command("podman", "--cgroup-manager=cgroupfs", "system", "service", "--time=0", "unix://"+socket)
	if err := earlier.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = earlier.Wait()
	}()
	t.Cleanup(func() {
		_ = earlier.Process.Kill()
		<-ended
	})
	testkit.Eventually(t, "the service responds", func() bool {
		conn, err := dial(t.Context(), socket, testkit.Patience)
		if err == nil {
			conn.close()
		}
		return err == nil
	})
	n := openIn(t, dir, string(sandbox.NewID()))
	testkit.Eventually(t, "the earlier service has ended", func() bool {
		select {
		case <-ended:
			return true
		default:
			return false
		}
	})
	if path := n.service.runtime; path != filepath.Join(dir, ociruntime.Name) {
		t.Errorf("its OCI runtime is %s", path)
	}
	b := n.bootWithin(t, baseImage, roomy)
	if out := b.must("python3 -c 'import ctypes; l = ctypes.CDLL(None); print(sum(l.inotify_init1(0) >= 0 for _ in range(1000)))'"); out != "40" {
		t.Errorf("a sandbox has %s inotify instances, want 40", out)
	}
}

// acquireAll acquires as much as that many users of the sandbox can, and holds it. It returns
// the amount.
func (b *box) acquireAll(t testing.TB, kind string, users int) int64 {
	t.Helper()
	b.must(fmt.Sprintf("rm -f /tmp/acquired; setsid python3 /tmp/acquire.py %s %d 600000 >/tmp/output 2>&1 </dev/null &", kind, users))
	var got int64
	testkit.Eventually(t, "the script has acquired all that it can", func() bool {
		content, err := b.guest.ReadFile(testkit.Context(t), "/tmp/acquired", nil)
		if err != nil {
			return false
		}
		defer content.Body.Close()
		text, err := io.ReadAll(content.Body)
		if err != nil {
			return false
		}
		got, err = strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		return err == nil
	})
	return got
}

// write writes a file of the sandbox.
func (b *box) write(t testing.TB, path, content string) {
	t.Helper()
	if out, code := b.exec(guest.ExecRequest{Command: guest.Command{Argv: []string{"/bin/sh", "-c", `printf %s "$1" >"$2"`, "-", content, path}}, Timeout: commandTimeout}); code != 0 {
		t.Fatalf("write %s: %s", path, out)
	}
}

// acquireScript is called with a kind of resource, a number of users, and how much each wants.
// If each wants 1, it prints how much it acquired and ends. Otherwise it acquires until it is
// refused for every user, writes the total to /tmp/acquired and its process ids to /tmp/holders,
// and waits.
const acquireScript = `
import ctypes, os, resource, signal, sys, tempfile
kind, users, want = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
files = tempfile.mkdtemp()
os.chmod(files, 0o755)
if kind == "inotify_watch" and want > 1:
    for n in range(8000):
        open(f"{files}/{n}", "w").close()
else:
    open(f"{files}/0", "w").close()
children = []

def one(n):
    "acquires one more, and returns whether that succeeded"
    if kind == "inotify_instance":
        return libc.inotify_init1(0) >= 0
    if kind == "inotify_watch":
        global instance
        if n % 8000 == 0:
            instance = libc.inotify_init1(0)
        return libc.inotify_add_watch(instance, f"{files}/{n % 8000}".encode(), 2) >= 0
    if kind == "fanotify_group":
        return libc.fanotify_init(0x200, 0) >= 0 # FAN_REPORT_FID, without which it takes privileges
    if kind == "signal":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
        return libc.sigqueue(os.getpid(), signal.SIGRTMIN, ctypes.c_void_p(n)) == 0
    if kind == "message_queue":
        name = f"/{os.getpid()}.{n}".encode()
        got = libc.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, None) >= 0
        if want == 1:
            libc.mq_unlink(name)
        return got
    if kind == "process":
        if n == 3000:
            return False
        try:
            pid = os.fork()
        except OSError:
            return False
        if pid == 0:
            signal.alarm(60)
            signal.pause()
            os._exit(0)
        children.append(pid)
        return True

def all(user):
    if user:
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    n = 0
    while n < want and one(n):
        n += 1
    for pid in children[-8:] if want > 1 else []: # the sandbox needs some for its commands
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        children.remove(pid)
        n -= 1
    return n

if want == 1:
    print(all(0))
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    sys.exit()
holders, total = [], 0
for user in range(users):
    r, w = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        got = all(1000 + user if user else 0)
        os.write(w, f"{got} {' '.join(map(str, children))}".encode())
        os.close(w)
        signal.alarm(60)
        signal.pause()
        os._exit(0)
    os.close(w)
    got, *more = map(int, os.read(r, 1 << 16).split())
    os.close(r)
    holders += [pid, *more]
    total += got
with open("/tmp/holders", "w") as f:
    print(*holders, os.getpid(), file=f)
with open("/tmp/acquired.new", "w") as f:
    print(total, file=f)
os.rename("/tmp/acquired.new", "/tmp/acquired")
signal.alarm(60)
signal.pause()
`
