package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// minSubIDs is the number of ids in a container: 0 to 65534 are in use, and 65535
	// is reserved.
	minSubIDs = 65536

	// podmanMajor.podmanMinor is the oldest Podman that was tested.
	podmanMajor, podmanMinor = 4, 3

	// diskWarning is space for a base image and some sandboxes, in bytes. With less
	// than diskError the store does not open (it needs 192 MiB); with more, a node
	// serves its existing sandboxes and can delete some.
	diskWarning = 5 << 30
	diskError   = 256 << 20

	// minInotify: conmon uses one inotify instance per container.
	minInotify = 1024
	// minKeys: crun creates one keyring per container.
	minKeys = 2000
	// minOpenFiles: a running sandbox needs some ten descriptors of the node.
	minOpenFiles = 4096

	setup = "packaging/host/setup"
	enter = "packaging/host/enter"
)

func runsAs(_ context.Context, cfg Config) Finding {
	const name = "user"
	if cfg.Host.UID() == 0 {
		return failed(name, LevelError, "start it as an unprivileged user: "+enter+" -- doze run; and check as that user: "+enter+" -- doze doctor",
			"the node runs as root; its sandboxes would not be rootless")
	}
	return passed(name, "runs as %s", cfg.User)
}

func userNamespaces(_ context.Context, cfg Config) Finding {
	const name = "user namespaces"
	if n, ok := number(cfg, "/proc/sys/kernel/unprivileged_userns_clone"); ok && n == 0 {
		return failed(name, LevelError, "sysctl -w kernel.unprivileged_userns_clone=1", "users may not create user namespaces")
	}
	n, ok := number(cfg, "/proc/sys/user/max_user_namespaces")
	if !ok {
		return failed(name, LevelError, "boot a kernel with CONFIG_USER_NS", "the kernel has no user namespaces")
	}
	if n == 0 {
		return failed(name, LevelError, "sysctl -w user.max_user_namespaces=65536", "no user namespace is allowed")
	}
	return passed(name, "%d allowed", n)
}

// appArmor checks a restriction of Ubuntu since 23.10: only programs whose profile
// permits it may use user namespaces. Its apparmor package has a profile for Podman.
func appArmor(_ context.Context, cfg Config) Finding {
	const name = "apparmor"
	if n, ok := number(cfg, "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"); !ok || n == 0 {
		return passed(name, "does not restrict user namespaces")
	}
	profile, err := cfg.Host.ReadFile("/etc/apparmor.d/podman")
	if err != nil || !bytes.Contains(profile, []byte("userns")) {
		return failed(name, LevelError,
			"apt-get install --reinstall apparmor; or sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
			"AppArmor prevents Podman from creating user namespaces")
	}
	return passed(name, "has a profile that lets Podman create user namespaces")
}

func subIDs(name, file, option string) func(context.Context, Config) Finding {
	return func(_ context.Context, cfg Config) Finding {
		remedy := fmt.Sprintf("%s; or: usermod %s FIRST-LAST %s, with %d ids that no other user has, then podman system migrate",
			setup, option, cfg.User, minSubIDs)
		text, err := cfg.Host.ReadFile(file)
		if err != nil {
			return failed(name, LevelError, remedy, "%v", err)
		}
		largest := 0
		for line := range strings.Lines(string(text)) {
			fields := strings.Split(strings.TrimSpace(line), ":")
			if len(fields) != 3 || (fields[0] != cfg.User && fields[0] != strconv.Itoa(cfg.Host.UID())) {
				continue
			}
			if n, err := strconv.Atoi(fields[2]); err == nil {
				largest = max(largest, n)
			}
		}
		if largest < minSubIDs {
			return failed(name, LevelError, remedy, "%s assigns %s %d ids in one range; a container needs %d", file, cfg.User, largest, minSubIDs)
		}
		return passed(name, "%s assigns %s %d ids", file, cfg.User, largest)
	}
}

// idMappers checks that newuidmap and newgidmap are setuid root or have the file
// capability instead, as in some distributions.
func idMappers(ctx context.Context, cfg Config) Finding {
	const name = "newuidmap"
	for _, command := range []string{"newuidmap", "newgidmap"} {
		path, err := cfg.Host.Find(command)
		if err != nil {
			return failed(name, LevelError, "apt-get install uidmap", "%s is missing", command)
		}
		info, err := cfg.Host.Stat(path)
		if err != nil {
			return failed(name, LevelError, "apt-get install --reinstall uidmap", "%v", err)
		}
		if info.Mode()&fs.ModeSetuid != 0 {
			continue
		}
		if caps, err := cfg.Host.Run(ctx, "getcap", path); err == nil && strings.Contains(caps, "cap_set") {
			continue
		}
		return failed(name, LevelError, "chmod u+s "+path, "%s is not setuid root", path)
	}
	return passed(name, "newuidmap and newgidmap may map sub-ids")
}

