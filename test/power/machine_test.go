//go:build mounts

package power

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

const (
	// userName is the node's user, whose home is on the device. The tests make and remove the user, and kill all
	// its processes.
	userName = "doze-power"
	home     = "/var/lib/" + userName
	image    = "localhost/doze/recorder:latest"

	cgroups = "/sys/fs/cgroup"
)

// namespaced is set in the environment of the process that runs the tests.
const namespaced = "DOZE_TEST_NAMESPACED"

// TestMain runs the tests in a mount namespace. Processes that others start do not get its mounts, which would keep
// the devices in use, and the kernel removes mounts and devices with its last process.
func TestMain(m *testing.M) {
	if os.Getenv(namespaced) == "" {
		program, err := exec.LookPath("unshare")
		self, serr := os.Executable()
		if err = cmp.Or(err, serr); err == nil {
			args := append([]string{program, "--mount", "--propagation", "private", "--", self}, os.Args[1:]...)
			err = syscall.Exec(program, args, append(os.Environ(), namespaced+"=yes"))
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// machine is a user with Podman and a home on a device that can be copied at any moment.
type machine struct {
	t      *testing.T
	fs     string // of the device, such as ext4
	dir    string // on XFS: a copy of a file shares its blocks, and is made in one step
	device string // the file behind the mounted device
	uid    int
	gid    int
}

// newMachine returns a machine whose Podman has the image. It ends with the test.
func newMachine(t *testing.T, on string) *machine {
	t.Helper()
	must := func(err error) { t.Helper(); testkit.NoError(t, "set up the machine", err) }
	outer := t.TempDir()
	m := &machine{t: t, fs: on, dir: filepath.Join(outer, "mounted")}
	must(os.Mkdir(m.dir, 0o700))
	sparse := func(path string, size int64) {
		must(os.WriteFile(path, nil, 0o600))
		must(os.Truncate(path, size))
	}
	sparse(filepath.Join(outer, "outer"), 16<<30)
	m.run("mkfs.xfs", "-q", "-m", "reflink=1", filepath.Join(outer, "outer"))
	m.run("mount", "-o", "loop", filepath.Join(outer, "outer"), m.dir)
	t.Cleanup(func() { m.run("umount", m.dir) })
	m.device = filepath.Join(m.dir, "live")
	sparse(m.device, 4<<30)
	m.run("mkfs."+on, "-q", m.device)

	if _, err := user.Lookup(userName); err != nil {
		m.run("useradd", "--system", "--user-group", "--home-dir", home, "--shell", "/usr/sbin/nologin", userName)
	}
	who, err := user.Lookup(userName)
	must(err)
	m.uid, err = strconv.Atoi(who.Uid)
	must(err)
	m.gid, err = strconv.Atoi(who.Gid)
	must(err)
	t.Cleanup(func() { m.run("userdel", userName) })
	must(os.MkdirAll(home, 0o700))
	t.Cleanup(func() { must(os.Remove(home)) })
	t.Cleanup(m.lose)
	var st unix.Statfs_t
	must(unix.Statfs(cgroups, &st))
	if st.Type != unix.CGROUP2_SUPER_MAGIC {
		m.run("mount", "-t", "cgroup2", "none", cgroups)
	}
	m.boot(m.device)
	must(os.Chown(home, m.uid, m.gid))
	m.run(script("packaging/host/setup"), "--user", userName)
	m.importImage()
	return m
}

// script returns the path of one of the project's scripts.
func script(name string) string {
	path, err := filepath.Abs(filepath.Join("..", "..", name))
	if err != nil {
		panic(err)
	}
	return path
}

func (m *machine) run(name string, args ...string) string {
	m.t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		m.t.Fatalf("%s %s: %v: %s", name, args, err, out)
	}
	return string(out)
}

// enter is the beginning of commands that run as the user.
func enter() []string { return []string{script("packaging/host/enter"), "--user", userName, "--"} }

func (m *machine) podman(args ...string) string {
	m.t.Helper()
	line := slices.Concat(enter(), []string{"podman"}, args)
	cmd := exec.Command(line[0], line[1:]...)
	cmd.Dir = home
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		m.t.Fatalf("podman %s: %v: %s", args, err, stderr.Bytes())
	}
	return string(out)
}

// mount mounts the present device and the programs.
func (m *machine) mount() {
	m.t.Helper()
	if m.fs == "btrfs" { // it knows the devices by the file system's id, which copies share
		_ = exec.Command("btrfs", "device", "scan", "--forget").Run()
	}
	m.run("mount", "-t", m.fs, "-o", "loop", m.device, home)
	bin := filepath.Join(home, "bin")
	testkit.NoError(m.t, "make the folder of programs", os.MkdirAll(bin, 0o755))
	m.run("mount", "--bind", os.Getenv("DOZE_BIN"), bin)
}

func (m *machine) importImage() {
	m.t.Helper()
	root := m.t.TempDir()
	for _, dir := range []string{"bin", "etc", "tmp", "proc", "sys", "dev", "run"} {
		testkit.NoError(m.t, "make the image", os.Mkdir(filepath.Join(root, dir), 0o755))
	}
	m.run("cp", filepath.Join(os.Getenv("DOZE_BIN"), "doze-recorder"), filepath.Join(root, "bin", "recorder"))
	testkit.NoError(m.t, "make the image", os.WriteFile(filepath.Join(root, "etc", "passwd"), []byte("root:x:0:0::/:\n"), 0o644))
	archive := filepath.Join(home, "image.tar")
	m.run("tar", "--numeric-owner", "--owner=0", "--group=0", "-C", root, "-cf", archive, ".")
	m.podman("import", "--quiet", archive, image)
	testkit.NoError(m.t, "remove the archive", os.Remove(archive))
	m.run("sync", "-f", home) // the image is older than the loss of power
}

// copyDevice copies the device in one step: what the file system has written to it, and no more.
func (m *machine) copyDevice(name string) string {
	m.t.Helper()
	from, err := os.Open(m.device)
	testkit.NoError(m.t, "copy the device", err)
	defer from.Close()
	path := filepath.Join(m.dir, name)
	to, err := os.Create(path)
	testkit.NoError(m.t, "copy the device", err)
	testkit.NoError(m.t, "copy the device", errors.Join(unix.IoctlFileClone(int(to.Fd()), int(from.Fd())), to.Close()))
	return path
}

// lose ends everything of the machine, as a loss of power does: processes, memory and mounts.
func (m *machine) lose() {
	m.t.Helper()
	testkit.Eventually(m.t, "all processes of the machine are gone", func() bool {
		pids := m.processes()
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		return len(pids) == 0
	})
	for _, path := range []string{"/run/doze-" + userName, fmt.Sprint("/dev/shm/libpod_rootless_lock_", m.uid)} {
		testkit.NoError(m.t, "empty the memory", os.RemoveAll(path))
	}
	cgroup := filepath.Join(cgroups, "doze-"+userName)
	var folders []string
	_ = filepath.WalkDir(cgroup, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() {
			folders = append(folders, path)
		}
		return nil
	})
	for _, folder := range slices.Backward(folders) {
		testkit.Eventually(m.t, "the cgroup is removed", func() bool {
			err := os.Remove(folder)
			return err == nil || errors.Is(err, fs.ErrNotExist)
		})
	}
	for _, path := range []string{filepath.Join(home, "bin"), home} {
		if err := unix.Unmount(path, 0); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, fs.ErrNotExist) {
			m.t.Fatalf("unmount %s: %v", path, err)
		}
	}
}

