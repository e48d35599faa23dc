package doctor_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/doctor"
	"github.com/doze-run/doze/testkit"
)

// host is a Host whose files are below a temporary folder.
type host struct {
	root   string
	uid    int
	output map[string]string // by command with its arguments
	fails  map[string]error  // by command with its arguments
	denied map[string]bool   // paths to which access is denied
	listen map[int]error
	free   uint64
	files  uint64
	// seccomp is the result of SuspendSeccomp.
	seccomp error
}

func (h *host) UID() int                              { return h.uid }
func (h *host) at(path string) string                 { return filepath.Join(h.root, path) }
func (h *host) ReadFile(path string) ([]byte, error)  { return os.ReadFile(h.at(path)) }
func (h *host) Stat(path string) (fs.FileInfo, error) { return os.Stat(h.at(path)) }
func (h *host) Listen(port int) error                 { return h.listen[port] }
func (h *host) Free(string) (uint64, error)           { return h.free, nil }
func (h *host) OpenFiles() (uint64, error)            { return h.files, nil }
func (h *host) SuspendSeccomp() error                 { return h.seccomp }

func (h *host) Access(path string, _ uint32) error {
	if h.denied[path] {
		return unix.EACCES
	}
	_, err := h.Stat(path)
	return err
}

func (h *host) OpenDevice(path string) error { return h.Access(path, 0) }

func (h *host) Find(command string) (string, error) {
	path := "/usr/bin/" + command
	_, err := h.Stat(path)
	return path, err
}

func (h *host) Run(_ context.Context, command string, args ...string) (string, error) {
	line := strings.Join(append([]string{command}, args...), " ")
	out, ok := h.output[line]
	switch err := h.fails[line]; {
	case err != nil:
		return out, err
	case !ok:
		return "", fmt.Errorf("%s: exit status 125", line)
	}
	return out, nil
}

func (h *host) write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(h.at(path)), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(h.at(path), []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
}

func (h *host) remove(t *testing.T, path string) {
	t.Helper()
	if err := os.RemoveAll(h.at(path)); err != nil {
		t.Fatal(err)
	}
}

const podmanInfo = "/usr/bin/podman info --format {{.Store.GraphDriverName}}"

const (
	checkpointCommand = "/usr/bin/podman --log-level=error container checkpoint .doctor"
	crunCheckpoint    = "/usr/bin/crun checkpoint --help"
	criuCheck         = `/usr/bin/podman unshare -- sh -c exec "$0" check 2>&1 /usr/bin/criu`
)

const networkCheck = "/usr/bin/podman unshare -- /usr/bin/doze-netns check"

