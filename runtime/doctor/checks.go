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

	"github.com/moby/sys/user"
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

	storageCheck = "storage"

	setup = "packaging/host/setup"
	enter = "packaging/host/enter"
)

func runsAs(_ context.Context, cfg Config) Finding {
	if cfg.Host.UID() == 0 {
		return failed(LevelError, "start it as an unprivileged user: "+enter+" -- doze run; and check as that user: "+enter+" -- doze doctor",
			"the node runs as root; its sandboxes would not be rootless")
	}
	return passed("runs as %s", cfg.User)
}

func userNamespaces(_ context.Context, cfg Config) Finding {
	if n, ok := sysctl(cfg, "kernel.unprivileged_userns_clone"); ok && n == 0 {
		return failed(LevelError, "sysctl -w kernel.unprivileged_userns_clone=1", "users may not create user namespaces")
	}
	n, ok := sysctl(cfg, "user.max_user_namespaces")
	if !ok {
		return failed(LevelError, "boot a kernel with CONFIG_USER_NS", "the kernel has no user namespaces")
	}
	if n == 0 {
		return failed(LevelError, "sysctl -w user.max_user_namespaces=65536", "no user namespace is allowed")
	}
	return passed("%d allowed", n)
}

// appArmor checks a restriction of Ubuntu since 23.10: only programs whose profile
// permits it may use user namespaces. Its apparmor package has a profile for Podman.
func appArmor(_ context.Context, cfg Config) Finding {
	if n, ok := sysctl(cfg, "kernel.apparmor_restrict_unprivileged_userns"); !ok || n == 0 {
		return passed("does not restrict user namespaces")
	}
	profile, err := cfg.Host.ReadFile("/etc/apparmor.d/podman")
	if err != nil || !bytes.Contains(profile, []byte("userns")) {
		return failed(LevelError,
			"apt-get install --reinstall apparmor; or sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
			"AppArmor prevents Podman from creating user namespaces")
	}
	return passed("has a profile that lets Podman create user namespaces")
}

func subIDs(file, option string) checkFunc {
	return func(_ context.Context, cfg Config) Finding {
		remedy := fmt.Sprintf("%s; or: usermod %s FIRST-LAST %s, with %d ids that no other user has, then podman system migrate",
			setup, option, cfg.User, minSubIDs)
		text, err := cfg.Host.ReadFile(file)
		if err != nil {
			return failed(LevelError, remedy, "%v", err)
		}
		largest, uid := int64(0), strconv.Itoa(cfg.Host.UID())
		ranges, err := user.ParseSubIDFilter(bytes.NewReader(text), func(r user.SubID) bool { return r.Name == cfg.User || r.Name == uid })
		if err != nil {
			return failed(LevelError, remedy, "%s: %v", file, err)
		}
		for _, r := range ranges {
			largest = max(largest, r.Count)
		}
		if largest < minSubIDs {
			return failed(LevelError, remedy, "%s assigns %s %d ids in one range; a container needs %d", file, cfg.User, largest, minSubIDs)
		}
		return passed("%s assigns %s %d ids", file, cfg.User, largest)
	}
}

// idMappers checks that newuidmap and newgidmap are setuid root or have the file
// capability instead, as in some distributions.
func idMappers(ctx context.Context, cfg Config) Finding {
	for _, command := range []string{"newuidmap", "newgidmap"} {
		path, err := cfg.Host.Find(command)
		if err != nil {
			return failed(LevelError, "apt-get install uidmap", "%s is missing", command)
		}
		info, err := cfg.Host.Stat(path)
		if err != nil {
			return failed(LevelError, "apt-get install --reinstall uidmap", "%v", err)
		}
		if info.Mode()&fs.ModeSetuid != 0 {
			continue
		}
		if caps, err := cfg.Host.Run(ctx, "getcap", path); err == nil && strings.Contains(caps, "cap_set") {
			continue
		}
		return failed(LevelError, "chmod u+s "+path, "%s is not setuid root", path)
	}
	return passed("newuidmap and newgidmap may map sub-ids")
}