func runtimeDir(_ context.Context, cfg Config) Finding {
	const name = "runtime folder"
	if cfg.RuntimeDir == "" {
		return failed(name, LevelError, "start the node with "+enter+", or set XDG_RUNTIME_DIR", "XDG_RUNTIME_DIR is not set")
	}
	info, err := cfg.Host.Stat(cfg.RuntimeDir)
	if err == nil && !info.IsDir() {
		err = errors.New("it is not a folder")
	}
	if err == nil {
		err = cfg.Host.Access(cfg.RuntimeDir, unix.R_OK|unix.W_OK|unix.X_OK)
	}
	if err != nil {
		return failed(name, LevelError, fmt.Sprintf("install -d -m 0700 -o %s %s", cfg.User, cfg.RuntimeDir),
			"%s cannot be used: %v", cfg.RuntimeDir, err)
	}
	return passed(name, "%s", cfg.RuntimeDir)
}

func cgroup(_ context.Context, cfg Config) Finding {
	const name = "cgroup"
	const remedy = "start the node with " + enter + " or packaging/doze.service"
	if cfg.Cgroup == "" {
		return failed(name, LevelWarning, remedy,
			"the node has no cgroup v2 subtree: sandboxes sleep and wake through Podman, 100 times slower, and have no limits")
	}
	if _, err := cfg.Host.Stat(filepath.Join(cfg.Cgroup, "cgroup.controllers")); err != nil {
		return failed(name, LevelError, remedy, "%s is not a cgroup v2 subtree: %v", cfg.Cgroup, err)
	}
	for _, path := range []string{cfg.Cgroup, filepath.Join(cfg.Cgroup, "cgroup.procs"), filepath.Join(cfg.Cgroup, "cgroup.subtree_control")} {
		if err := cfg.Host.Access(path, unix.W_OK); err != nil {
			return failed(name, LevelError, remedy, "user %s may not write to %s: %v", cfg.User, path, err)
		}
	}
	if _, err := cfg.Host.Stat(filepath.Join(cfg.Cgroup, "cgroup.freeze")); err != nil {
		return failed(name, LevelError, "boot Linux 5.2 or later", "cgroup v2 cannot freeze here: %v", err)
	}
	return passed(name, "%s", cfg.Cgroup)
}

func controllers(_ context.Context, cfg Config) Finding {
	const name = "limits"
	want := []string{"cpu", "memory", "pids"}
	if cfg.Cgroup == "" {
		return failed(name, LevelWarning, "see cgroup", "no limit of a sandbox is enforced")
	}
	// The controllers enabled for the sandboxes count; before the first start, those
	// available to the subtree.
	text, err := cfg.Host.ReadFile(filepath.Join(cfg.Cgroup, "sandboxes", "cgroup.subtree_control"))
	if errors.Is(err, fs.ErrNotExist) {
		text, err = cfg.Host.ReadFile(filepath.Join(cfg.Cgroup, "cgroup.controllers"))
	}
	if err != nil {
		return failed(name, LevelWarning, "see cgroup", "%v", err)
	}
	have := strings.Fields(string(text))
	var missing []string
	for _, controller := range want {
		if !slices.Contains(have, controller) {
			missing = append(missing, controller)
		}
	}
	if len(missing) == 0 {
		return passed(name, "cpu, memory and pids are enforced")
	}
	remedy := "start the node with packaging/doze.service, which has Delegate=yes"
	if v1, held := heldByV1(cfg, missing); held {
		remedy = "boot with systemd.unified_cgroup_hierarchy=1 (or cgroup_no_v1=all): cgroup v1 holds " + strings.Join(v1, ", ")
	}
	return failed(name, LevelWarning, remedy, "not enforced: %s", strings.Join(missing, ", "))
}

// heldByV1 returns the controllers that are bound to a cgroup v1 hierarchy: their
// hierarchy in /proc/cgroups is not 0.
func heldByV1(cfg Config, names []string) ([]string, bool) {
	text, err := cfg.Host.ReadFile("/proc/cgroups")
	if err != nil {
		return nil, false
	}
	var held []string
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) >= 2 && fields[1] != "0" && slices.Contains(names, fields[0]) {
			held = append(held, fields[0])
		}
	}
	return held, len(held) > 0
}