// healthyHost returns a host on which every check passes.
func healthyHost(t *testing.T) (*host, doctor.Config) {
	h := &host{
		root:   t.TempDir(),
		uid:    999,
		output: map[string]string{"/usr/bin/podman --version": "podman version 5.4.2\n", podmanInfo: "overlay\n", networkCheck: ""},
		fails:  map[string]error{},
		denied: map[string]bool{},
		listen: map[int]error{},
		free:   100 << 30,
		files:  65536,
	}
	for path, text := range map[string]string{
		"/proc/sys/user/max_user_namespaces":                   "96365\n",
		"/proc/sys/fs/inotify/max_user_instances":              "8192\n",
		"/proc/sys/fs/epoll/max_user_watches":                  "1099511627776\n",
		"/proc/sys/fs/aio-max-nr":                              "1099511627776\n",
		"/proc/sys/fs/file-max":                                "9223372036854775807\n",
		"/proc/sys/fs/pipe-user-pages-soft":                    "0\n",
		"/proc/sys/kernel/keys/maxkeys":                        "20000\n",
		"/proc/cgroups":                                        "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t0\t1\t1\nmemory\t0\t1\t1\npids\t0\t1\t1\n",
		"/etc/subuid":                                          "someone:100000:65536\ndoze:165536:65536\n",
		"/etc/subgid":                                          "someone:100000:65536\n999:165536:65536\n",
		"/run/doze/.keep":                                      "",
		"/sys/fs/cgroup/doze/cgroup.controllers":               "cpu memory pids\n",
		"/sys/fs/cgroup/doze/cgroup.procs":                     "",
		"/sys/fs/cgroup/doze/cgroup.freeze":                    "0\n",
		"/sys/fs/cgroup/doze/cgroup.subtree_control":           "cpu memory pids\n",
		"/sys/fs/cgroup/doze/sandboxes/cgroup.subtree_control": "cpu memory pids\n",
		"/sys/fs/cgroup/doze/sandboxes/memory.reclaim":         "",
		"/sys/fs/cgroup/doze/memory.swap.max":                  "max\n",
		"/proc/meminfo":                                        "MemTotal:        8388608 kB\nSwapTotal:       4194304 kB\n",
		"/proc/pressure/memory":                                "some avg10=0.00 avg60=0.00 avg300=0.00 total=12\n",
		"/dev/net/tun":                                         "",
		"/dev/fuse":                                            "",
		"/usr/bin/podman":                                      "",
		"/usr/bin/crun":                                        "",
		"/usr/bin/conmon":                                      "",
		"/usr/bin/nsenter":                                     "",
		"/usr/bin/newuidmap":                                   "",
		"/usr/bin/newgidmap":                                   "",
	} {
		h.write(t, path, text)
	}
	for _, path := range []string{"/usr/bin/newuidmap", "/usr/bin/newgidmap"} {
		if err := os.Chmod(h.at(path), 0o755|fs.ModeSetuid); err != nil {
			t.Fatal(err)
		}
	}
	return h, doctor.Config{
		User:        "doze",
		Home:        "/var/lib/doze",
		Cgroup:      "/sys/fs/cgroup/doze",
		RuntimeDir:  "/run/doze",
		NetnsHelper: "/usr/bin/doze-netns",
		Ports:       []int{8443},
		Host:        h,
	}
}

func TestAllChecksPassOnAHealthyHost(t *testing.T) {
	_, cfg := healthyHost(t)
	findings := doctor.Check(t.Context(), cfg)
	for _, f := range findings {
		if !f.OK || f.Remedy != "" || f.Detail == "" || f.Name == "" || f.Level == "" {
			t.Errorf("%+v", f)
		}
	}
	if !doctor.CanRun(findings) {
		t.Error("it cannot run")
	}
}