func runtimeDir(_ context.Context, cfg Config) Finding {
	if cfg.RuntimeDir == "" {
		return failed(LevelError, "start the node with "+enter+", or set XDG_RUNTIME_DIR", "XDG_RUNTIME_DIR is not set")
	}
	info, err := cfg.Host.Stat(cfg.RuntimeDir)
	if err == nil && !info.IsDir() {
		err = errors.New("it is not a folder")
	}
	if err == nil {
		err = cfg.Host.Access(cfg.RuntimeDir, unix.R_OK|unix.W_OK|unix.X_OK)
	}
	if err != nil {
		return failed(LevelError, fmt.Sprintf("install -d -m 0700 -o %s %s", cfg.User, cfg.RuntimeDir),
			"%s cannot be used: %v", cfg.RuntimeDir, err)
	}
	return passed("%s", cfg.RuntimeDir)
}

func cgroup(_ context.Context, cfg Config) Finding {
	const remedy = "start the node with " + enter + " or packaging/doze.service"
	if cfg.Cgroup == "" {
		return failed(LevelWarning, remedy,
			"the node has no cgroup v2 subtree: sandboxes sleep and wake through Podman, 100 times slower, and have no limits")
	}
	if _, err := cfg.Host.Stat(filepath.Join(cfg.Cgroup, "cgroup.controllers")); err != nil {
		return failed(LevelError, remedy, "%s is not a cgroup v2 subtree: %v", cfg.Cgroup, err)
	}
	for _, path := range []string{cfg.Cgroup, filepath.Join(cfg.Cgroup, "cgroup.procs"), filepath.Join(cfg.Cgroup, "cgroup.subtree_control")} {
		if err := cfg.Host.Access(path, unix.W_OK); err != nil {
			return failed(LevelError, remedy, "user %s may not write to %s: %v", cfg.User, path, err)
		}
	}
	if _, err := cfg.Host.Stat(filepath.Join(cfg.Cgroup, "cgroup.freeze")); err != nil {
		return failed(LevelError, "boot Linux 5.2 or later", "cgroup v2 cannot freeze here: %v", err)
	}
	return passed("%s", cfg.Cgroup)
}

func controllers(_ context.Context, cfg Config) Finding {
	if cfg.Cgroup == "" {
		return failed(LevelWarning, "see cgroup", "no limit of a sandbox is enforced")
	}
	enforced, err := enforcedLimits(cfg)
	if err != nil {
		return failed(LevelWarning, "see cgroup", "%v", err)
	}
	missing := slices.DeleteFunc([]string{"cpu", "memory", "pids"}, func(c string) bool { return slices.Contains(enforced, c) })
	if len(missing) == 0 {
		return passed("cpu, memory and pids are enforced")
	}
	remedy := "start the node with packaging/doze.service, which has Delegate=yes"
	if v1 := heldByV1(cfg, missing); len(v1) > 0 {
		remedy = "boot with systemd.unified_cgroup_hierarchy=1 (or cgroup_no_v1=all): cgroup v1 holds " + strings.Join(v1, ", ")
	}
	return failed(LevelWarning, remedy, "not enforced: %s", strings.Join(missing, ", "))
}

// enforcedLimits returns the controllers that are enabled for the sandboxes; before the first start,
// those available to the subtree.
func enforcedLimits(cfg Config) ([]string, error) {
	text, err := cfg.Host.ReadFile(filepath.Join(cfg.Cgroup, "sandboxes", "cgroup.subtree_control"))
	if errors.Is(err, fs.ErrNotExist) {
		text, err = cfg.Host.ReadFile(filepath.Join(cfg.Cgroup, "cgroup.controllers"))
	}
	return strings.Fields(string(text)), err
}