func podmanVersion(ctx context.Context, cfg Config) Finding {
	const name = "podman"
	path, err := cfg.Host.Find("podman")
	if err != nil {
		return failed(name, LevelError, "apt-get install podman", "podman is missing")
	}
	out, err := cfg.Host.Run(ctx, path, "--version")
	if err != nil {
		return failed(name, LevelError, "see the output of: podman --version", "podman does not run: %v", err)
	}
	fields := strings.Fields(out) // podman version 4.3.1
	if len(fields) == 0 {
		return failed(name, LevelError, "apt-get install --reinstall podman", "podman --version prints nothing")
	}
	version := fields[len(fields)-1]
	major, minor, ok := parseVersion(version)
	if !ok {
		return failed(name, LevelWarning, "see the output of: podman --version", "podman has the unknown version %q", version)
	}
	if major < podmanMajor || major == podmanMajor && minor < podmanMinor {
		return failed(name, LevelError, "upgrade to Debian 12, Ubuntu 24.04 or later, or install a newer podman",
			"podman %s is older than %d.%d", version, podmanMajor, podmanMinor)
	}
	return passed(name, "%s", version)
}

func parseVersion(version string) (major, minor int, ok bool) {
	parts := strings.SplitN(version, ".", 3)
	if len(parts) < 2 {
		return 0, 0, false
	}
	major, err1 := strconv.Atoi(parts[0])
	minor, err2 := strconv.Atoi(parts[1])
	return major, minor, err1 == nil && err2 == nil
}

func programs(_ context.Context, cfg Config) Finding {
	const name = "programs"
	var missing []string
	for _, command := range []string{"crun", "conmon", "nsenter"} {
		if _, err := cfg.Host.Find(command); err != nil {
			missing = append(missing, command)
		}
	}
	if len(missing) > 0 {
		return failed(name, LevelError, "apt-get install crun conmon util-linux", "missing: %s", strings.Join(missing, ", "))
	}
	return passed(name, "crun, conmon and nsenter are installed")
}

func storage(ctx context.Context, cfg Config) Finding {
	const name = "storage"
	path, err := cfg.Host.Find("podman")
	if err != nil {
		return failed(name, LevelError, "see podman", "podman is missing")
	}
	out, err := cfg.Host.Run(ctx, path, "info", "--format", "{{.Store.GraphDriverName}}")
	if err != nil {
		return failed(name, LevelError, "see the output of: "+enter+" -- podman info", "rootless podman does not work: %v", err)
	}
	if driver := strings.TrimSpace(out); driver != "overlay" {
		return failed(name, LevelWarning,
			`podman system reset (removes all images), then driver = "overlay" under [storage] in ~/.config/containers/storage.conf`,
			"podman's storage driver is %s, which copies the whole image for each sandbox", driver)
	}
	return passed(name, "rootless podman works, with overlay")
}

// tun checks the TUN device, which carries a sandbox's network; no sandbox starts without
// it.
func tun(_ context.Context, cfg Config) Finding {
	const name, device = "tun", "/dev/net/tun"
	err := cfg.Host.OpenDevice(device)
	switch {
	case err == nil:
		return passed(name, "%s can be opened", device)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENODEV):
		return failed(name, LevelError, "modprobe tun; in a container: --device "+device, "there is no %s", device)
	default:
		return failed(name, LevelError, "chmod 0666 "+device, "%s cannot be opened: %v", device, err)
	}
}

// network creates in a namespace of its own what a sandbox's network needs of the kernel
// in addition to the TUN device.
func network(ctx context.Context, cfg Config) Finding {
	const name = "network"
	podman, err := cfg.Host.Find("podman")
	if err == nil {
		_, err = cfg.Host.Run(ctx, podman, "unshare", "--", cfg.NetnsHelper, "check")
	}
	if err != nil {
		return failed(name, LevelError, "modprobe -a nf_tables nft_tproxy; or a kernel with CONFIG_NF_TABLES and CONFIG_NFT_TPROXY",
			"the network of a sandbox cannot be created: %v", err)
	}
	return passed(name, "the network of a sandbox can be created")
}