func TestEachFaultIsFoundWithItsRemedy(t *testing.T) {
	for _, c := range []struct {
		fault  string
		make   func(*testing.T, *host, *doctor.Config)
		name   string // of the check that fails
		level  doctor.Level
		remedy string // part of it
		others bool   // other checks fail too
	}{
		{"root", func(_ *testing.T, h *host, _ *doctor.Config) { h.uid = 0 },
			"user", doctor.LevelError, "packaging/host/enter -- doze run", true},
		{"user namespaces switched off", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/proc/sys/kernel/unprivileged_userns_clone", "0\n")
		}, "user namespaces", doctor.LevelError, "sysctl -w kernel.unprivileged_userns_clone=1", false},
		{"no user namespace allowed", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/proc/sys/user/max_user_namespaces", "0\n")
		}, "user namespaces", doctor.LevelError, "sysctl -w user.max_user_namespaces=", false},
		{"a kernel without user namespaces", func(t *testing.T, h *host, _ *doctor.Config) {
			h.remove(t, "/proc/sys/user")
		}, "user namespaces", doctor.LevelError, "CONFIG_USER_NS", false},
		{"AppArmor without a profile", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1\n")
		}, "apparmor", doctor.LevelError, "kernel.apparmor_restrict_unprivileged_userns=0", false},
		{"no sub-uids", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/etc/subuid", "someone:100000:65536\n")
		}, "sub-uids", doctor.LevelError, "usermod --add-subuids", false},
		{"a short range of sub-uids", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/etc/subuid", "doze:100000:65535\ndoze:300000:1\n")
		}, "sub-uids", doctor.LevelError, "65536", false},
		{"no /etc/subgid", func(t *testing.T, h *host, _ *doctor.Config) { h.remove(t, "/etc/subgid") },
			"sub-gids", doctor.LevelError, "usermod --add-subgids", false},
		{"no newuidmap", func(t *testing.T, h *host, _ *doctor.Config) { h.remove(t, "/usr/bin/newuidmap") },
			"newuidmap", doctor.LevelError, "apt-get install uidmap", false},
		{"newgidmap without its bit", func(t *testing.T, h *host, _ *doctor.Config) {
			if err := os.Chmod(h.at("/usr/bin/newgidmap"), 0o755); err != nil {
				t.Fatal(err)
			}
		}, "newuidmap", doctor.LevelError, "chmod u+s /usr/bin/newgidmap", false},
		{"no XDG_RUNTIME_DIR folder", func(t *testing.T, h *host, _ *doctor.Config) { h.remove(t, "/run/doze") },
			"runtime folder", doctor.LevelError, "install -d -m 0700 -o doze /run/doze", false},
		{"another user's XDG_RUNTIME_DIR", func(_ *testing.T, h *host, _ *doctor.Config) { h.denied["/run/doze"] = true },
			"runtime folder", doctor.LevelError, "install -d", false},
		{"no subtree", func(_ *testing.T, _ *host, cfg *doctor.Config) { cfg.Cgroup = "-" },
			"cgroup", doctor.LevelError, "packaging/host/enter", true},
		{"cgroup v1", func(t *testing.T, h *host, _ *doctor.Config) { h.remove(t, "/sys/fs/cgroup/doze/cgroup.controllers") },
			"cgroup", doctor.LevelError, "packaging/host/enter", false},
		{"a subtree owned by root", func(_ *testing.T, h *host, _ *doctor.Config) { h.denied["/sys/fs/cgroup/doze/cgroup.procs"] = true },
			"cgroup", doctor.LevelError, "packaging/doze.service", false},
		{"no freezer", func(t *testing.T, h *host, _ *doctor.Config) { h.remove(t, "/sys/fs/cgroup/doze/cgroup.freeze") },
			"cgroup", doctor.LevelError, "Linux 5.2", false},
		{"controllers not delegated", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/sys/fs/cgroup/doze/sandboxes/cgroup.subtree_control", "cpu\n")
		}, "limits", doctor.LevelWarning, "Delegate=yes", true},
		{"controllers in cgroup v1", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/sys/fs/cgroup/doze/sandboxes/cgroup.subtree_control", "")
			h.write(t, "/proc/cgroups", "cpu\t1\t1\t1\nmemory\t4\t1\t1\npids\t8\t1\t1\n")
		}, "limits", doctor.LevelWarning, "cgroup v1 holds cpu, memory, pids", true},
		{"no memory controller", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/sys/fs/cgroup/doze/sandboxes/cgroup.subtree_control", "cpu pids\n")
		}, "memory reclaim", doctor.LevelWarning, "see limits", true},
		{"a kernel without memory.reclaim", func(t *testing.T, h *host, _ *doctor.Config) {
			h.remove(t, "/sys/fs/cgroup/doze/sandboxes/memory.reclaim")
		}, "memory reclaim", doctor.LevelWarning, "Linux 5.19", false},
		{"a kernel without memory.reclaim, before the first start", func(t *testing.T, h *host, _ *doctor.Config) {
			h.remove(t, "/sys/fs/cgroup/doze/sandboxes")
		}, "memory reclaim", doctor.LevelWarning, "Linux 5.19", false},
		{"no swap", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/proc/meminfo", "MemTotal: 8388608 kB\nSwapTotal: 0 kB\n")
		}, "memory reclaim", doctor.LevelWarning, "zram", false},
		{"a kernel without swap", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/proc/meminfo", "MemTotal: 8388608 kB\n")
		}, "memory reclaim", doctor.LevelWarning, "zram", false},
		{"no swap for the unit", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/sys/fs/cgroup/doze/memory.swap.max", "0\n")
		}, "memory reclaim", doctor.LevelWarning, "MemorySwapMax=infinity", false},
		{"a kernel without PSI", func(t *testing.T, h *host, _ *doctor.Config) {
			h.remove(t, "/proc/pressure")
		}, "memory pressure", doctor.LevelWarning, "psi=1", false},
		{"no podman", func(t *testing.T, h *host, _ *doctor.Config) { h.remove(t, "/usr/bin/podman") },
			"podman", doctor.LevelError, "apt-get install podman", true},
		{"an old podman", func(_ *testing.T, h *host, _ *doctor.Config) {
			h.output["/usr/bin/podman --version"] = "podman version 3.4.4\n"
		}, "podman", doctor.LevelError, "upgrade", false},
		{"a podman that does not run", func(_ *testing.T, h *host, _ *doctor.Config) { delete(h.output, "/usr/bin/podman --version") },
			"podman", doctor.LevelError, "podman --version", false},
		{"no conmon", func(t *testing.T, h *host, _ *doctor.Config) { h.remove(t, "/usr/bin/conmon") },
			"programs", doctor.LevelError, "apt-get install", false},
		{"storage vfs", func(_ *testing.T, h *host, _ *doctor.Config) { h.output[podmanInfo] = "vfs\n" },
			"storage", doctor.LevelWarning, `driver = "overlay"`, false},
		{"rootless podman fails", func(_ *testing.T, h *host, _ *doctor.Config) { delete(h.output, podmanInfo) },
			"storage", doctor.LevelError, "podman info", false},
		{"no TUN device", func(t *testing.T, h *host, _ *doctor.Config) { h.remove(t, "/dev/net/tun") },
			"tun", doctor.LevelError, "modprobe tun", false},
		{"no FUSE device", func(t *testing.T, h *host, _ *doctor.Config) { h.remove(t, "/dev/fuse") },
			"fuse", doctor.LevelWarning, "modprobe fuse", true},
		{"a FUSE device for root", func(_ *testing.T, h *host, _ *doctor.Config) { h.denied["/dev/fuse"] = true },
			"fuse", doctor.LevelWarning, "chmod 0666 /dev/fuse", true},
		{"a TUN device for root", func(_ *testing.T, h *host, _ *doctor.Config) { h.denied["/dev/net/tun"] = true },
			"tun", doctor.LevelError, "chmod 0666 /dev/net/tun", false},
		{"a kernel without tproxy", func(_ *testing.T, h *host, _ *doctor.Config) { delete(h.output, networkCheck) },
			"network", doctor.LevelError, "modprobe -a nf_tables nft_tproxy", false},
		{"little disk", func(_ *testing.T, h *host, _ *doctor.Config) { h.free = 2 << 30 },
			"disk", doctor.LevelWarning, "DOZE_HOME", false},
		{"no disk", func(_ *testing.T, h *host, _ *doctor.Config) { h.free = 100 << 20 },
			"disk", doctor.LevelError, "DOZE_HOME", false},
		{"few inotify instances", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/proc/sys/fs/inotify/max_user_instances", "128\n")
		}, "inotify", doctor.LevelWarning, "sysctl -w fs.inotify.max_user_instances=8192", false},
		{"few epoll watches", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/proc/sys/fs/epoll/max_user_watches", "5491511\n")
		}, "shared limits", doctor.LevelWarning, "sysctl -w fs.epoll.max_user_watches=1099511627776", false},
		{"little asynchronous I/O", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/proc/sys/fs/aio-max-nr", "65536\n")
		}, "shared limits", doctor.LevelWarning, "sysctl -w fs.aio-max-nr=1099511627776", false},
		{"few open files of the machine", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/proc/sys/fs/file-max", "2466170\n")
		}, "shared limits", doctor.LevelWarning, "sysctl -w fs.file-max=1099511627776", false},
		{"few pages for pipes", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/proc/sys/fs/pipe-user-pages-soft", "16384\n")
		}, "pipes", doctor.LevelWarning, "sysctl -w fs.pipe-user-pages-soft=0", false},
		{"few keyrings", func(t *testing.T, h *host, _ *doctor.Config) {
			h.write(t, "/proc/sys/kernel/keys/maxkeys", "200\n")
		}, "keyrings", doctor.LevelWarning, "sysctl -w kernel.keys.maxkeys=", false},
		{"few descriptors", func(_ *testing.T, h *host, _ *doctor.Config) { h.files = 1024 },
			"open files", doctor.LevelWarning, "LimitNOFILE", false},
		{"a port in use", func(_ *testing.T, h *host, _ *doctor.Config) {
			h.listen[8443] = &net.OpError{Op: "listen", Err: os.NewSyscallError("bind", syscall.EADDRINUSE)}
		}, "port 8443", doctor.LevelError, "ss -ltnp 'sport = :8443'", false},
		{"a privileged port", func(_ *testing.T, h *host, cfg *doctor.Config) {
			cfg.Ports = []int{443}
			h.listen[443] = &net.OpError{Op: "listen", Err: os.NewSyscallError("bind", syscall.EACCES)}
		}, "port 443", doctor.LevelError, "net.ipv4.ip_unprivileged_port_start=443", false},
	} {
		t.Run(c.fault, func(t *testing.T) {
			h, cfg := healthyHost(t)
			c.make(t, h, &cfg)
			findings := doctor.Check(t.Context(), cfg)
			found := false
			for _, f := range findings {
				if f.OK {
					continue
				}
				if f.Remedy == "" || f.Detail == "" {
					t.Errorf("without a remedy: %+v", f)
				}
				switch {
				case f.Name != c.name:
					if !c.others {
						t.Errorf("another check failed: %+v", f)
					}
				case f.Level != c.level || !strings.Contains(f.Remedy, c.remedy):
					t.Errorf("got %+v; want level %s and a remedy with %q", f, c.level, c.remedy)
				default:
					found = true
				}
			}
			if !found {
				t.Error("not found")
			}
			if got, want := doctor.CanRun(findings), c.level != doctor.LevelError; got != want {
				t.Errorf("CanRun is %v", got)
			}
		})
	}
}