// reclaim checks whether the memory of sleeping sandboxes can be moved to swap.
func reclaim(_ context.Context, cfg Config) Finding {
	const why = "sleeping sandboxes keep their memory until they are stopped"
	if cfg.Cgroup == "" {
		return failed(LevelWarning, "see cgroup", "%s: the node has no cgroup v2 subtree", why)
	}
	if enforced, err := enforcedLimits(cfg); err != nil || !slices.Contains(enforced, "memory") {
		return failed(LevelWarning, "see limits", "%s: the node has no memory controller", why)
	}
	dir := filepath.Join(cfg.Cgroup, "sandboxes")
	if _, err := cfg.Host.Stat(dir); err != nil { // before the first start
		dir = cfg.Cgroup
	}
	if _, err := cfg.Host.Stat(filepath.Join(dir, "memory.reclaim")); err != nil {
		return failed(LevelWarning, "boot Linux 5.19 or later", "%s: the kernel has no memory.reclaim", why)
	}
	var swap int64
	text, err := cfg.Host.ReadFile("/proc/meminfo")
	for line := range strings.Lines(string(text)) {
		if kib, ok := strings.CutPrefix(line, "SwapTotal:"); ok {
			_, err = fmt.Sscanf(kib, "%d kB", &swap)
		}
	}
	if err != nil {
		return failed(LevelWarning, "mount /proc as usual", "%s: the swap of the machine is unknown: %v", why, err)
	}
	if swap == 0 {
		return failed(LevelWarning, "add zram or a swap file: docs/operations.md, Memory", "%s: the machine has no swap", why)
	}
	if text, err := cfg.Host.ReadFile(filepath.Join(cfg.Cgroup, "memory.swap.max")); err == nil && strings.TrimSpace(string(text)) == "0" {
		return failed(LevelWarning, "MemorySwapMax=infinity in the unit", "%s: the node may not use swap", why)
	}
	return passed("the memory of sleeping sandboxes can move to %.1f GiB of swap", float64(swap)/(1<<20))
}

// stalls checks whether the kernel counts for how long programs wait for memory (PSI).
func stalls(_ context.Context, cfg Config) Finding {
	const file = "/proc/pressure/memory"
	// A kernel may have the file and refuse to read it.
	if text, err := cfg.Host.ReadFile(file); err != nil || !strings.Contains(string(text), "total=") {
		return failed(LevelWarning, "boot with psi=1, or a kernel with CONFIG_PSI",
			"the kernel does not count for how long programs wait for memory; sleeping sandboxes are stopped only below memory_reserve")
	}
	return passed("%s shows for how long programs wait for memory", file)
}

// heldByV1 returns the controllers that are bound to a cgroup v1 hierarchy: their
// hierarchy in /proc/cgroups is not 0.
func heldByV1(cfg Config, names []string) (held []string) {
	text, _ := cfg.Host.ReadFile("/proc/cgroups") // not in all kernels
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) >= 2 && fields[1] != "0" && slices.Contains(names, fields[0]) {
			held = append(held, fields[0])
		}
	}
	return held
}

// podman runs Podman. The error is fs.ErrNotExist (wrapped) if it is missing.
func podman(ctx context.Context, cfg Config, args ...string) (string, error) {
	path, err := cfg.Host.Find("podman")
	if err != nil {
		return "", err
	}
	return cfg.Host.Run(ctx, path, args...)
}

// podmanMissing is the finding of checks that need Podman.
func podmanMissing() Finding { return failed(LevelError, "see podman", "podman is missing") }

func podmanVersion(ctx context.Context, cfg Config) Finding {
	out, err := podman(ctx, cfg, "--version")
	if errors.Is(err, fs.ErrNotExist) {
		return failed(LevelError, "apt-get install podman", "podman is missing")
	}
	if err != nil {
		return failed(LevelError, "see the output of: podman --version", "podman does not run: %v", err)
	}
	version := strings.TrimPrefix(strings.TrimSpace(out), "podman version ") // such as 4.3.1
	var major, minor int
	if _, err := fmt.Sscanf(version, "%d.%d", &major, &minor); err != nil {
		return failed(LevelWarning, "see the output of: podman --version", "podman has the unknown version %q", version)
	}
	if major < podmanMajor || major == podmanMajor && minor < podmanMinor {
		return failed(LevelError, "upgrade to Debian 12, Ubuntu 24.04 or later, or install a newer podman",
			"podman %s is older than %d.%d", version, podmanMajor, podmanMinor)
	}
	return passed("%s", version)
}

func programs(_ context.Context, cfg Config) Finding {
	missing := slices.DeleteFunc([]string{"crun", "conmon", "nsenter"}, func(command string) bool {
		_, err := cfg.Host.Find(command)
		return err == nil
	})
	if len(missing) > 0 {
		return failed(LevelError, "apt-get install crun conmon util-linux", "missing: %s", strings.Join(missing, ", "))
	}
	return passed("crun, conmon and nsenter are installed")
}