func disk(_ context.Context, cfg Config) Finding {
	const name = "disk"
	free, err := cfg.Host.Free(cfg.Home)
	if err != nil {
		return failed(name, LevelWarning, "make sure that "+cfg.Home+" can be created", "%v", err)
	}
	level := LevelWarning
	if free < diskError {
		level = LevelError
	}
	if free < diskWarning {
		return failed(name, level, "remove what is not needed: doze rm, podman image prune; or set DOZE_HOME to a larger disk",
			"%.1f GiB are free for %s", float64(free)/(1<<30), cfg.Home)
	}
	return passed(name, "%.0f GiB are free for %s", float64(free)/(1<<30), cfg.Home)
}

func inotify(_ context.Context, cfg Config) Finding {
	return atLeast(cfg, "inotify", "fs.inotify.max_user_instances", minInotify, "each sandbox uses one inotify instance")
}

func keyrings(_ context.Context, cfg Config) Finding {
	return atLeast(cfg, "keyrings", "kernel.keys.maxkeys", minKeys, "each sandbox uses one keyring")
}

// unreachable is more epoll watches, requests of asynchronous I/O or open files than fit
// into memory.
const unreachable = 1 << 40

// shared checks limits that all sandboxes share because no namespace divides them. They
// bound the use of memory.
func shared(_ context.Context, cfg Config) Finding {
	const name = "shared limits"
	var low []string
	for _, key := range []string{"fs.epoll.max_user_watches", "fs.aio-max-nr", "fs.file-max"} {
		if n, ok := number(cfg, "/proc/sys/"+strings.ReplaceAll(key, ".", "/")); ok && n < unreachable {
			low = append(low, fmt.Sprintf("%s=%d", key, unreachable))
		}
	}
	if len(low) > 0 {
		return failed(name, LevelWarning, fmt.Sprintf("%s; or: sysctl -w %s", setup, strings.Join(low, " ")),
			"one sandbox can exhaust what all of them share, until %d limits of the kernel are raised", len(low))
	}
	return passed(name, "no sandbox can exhaust the epoll watches, asynchronous I/O or open files of the others")
}

func pipes(_ context.Context, cfg Config) Finding {
	const name, key = "pipes", "fs.pipe-user-pages-soft"
	if n, ok := number(cfg, "/proc/sys/fs/pipe-user-pages-soft"); ok && n != 0 {
		return failed(name, LevelWarning, fmt.Sprintf("%s; or: sysctl -w %s=0", setup, key),
			"%s is %d for all sandboxes together; one of them can slow down the pipes of the others", key, n)
	}
	return passed(name, "no sandbox can exhaust the pipe buffers of another")
}

// atLeast checks that a kernel limit, which many sandboxes can reach, is at least want.
func atLeast(cfg Config, name, key string, want int, why string) Finding {
	n, ok := number(cfg, "/proc/sys/"+strings.ReplaceAll(key, ".", "/"))
	if !ok {
		return passed(name, "this kernel has no %s", key)
	}
	if n < want {
		return failed(name, LevelWarning, fmt.Sprintf("%s; or: sysctl -w %s=%d", setup, key, 8*want), "%s is %d; %s", key, n, why)
	}
	return passed(name, "%s is %d", key, n)
}

func openFiles(_ context.Context, cfg Config) Finding {
	const name = "open files"
	n, err := cfg.Host.OpenFiles()
	if err != nil {
		return passed(name, "unknown limit: %v", err)
	}
	if n < minOpenFiles {
		return failed(name, LevelWarning, "ulimit -n 65536, or LimitNOFILE= in the unit", "the limit is %d; use at least %d", n, minOpenFiles)
	}
	return passed(name, "the limit is %d", n)
}

func portFree(port int) func(context.Context, Config) Finding {
	return func(_ context.Context, cfg Config) Finding {
		name := fmt.Sprintf("port %d", port)
		err := cfg.Host.Listen(port)
		switch {
		case err == nil:
			return passed(name, "is free")
		case errors.Is(err, syscall.EADDRINUSE):
			return failed(name, LevelError,
				fmt.Sprintf("find the process that uses it: ss -ltnp 'sport = :%d'; or choose another port: DOZE_HTTPS_PORT=9443", port),
				"is in use")
		case errors.Is(err, fs.ErrPermission):
			return failed(name, LevelError,
				fmt.Sprintf("sysctl -w net.ipv4.ip_unprivileged_port_start=%d; or AmbientCapabilities=CAP_NET_BIND_SERVICE in the unit", port),
				"users may not listen on it")
		default:
			return failed(name, LevelError, "choose another port: DOZE_HTTPS_PORT=9443", "%v", err)
		}
	}
}

// number reads a file that contains a single number.
func number(cfg Config, path string) (int, bool) {
	text, err := cfg.Host.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	return n, err == nil
}