// A node asks Podman for its storage once, and reports the driver itself.
func TestStorageIsCheckedByTheCaller(t *testing.T) {
	for _, driver := range []string{"overlay", "vfs"} {
		h, cfg := healthyHost(t)
		h.output[podmanInfo] = driver + "\n"
		all := doctor.Check(t.Context(), cfg)
		at := slices.IndexFunc(all, func(f doctor.Finding) bool { return f.Name == "storage" })
		if diff := cmp.Diff(all[at], doctor.StorageDriver(driver)); diff != "" {
			t.Errorf("the caller's finding for %s (-check +caller):\n%s", driver, diff)
		}
		delete(h.output, podmanInfo)
		cfg.WithoutStorage = true
		if diff := cmp.Diff(slices.Delete(all, at, at+1), doctor.Check(t.Context(), cfg)); diff != "" {
			t.Errorf("the other checks (-with +without the storage):\n%s", diff)
		}
	}
}

func TestWithoutASubtreeSandboxesStillRun(t *testing.T) {
	_, cfg := healthyHost(t)
	t.Setenv("DOZE_CGROUP", "")
	cfg.Cgroup = ""
	findings := doctor.Check(t.Context(), cfg)
	failures := 0
	for _, f := range findings {
		if !f.OK {
			failures++
		}
	}
	if failures != 3 || !doctor.CanRun(findings) { // no freezer, no limits, no reclaim
		t.Errorf("%+v", findings)
	}
}

