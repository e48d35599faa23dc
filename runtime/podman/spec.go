package podman

import (
	"fmt"
	"strings"
	"syscall"

	"github.com/containers/podman/v5/pkg/specgen"
	spec "github.com/opencontainers/runtime-spec/specs-go"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/storage/pkg/idtools"
	storage "go.podman.io/storage/types"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/freezer"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/podman/ociruntime"
	"github.com/doze-run/doze/runtime/sandbox"
)

// Labels of every container that the engine creates.
const (
	labelNode    = "doze.node"
	labelSandbox = "doze.sandbox"
	labelOrigin  = "doze.origin" // sandbox.ContainerSpec.Origin
)

// capabilities are the only ones of a sandbox's root. They are the minimum with which apt,
// dpkg, npm, pip, git and python work as root: with fewer, apt fails. They apply only in the
// sandbox's own user namespace. Podman's default adds SETPCAP, SETFCAP and SYS_CHROOT, which
// only nested containers and setcap need (file capabilities have no effect under
// no_new_privileges).
var capabilities = []string{
	"CAP_CHOWN",            // dpkg and tar change the owners of files
	"CAP_DAC_OVERRIDE",     // root reads and writes files of all users
	"CAP_FOWNER",           // dpkg sets modes and times of files after it changed their owners
	"CAP_FSETID",           // chmod preserves the setgid bit of folders such as /var/mail
	"CAP_KILL",             // root, and therefore the guest, ends processes of other users
	"CAP_SETGID",           // apt fetches as group nogroup; su, runuser
	"CAP_SETUID",           // apt fetches as user _apt; su, runuser
	"CAP_NET_BIND_SERVICE", // servers on ports 80 and 443
}

// Fixed limits of a container, which are independent of sandbox.Limits.
const (
	// maxLog bounds the log of the first process in bytes: when it is reached, conmon
	// starts an empty file. Only the last line is ever read.
	maxLog = 256 << 10
	// shmSize of /dev/shm in bytes, as Docker's and Podman's default. It is not larger
	// because without the memory controller this memory is not limited.
	shmSize = 64 << 20
	// maxTerminals of a sandbox. All sandboxes of the machine share 3,072, by the
	// kernel's defaults (kernel.pty.max less kernel.pty.reserve).
	maxTerminals = 256
	// maxFiles that a process may have open. The node's own limit applies if it is lower.
	maxFiles = 65536
	// oomScore makes the kernel end a sandbox rather than the node when the whole
	// machine runs out of memory. The guest's commands have a higher one.
	oomScore = 100
)

// MappedIDs are the user and group ids of sandboxes: the sub-ids 1 to 65535 of the node's user. The root of a sandbox is
// therefore not that user, and a process that escapes owns no file of the node.
var MappedIDs = idtools.IDMap{ContainerID: 0, HostID: 1, Size: 65535}

// ContainerName returns Podman's name of a sandbox's container. It is unique on the machine,
// because ids are.
func ContainerName(id sandbox.ID) string { return "doze-" + string(id) }