// boot begins to use a device, in place of the present one.
func (m *machine) boot(device string) {
	m.t.Helper()
	if device != m.device {
		testkit.NoError(m.t, "remove the device", os.Remove(m.device))
		m.device = device
	}
	m.mount()
	// The kernel's id of the boot remains the same.
	err := os.Remove(filepath.Join(home, "node", "backups", "boot"))
	if !errors.Is(err, fs.ErrNotExist) {
		testkit.NoError(m.t, "forget the boot", err)
	}
}

// processes are the machine's, without zombies.
func (m *machine) processes() (pids []int) {
	first, count := m.subordinateIDs()
	folders, _ := filepath.Glob("/proc/[0-9]*")
	for _, folder := range folders {
		info, err := os.Stat(folder)
		if err != nil {
			continue
		}
		uid := int(info.Sys().(*syscall.Stat_t).Uid)
		pid, _ := strconv.Atoi(filepath.Base(folder))
		if (uid == m.uid || uid >= first && uid < first+count || uid == 0 && m.hasUserID(pid)) && testkit.Alive(pid) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// hasUserID reports whether a process whose folder in /proc is root's, as of processes that may not be traced, is the
// machine's.
func (m *machine) hasUserID(pid int) bool {
	first, count := m.subordinateIDs()
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(status)) {
		if ids, ok := strings.CutPrefix(line, "Uid:"); ok {
			uid, err := strconv.Atoi(strings.Fields(ids)[0])
			return err == nil && (uid == m.uid || uid >= first && uid < first+count)
		}
	}
	return false
}

func (m *machine) subordinateIDs() (first, count int) {
	text, err := os.ReadFile("/etc/subuid")
	testkit.NoError(m.t, "read the subordinate ids", err)
	for line := range strings.Lines(string(text)) {
		if fields := strings.Split(strings.TrimSpace(line), ":"); len(fields) == 3 && fields[0] == userName {
			first, err := strconv.Atoi(fields[1])
			count, cerr := strconv.Atoi(fields[2])
			testkit.NoError(m.t, "read the subordinate ids", cmp.Or(err, cerr))
			return first, count
		}
	}
	return 0, 0
}

// newNode returns the machine's node, which does not run yet.
func (m *machine) newNode(caddyfile string) *testnode.Node {
	m.t.Helper()
	n, err := testnode.New(testnode.Config{Bin: filepath.Join(home, "bin"), Home: filepath.Join(home, "node"), Caddyfile: caddyfile, Enter: enter()})
	testkit.NoError(m.t, "make the node", err)
	m.run("chown", "-R", userName+":", n.Home)
	m.t.Cleanup(func() {
		if m.t.Failed() {
			m.t.Logf("the node's log:\n%s", n.Log())
		}
		if n.Runs() {
			_ = n.Kill()
		}
	})
	return n
}

// inventory counts what Podman's storage and the node's folders contain, in the lists and as files.
type inventory struct {
	Layers, Containers, Images []string // in the lists
	Unlisted                   []string // folders of the storage that are in none
	Links                      []string // short names of layers that do not exist
	Disks, Creations, Run      []string // files of the disk helper and of the node
}

func (m *machine) inventory(t testing.TB) inventory {
	t.Helper()
	root := filepath.Join(home, ".local/share/containers/storage")
	var v inventory
	known := map[string]bool{"l": true, "tempdirs": true}
	read := func(kind string) (list []string) {
		var items []struct {
			ID    string
			Names []string
		}
		for _, name := range []string{kind + ".json", "volatile-" + kind + ".json"} {
			text, err := os.ReadFile(filepath.Join(root, "overlay-"+kind, name))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			testkit.NoError(t, "read the list", err)
			testkit.NoError(t, "decode the list", json.Unmarshal(text, &items))
			for _, i := range items {
				known[i.ID] = true
				list = append(list, cmp.Or(strings.Join(i.Names, " "), i.ID))
			}
		}
		slices.Sort(list)
		return list
	}
	v.Layers, v.Containers, v.Images = read("layers"), read("containers"), read("images")
	for _, folder := range []string{"overlay", "overlay-containers", "overlay-images"} {
		for _, name := range entries(filepath.Join(root, folder)) {
			info, err := os.Lstat(filepath.Join(root, folder, name))
			if err == nil && info.IsDir() && !known[name] {
				v.Unlisted = append(v.Unlisted, folder+"/"+name)
			}
		}
	}
	for _, name := range entries(filepath.Join(root, "overlay", "tempdirs")) {
		v.Unlisted = append(v.Unlisted, "overlay/tempdirs/"+name)
	}
	for _, name := range entries(filepath.Join(root, "overlay", "l")) {
		if _, err := os.Stat(filepath.Join(root, "overlay", "l", name)); err != nil {
			v.Links = append(v.Links, name)
		}
	}
	disks, err := filepath.Glob(filepath.Join(root, "doze", "*.disks", "*", "*"))
	testkit.NoError(t, "list the disks", err)
	for _, path := range disks {
		name, _ := filepath.Rel(root, path)
		v.Disks = append(v.Disks, name)
	}
	creations, err := filepath.Glob(filepath.Join(root, "doze", "*", "*"))
	testkit.NoError(t, "list the creations", err)
	for _, path := range creations {
		if name, _ := filepath.Rel(root, path); !strings.Contains(name, ".disks") {
			v.Creations = append(v.Creations, name)
		}
	}
	run, err := os.ReadDir(filepath.Join(home, "node", "run"))
	testkit.NoError(t, "list the run folders", err)
	for _, e := range run {
		if e.IsDir() && len(e.Name()) == 12 {
			v.Run = append(v.Run, e.Name())
		}
	}
	return v
}

func entries(dir string) (names []string) {
	list, _ := os.ReadDir(dir)
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}