func TestAppArmorProfileOfUbuntuPasses(t *testing.T) {
	h, cfg := healthyHost(t)
	h.write(t, "/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1\n")
	h.write(t, "/etc/apparmor.d/podman", "profile podman /usr/bin/podman flags=(unconfined) {\n  userns,\n}\n")
	if findings := doctor.Check(t.Context(), cfg); !doctor.CanRun(findings) {
		t.Errorf("%+v", findings)
	}
}

func TestChecksThatNeedPodmanNameItAsMissing(t *testing.T) {
	h, cfg := healthyHost(t)
	h.remove(t, "/usr/bin/podman")
	for _, f := range doctor.Check(t.Context(), cfg) {
		if !f.OK && (f.Detail != "podman is missing" || !strings.Contains(f.Remedy, "podman")) {
			t.Errorf("%+v", f)
		}
	}
}

// Podman starts processes that may outlive it with its output open.
func TestRunEndsWithItsContextAlthoughAProcessHasItsOutput(t *testing.T) {
	dir := t.TempDir()
	end, started := filepath.Join(dir, "end"), filepath.Join(dir, "started")
	if err := unix.Mkfifo(end, 0o600); err != nil {
		t.Fatal(err)
	}
	// A writer for the pipe ends the process.
	defer func() {
		if f, err := os.OpenFile(end, os.O_WRONLY|unix.O_NONBLOCK, 0); err == nil {
			f.Close()
		}
	}()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := doctor.Machine{}.Run(ctx, "sh", "-c", `cat "$1" & : >"$2"; wait`, "sh", end, started)
		ended <- err
	}()
	testkit.Eventually(t, "the process is started", func() bool { _, err := os.Stat(started); return err == nil })
	cancel()
	if err := testkit.Receive(t, "the end of the command", ended); err == nil {
		t.Error("the command that was killed succeeded")
	}
}