// generate returns the specification with which Podman creates the container. The image
// provides the root file system, the environment and the working directory; its entry point,
// command, user, volumes, health check and stop signal are not used. The Freezer sets the
// limits of memory, CPU and processes on the parent cgroup. The OCI runtime sets all others;
// it reads them when the container starts.
func generate(node, profile string, own files, c sandbox.ContainerSpec) *specgen.SpecGenerator {
	s := specgen.NewSpecGenerator(c.ImageRef, false)
	s.Name = ContainerName(c.ID)
	s.Labels = map[string]string{
		labelNode:    node,
		labelSandbox: string(c.ID),
	}
	s.Annotations = map[string]string{ociruntime.Annotation: own.quotas(c.ID)}
	if c.Origin != "" {
		s.Labels[labelOrigin] = c.Origin
	}
	s.Hostname = hostname(c.Name, c.ID)
	s.Env = c.Env
	s.EnvHost = new(false)
	s.HTTPProxy = new(false)
	s.Entrypoint = []string{guest.BinaryPath}
	s.User = "0:0"
	s.StopSignal = new(syscall.SIGTERM)
	s.Systemd = "false"
	s.SdNotifyMode = "ignore"
	s.LogConfiguration = &specgen.LogConfig{Driver: "k8s-file", Size: maxLog}
	s.HealthConfig = &manifest.Schema2HealthConfig{Test: []string{"NONE"}}

	s.Mounts = mounts(own, c)
	s.ImageVolumeMode = "ignore" // the image's volumes are on the sandbox's own disk
	s.ShmSize = new(int64(shmSize))

	s.CapDrop = []string{"ALL"}
	s.CapAdd = capabilities
	s.NoNewPrivileges = new(true)
	s.SeccompProfilePath = profile
	s.Privileged = new(false)
	for _, namespace := range []*specgen.Namespace{&s.UserNS, &s.PidNS, &s.IpcNS, &s.UtsNS, &s.CgroupNS} {
		namespace.NSMode = specgen.Private
	}
	ids := []idtools.IDMap{MappedIDs}
	s.IDMappings = &storage.IDMappingOptions{UIDMap: ids, GIDMap: ids}

	s.NetNS = specgen.Namespace{NSMode: specgen.NoNetwork}
	// The sandbox must not see the host's name servers, nor the files that Podman writes
	// on the host and mounts writable, see files.
	s.UseImageResolvConf = new(true)
	s.UseImageHosts = new(true)
	s.Passwd = new(false)

	s.CgroupParent = strings.TrimPrefix(c.CgroupParent, freezer.MountPoint)
	// conmon stays in the node's cgroup: frozen with the sandbox, it could not report the
	// sandbox's end, and its memory is not the sandbox's.
	s.CgroupsMode = "no-conmon"
	s.OOMScoreAdj = new(oomScore)
	openFiles := uint64(maxFiles)
	var nodes unix.Rlimit // the upper bound: only root may raise it
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &nodes); err == nil {
		openFiles = min(openFiles, nodes.Max)
	}
	s.Rlimits = []spec.POSIXRlimit{{Type: "nofile", Hard: openFiles, Soft: openFiles}}
	return s
}

// mounts returns the mounts of a sandbox. /.doze is a read-only tmpfs, so that the sandbox's
// root can neither move it nor replace its contents; it has no CAP_SYS_ADMIN to unmount it.
// (crun 1.8 ignores nosuid, nodev and noexec of writable mounts in a user namespace. That is
// harmless: set-user-id has no effect under no_new_privileges, nor have device nodes in a
// user namespace.)
func mounts(own files, c sandbox.ContainerSpec) []spec.Mount {
	bind := func(source, destination string, options ...string) spec.Mount {
		return spec.Mount{
			Destination: destination, Type: "bind", Source: source,
			Options: append(options, "bind", "nosuid", "nodev", "private"),
		}
	}
	return []spec.Mount{{
		Destination: "/.doze",
		Type:        "tmpfs",
		Source:      "tmpfs",
		Options:     []string{"ro", "nosuid", "nodev", "mode=0755", "size=64k", "notmpcopyup"},
	}, {
		Destination: "/dev/pts", // as Podman's, except for max
		Type:        "devpts",
		Source:      "devpts",
		Options: []string{"private", "rw", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5",
			fmt.Sprintf("max=%d", maxTerminals)},
	},
		bind(c.GuestBinary, guest.BinaryPath, "ro"),
		bind(c.RunDir, guest.RunDir, "rw", "noexec"),
		bind(own.hosts(c.ID), "/etc/hosts", "ro", "noexec"),
		bind(own.hostname(c.ID), "/etc/hostname", "ro", "noexec"),
		bind(own.resolvConf(), "/etc/resolv.conf", "ro", "noexec"),
		bind(own.containerEnv(), "/run/.containerenv", "ro", "noexec"),
	}
}

// hostname converts a sandbox's name into a label of RFC 1123. If no character remains, it
// returns the id.
func hostname(name string, id sandbox.ID) string {
	h := strings.Trim(strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '-':
			return r
		case r >= 'A' && r <= 'Z':
			return r - 'A' + 'a'
		case r == '_', r == '.', r == ' ':
			return '-'
		}
		return -1
	}, name[:min(len(name), 63)]), "-")
	if h == "" {
		return string(id)
	}
	return h
}