func storage(ctx context.Context, cfg Config) Finding {
	out, err := podman(ctx, cfg, "info", "--format", "{{.Store.GraphDriverName}}")
	if errors.Is(err, fs.ErrNotExist) {
		return podmanMissing()
	}
	if err != nil {
		return failed(LevelError, "see the output of: "+enter+" -- podman info", "rootless podman does not work: %v", err)
	}
	return StorageDriver(strings.TrimSpace(out))
}

// StorageDriver is the finding of the check of Podman's storage for a Podman that works, with
// this storage driver.
func StorageDriver(driver string) Finding {
	f := passed("rootless podman works, with overlay")
	if driver != "overlay" {
		f = failed(LevelWarning,
			`podman system reset (removes all images), then driver = "overlay" under [storage] in ~/.config/containers/storage.conf`,
			"podman's storage driver is %s, which copies the whole image for each sandbox", driver)
	}
	f.Name = storageCheck
	return f
}

// tun checks the TUN device, which carries a sandbox's network; no sandbox starts without
// it.
func tun(_ context.Context, cfg Config) Finding {
	return device(cfg, "/dev/net/tun", "tun", LevelError, "")
}

// fuse checks the FUSE device, without which buckets cannot be mounted.
func fuse(_ context.Context, cfg Config) Finding {
	return device(cfg, "/dev/fuse", "fuse", LevelWarning, "; buckets cannot be mounted")
}

// device checks a device of a kernel module.
func device(cfg Config, path, module string, level Level, consequence string) Finding {
	err := cfg.Host.OpenDevice(path)
	switch {
	case err == nil:
		return passed("%s can be opened", path)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENODEV):
		return failed(level, "modprobe "+module+"; in a container: --device "+path, "there is no %s%s", path, consequence)
	default:
		return failed(level, "chmod 0666 "+path, "%s cannot be opened: %v%s", path, err, consequence)
	}
}

// network creates in a namespace of its own what a sandbox's network needs of the kernel
// in addition to the TUN device.
func network(ctx context.Context, cfg Config) Finding {
	_, err := podman(ctx, cfg, "unshare", "--", cfg.NetnsHelper, "check")
	if errors.Is(err, fs.ErrNotExist) {
		return podmanMissing()
	}
	if err != nil {
		return failed(LevelError, "modprobe -a nf_tables nft_tproxy; or a kernel with CONFIG_NF_TABLES and CONFIG_NFT_TPROXY",
			"the network of a sandbox cannot be created: %v", err)
	}
	return passed("the network of a sandbox can be created")
}

func disk(_ context.Context, cfg Config) Finding {
	free, err := cfg.Host.Free(cfg.Home)
	if err != nil {
		return failed(LevelWarning, "make sure that "+cfg.Home+" can be created", "%v", err)
	}
	level := LevelWarning
	if free < diskError {
		level = LevelError
	}
	if free < diskWarning {
		return failed(level, "remove what is not needed: doze rm, podman image prune; or set DOZE_HOME to a larger disk",
			"%.1f GiB are free for %s", float64(free)/(1<<30), cfg.Home)
	}
	return passed("%.0f GiB are free for %s", float64(free)/(1<<30), cfg.Home)
}

// diskLimits reports how disk limits are enforced. The kernel accepts project quotas only with
// CAP_SYS_ADMIN in the initial user namespace: quotactl(2).
func diskLimits(_ context.Context, cfg Config) Finding {
	const how = "measured by the node, which stops sandboxes that exceed them"
	fs, options := mountOf(cfg, cfg.Home)
	switch {
	case fs == "":
		return passed("%s; no project quotas: rootless podman cannot set them", how)
	case slices.ContainsFunc(strings.Split(options, ","), func(o string) bool { return o == "prjquota" || o == "pquota" }):
		return passed("%s; %s has project quotas, which rootless podman cannot set for each sandbox: that needs CAP_SYS_ADMIN on the host", how, fs)
	}
	return passed("%s; no project quotas: %s is mounted without prjquota, and rootless podman could not set them: that needs CAP_SYS_ADMIN on the host", how, fs)
}