// TestMachine checks facts that hold on any machine.
func TestMachine(t *testing.T) {
	m := doctor.Machine{}
	if _, err := m.Find("no-such-command"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Find: %v", err)
	}
	if path, err := m.Find("sh"); err != nil || !strings.HasSuffix(path, "/sh") {
		t.Errorf("Find: %q, %v", path, err)
	}
	if out, err := m.Run(t.Context(), "echo", "knock"); err != nil || out != "knock\n" {
		t.Errorf("Run: %q, %v", out, err)
	}
	if _, err := m.Run(t.Context(), "sh", "-c", "echo why >&2; exit 3"); err == nil || !strings.Contains(err.Error(), "why") {
		t.Errorf("Run: %v", err)
	}
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := m.Listen(l.Addr().(*net.TCPAddr).Port); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("Listen: %v", err)
	}
	if free, err := m.Free(filepath.Join(t.TempDir(), "not", "yet", "there")); err != nil || free == 0 {
		t.Errorf("Free: %d, %v", free, err)
	}
	if n, err := m.OpenFiles(); err != nil || n == 0 {
		t.Errorf("OpenFiles: %d, %v", n, err)
	}
}

// The kernel's conditions are in check_ptrace_options of kernel/ptrace.c.
func TestOnlyAdministratorsOfTheHostSuspendSeccompFilters(t *testing.T) {
	err := doctor.Machine{}.SuspendSeccomp()
	if left := tracedProcesses(t); len(left) > 0 {
		t.Errorf("it left processes: %q", left)
	}
	if errors.Is(err, doctor.ErrUntraced) {
		t.Skipf("this host denies tracing: %v", err)
	}
	var want error
	if !administersHost(t) {
		want = syscall.EPERM
	}
	// This file exists with CONFIG_CHECKPOINT_RESTORE only, but may be hidden.
	withoutOption := !exists("/proc/sys/kernel/ns_last_pid") && errors.Is(err, syscall.EINVAL)
	if !errors.Is(err, want) && !withoutOption {
		t.Errorf("got %v, want %v", err, want)
	}
}

// tracedProcesses returns the lines of /proc of children that run /proc/self/exe, zombies included.
func tracedProcesses(t *testing.T) (lines []string) {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		line, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		_, rest, ok := strings.Cut(string(line), " (exe) ") // then its state and its parent
		if fields := strings.Fields(rest); ok && len(fields) > 1 && fields[1] == strconv.Itoa(os.Getpid()) {
			lines = append(lines, string(line))
		}
	}
	return lines
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// administersHost reports whether this process has CAP_SYS_ADMIN in the initial user namespace,
// and no seccomp filter.
func administersHost(t *testing.T) bool {
	t.Helper()
	ids, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	var capabilities, filter uint64
	for line := range strings.Lines(string(text)) {
		for key, value := range map[string]*uint64{"CapEff:": &capabilities, "Seccomp:": &filter} {
			if hex, ok := strings.CutPrefix(line, key); ok {
				if *value, err = strconv.ParseUint(strings.TrimSpace(hex), 16, 64); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	initial := slices.Equal(strings.Fields(string(ids)), []string{"0", "0", "4294967295"})
	return initial && filter == 0 && capabilities&(1<<unix.CAP_SYS_ADMIN) != 0
}

func TestDiskLimitsAreDescribed(t *testing.T) {
	const root = "1 0 8:1 / / rw - ext4 /dev/a rw\n"
	for name, c := range map[string]struct{ mounts, want string }{
		"unknown":  {"", "no project quotas: rootless podman cannot set them"},
		"none":     {root, "no project quotas: ext4 is mounted without prjquota"},
		"prepared": {root + "2 1 8:2 / /var/lib rw - xfs /dev/b rw,prjquota\n", "xfs has project quotas, which rootless podman cannot set"},
		"another":  {root + "2 1 8:2 / /var/lib/doz rw - xfs /dev/b rw,prjquota\n", "no project quotas: ext4"},
		"hidden":   {root + "2 1 8:2 / /var/lib/doze rw - xfs /dev/b rw,prjquota\n3 2 8:3 / /var/lib/doze rw shared:1 - btrfs /dev/c rw\n", "no project quotas: btrfs"},
	} {
		h, cfg := healthyHost(t)
		h.write(t, "/proc/self/mountinfo", c.mounts)
		all := doctor.Check(t.Context(), cfg)
		f := all[slices.IndexFunc(all, func(f doctor.Finding) bool { return f.Name == "disk limits" })]
		if !f.OK || !strings.HasPrefix(f.Detail, "measured ") || !strings.Contains(f.Detail, c.want) {
			t.Errorf("%s: %+v; want %q", name, f, c.want)
		}
	}
}

// The messages are from Debian 12 and 13.
func TestEachObstacleToCheckpointsIsReported(t *testing.T) {
	const prefix = "a reboot ends the memory of sandboxes: "
	permits := func(t *testing.T, h *host) {
		h.fails[checkpointCommand] = errors.New(`exit status 125: Error: no container with name or ID ".doctor" found`)
		h.output[crunCheckpoint] = "Usage: crun [OPTION...] checkpoint CONTAINER\n"
		h.write(t, "/usr/bin/criu", "")
		h.output["/usr/bin/criu --version"] = "Version: 4.1.1\n"
		h.output[criuCheck] = "Looks good.\n"
	}
	exit := errors.New("exit status 1")
	for name, c := range map[string]struct {
		make func(*testing.T, *host)
		want string
	}{
		"none": {func(*testing.T, *host) {}, "doze takes no checkpoints, although this host seems to permit them"},
		"unprivileged": {func(_ *testing.T, h *host) { h.seccomp = os.NewSyscallError("ptrace", syscall.EPERM) },
			"the kernel suspends their seccomp filters, as CRIU requires, only with CAP_SYS_ADMIN on the host"},
		"a kernel without checkpoints": {func(_ *testing.T, h *host) { h.seccomp = os.NewSyscallError("ptrace", syscall.EINVAL) },
			"the kernel has no CONFIG_CHECKPOINT_RESTORE"},
		"no tracing": {func(_ *testing.T, h *host) {
			h.seccomp = fmt.Errorf("%w: it did not stop: status 0x100", doctor.ErrUntraced)
		},
			"the kernel may not suspend their seccomp filters: trace a process: it did not stop: status 0x100"},
		"tracing denied": {func(_ *testing.T, h *host) { h.seccomp = fmt.Errorf("%w: %w", doctor.ErrUntraced, syscall.EPERM) },
			"the kernel may not suspend their seccomp filters: trace a process: operation not permitted"},
		"podman refuses": {func(_ *testing.T, h *host) {
			h.fails[checkpointCommand] = errors.New("exit status 125: Error: checkpointing a container requires root")
		}, "podman refuses: checkpointing a container requires root"},
		"podman fails": {func(_ *testing.T, h *host) { h.fails[checkpointCommand] = errors.New("signal: killed") },
			"podman refuses: signal: killed"},
		"no podman": {func(t *testing.T, h *host) { h.remove(t, "/usr/bin/podman") }, "podman is missing"},
		"crun without CRIU": {func(_ *testing.T, h *host) { delete(h.output, crunCheckpoint) },
			"crun is built without CRIU"},
		"no crun": {func(t *testing.T, h *host) { h.remove(t, "/usr/bin/crun") }, "crun is missing"},
		"no CRIU": {func(t *testing.T, h *host) { h.remove(t, "/usr/bin/criu") }, "criu is not installed"},
		"CRIU without a library": {func(_ *testing.T, h *host) {
			h.fails["/usr/bin/criu --version"] = errors.New("exit status 127: libnet.so.1: cannot open shared object file")
		}, "criu does not run: exit status 127: libnet.so.1: cannot open shared object file"},
		"CRIU of Debian 13": {func(_ *testing.T, h *host) {
			h.fails[criuCheck] = exit
			h.output[criuCheck] = "Warn  (criu/net.c:3683): net: Unable to get socket network namespace\n" +
				"Error (criu/net.c:1253): net: Unexpected error: -1(Operation not permitted)\n" +
				"Error (criu/cr-check.c:1056): Can't turn TCP repair mode ON: Operation not permitted\n" +
				"Warn  (criu/cr-check.c:1654): Does not look good.\n"
		}, "criu 4.1.1: net: Unexpected error: -1(Operation not permitted), Can't turn TCP repair mode ON: Operation not permitted"},
		"CRIU of Debian 12 on a later kernel": {func(_ *testing.T, h *host) {
			h.output["/usr/bin/criu --version"] = "Version: 3.17.1\n"
			h.fails[criuCheck] = exit
			h.output[criuCheck] = "Error (criu/vdso.c:613): vdso: Failed to fill self vdso symtable\n" +
				"Error (criu/kerndat.c:1615): kerndat_vdso_fill_symtable failed when initializing kerndat.\n" +
				"Error (criu/crtools.c:260): Could not initialize kernel features detection.\n"
		}, "criu 3.17.1: kerndat_vdso_fill_symtable failed when initializing kerndat, Could not initialize kernel features detection"},
		"CRIU without a message": {func(_ *testing.T, h *host) { h.fails[criuCheck] = exit }, "criu 4.1.1: exit status 1"},
		"Debian 12": {func(t *testing.T, h *host) {
			h.seccomp = syscall.EPERM
			h.fails[checkpointCommand] = errors.New("exit status 125: Error: checkpointing a container requires root")
			delete(h.output, crunCheckpoint)
			h.remove(t, "/usr/bin/criu")
		}, "the kernel suspends their seccomp filters, as CRIU requires, only with CAP_SYS_ADMIN on the host; " +
			"podman refuses: checkpointing a container requires root; crun is built without CRIU; criu is not installed"},
	} {
		h, cfg := healthyHost(t)
		permits(t, h)
		c.make(t, h)
		all := doctor.Check(t.Context(), cfg)
		f := all[slices.IndexFunc(all, func(f doctor.Finding) bool { return f.Name == "checkpoint" })]
		want := doctor.Finding{Name: "checkpoint", OK: true, Level: doctor.LevelInfo, Detail: prefix + c.want}
		if diff := cmp.Diff(want, f); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestTheCheckOfCheckpointsCanBeOmitted(t *testing.T) {
	_, cfg := healthyHost(t)
	all := doctor.Check(t.Context(), cfg)
	at := slices.IndexFunc(all, func(f doctor.Finding) bool { return f.Name == "checkpoint" })
	cfg.WithoutCheckpoint = true
	if diff := cmp.Diff(slices.Delete(all, at, at+1), doctor.Check(t.Context(), cfg)); diff != "" {
		t.Errorf("the other checks (-with +without the checkpoints):\n%s", diff)
	}
}