// mountOf returns the type and the options of the file system of a path; empty if they are unknown.
func mountOf(cfg Config, path string) (fs, options string) {
	text, err := cfg.Host.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", ""
	}
	longest := -1
	for line := range strings.Lines(string(text)) {
		// ID PARENT DEVICE ROOT POINT OPTIONS [FIELD...] - TYPE SOURCE SUPER-OPTIONS
		before, after, _ := strings.Cut(strings.TrimSpace(line), " - ")
		mount, super := strings.Fields(before), strings.Fields(after)
		if len(mount) < 6 || len(super) < 3 {
			continue
		}
		point := strings.TrimSuffix(mount[4], "/")
		if (path == point || strings.HasPrefix(path, point+"/")) && len(point) >= longest { // a later mount hides an earlier one
			longest, fs, options = len(point), super[0], super[2]
		}
	}
	return fs, options
}

// unreachable is more epoll watches, requests of asynchronous I/O or open files than fit
// into memory.
const unreachable = 1 << 40

// shared checks limits that all sandboxes share because no namespace divides them. They
// bound the use of memory.
func shared(_ context.Context, cfg Config) Finding {
	var low []string
	for _, key := range []string{"fs.epoll.max_user_watches", "fs.aio-max-nr", "fs.file-max"} {
		if n, ok := sysctl(cfg, key); ok && n < unreachable {
			low = append(low, fmt.Sprintf("%s=%d", key, unreachable))
		}
	}
	if len(low) > 0 {
		return failed(LevelWarning, fmt.Sprintf("%s; or: sysctl -w %s", setup, strings.Join(low, " ")),
			"one sandbox can exhaust what all of them share, until %d limits of the kernel are raised", len(low))
	}
	return passed("no sandbox can exhaust the epoll watches, asynchronous I/O or open files of the others")
}

func pipes(_ context.Context, cfg Config) Finding {
	const key = "fs.pipe-user-pages-soft"
	if n, ok := sysctl(cfg, key); ok && n != 0 {
		return failed(LevelWarning, fmt.Sprintf("%s; or: sysctl -w %s=0", setup, key),
			"%s is %d for all sandboxes together; one of them can slow down the pipes of the others", key, n)
	}
	return passed("no sandbox can exhaust the pipe buffers of another")
}

// atLeast checks that a kernel limit, which many sandboxes can reach, is at least want.
func atLeast(key string, want int, why string) checkFunc {
	return func(_ context.Context, cfg Config) Finding {
		n, ok := sysctl(cfg, key)
		if !ok {
			return passed("this kernel has no %s", key)
		}
		if n < want {
			return failed(LevelWarning, fmt.Sprintf("%s; or: sysctl -w %s=%d", setup, key, 8*want), "%s is %d; %s", key, n, why)
		}
		return passed("%s is %d", key, n)
	}
}

func openFiles(_ context.Context, cfg Config) Finding {
	n, err := cfg.Host.OpenFiles()
	if err != nil {
		return passed("unknown limit: %v", err)
	}
	if n < minOpenFiles {
		return failed(LevelWarning, "ulimit -n 65536, or LimitNOFILE= in the unit", "the limit is %d; use at least %d", n, minOpenFiles)
	}
	return passed("the limit is %d", n)
}

func portFree(port int) checkFunc {
	return func(_ context.Context, cfg Config) Finding {
		err := cfg.Host.Listen(port)
		switch {
		case err == nil:
			return passed("is free")
		case errors.Is(err, syscall.EADDRINUSE):
			return failed(LevelError,
				fmt.Sprintf("find the process that uses it: ss -ltnp 'sport = :%d'; or choose another port: DOZE_HTTPS_PORT=9443", port),
				"is in use")
		case errors.Is(err, fs.ErrPermission):
			return failed(LevelError,
				fmt.Sprintf("sysctl -w net.ipv4.ip_unprivileged_port_start=%d; or AmbientCapabilities=CAP_NET_BIND_SERVICE in the unit", port),
				"users may not listen on it")
		default:
			return failed(LevelError, "choose another port: DOZE_HTTPS_PORT=9443", "%v", err)
		}
	}
}

// sysctl reads a parameter of the kernel that is a single number.
func sysctl(cfg Config, key string) (int, bool) {
	text, err := cfg.Host.ReadFile("/proc/sys/" + strings.ReplaceAll(key, ".", "/"))
	if err != nil {
		return 0, false
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	return n, err == nil
}
