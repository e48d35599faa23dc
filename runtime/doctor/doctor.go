// Package doctor checks whether a node can run on this host, and finds for each problem
// the command that fixes it.
package doctor

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"
)

// Level is the severity of a Finding.
type Level string

const (
	LevelError   Level = "error"   // a sandbox could not run
	LevelWarning Level = "warning" // sandboxes run, but slower or less safely
	LevelInfo    Level = "info"    // the check passed
)

// Finding is the result of one check.
type Finding struct {
	Name   string `json:"name"` // such as "sub-uids"; stable
	OK     bool   `json:"ok"`
	Level  Level  `json:"level"`
	Detail string `json:"detail"`
	// Remedy is the command or change that fixes the problem; empty when OK.
	Remedy string `json:"remedy,omitempty"`
}

// Config selects the node to check for. The zero Config checks for this process's user,
// environment and home.
type Config struct {
	// User that the node runs as; default: this process's.
	User string
	// Home is the node's folder; default $DOZE_HOME, else ~/.local/share/doze.
	Home string
	// Cgroup is the node's subtree; default $DOZE_CGROUP.
	Cgroup string
	// RuntimeDir is Podman's folder for sockets; default $XDG_RUNTIME_DIR.
	RuntimeDir string
	// NetnsHelper is the path of doze-netns; default: in the folder of this program.
	NetnsHelper string
	// Ports that the node will listen on. Omit the ports on which a running node already
	// listens.
	Ports []int
	// WithoutStorage omits the check of Podman's storage, which takes a second with 500
	// containers, because Podman counts them. A caller that knows the driver checks it with
	// StorageDriver.
	WithoutStorage bool
	// WithoutCheckpoint omits the check of checkpoints, which starts Podman and CRIU for some
	// 0.2 s and finds no problem that an operator could solve.
	WithoutCheckpoint bool
	// Host answers the checks' questions; default: this machine.
	Host Host
}

// limit bounds all checks together. The slowest is Podman's own start-up, with some
// 0.2 s, or 2 s when it is the user's first.
const limit = 20 * time.Second

// checkFunc returns a Finding without its name.
type checkFunc func(context.Context, Config) Finding

type check struct {
	name string
	run  checkFunc
}

// Check runs all checks concurrently, for at most 20 seconds, and returns one finding for
// each in a fixed order.
func Check(ctx context.Context, cfg Config) []Finding {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cfg = cfg.withDefaults()
	checks := []check{
		{"user", runsAs},
		{"user namespaces", userNamespaces},
		{"apparmor", appArmor},
		{"sub-uids", subIDs("/etc/subuid", "--add-subuids")},
		{"sub-gids", subIDs("/etc/subgid", "--add-subgids")},
		{"newuidmap", idMappers},
		{"runtime folder", runtimeDir},
		{"cgroup", cgroup},
		{"limits", controllers},
		{"memory reclaim", reclaim},
		{"memory pressure", stalls},
		{"podman", podmanVersion},
		{"programs", programs},
		{storageCheck, storage},
		{"tun", tun},
		{"network", network},
		{"fuse", fuse},
		{"disk", disk},
		{"disk limits", diskLimits},
		{checkpointCheck, checkpoint},
		{"inotify", atLeast("fs.inotify.max_user_instances", minInotify, "each sandbox uses one inotify instance")},
		{"keyrings", atLeast("kernel.keys.maxkeys", minKeys, "each sandbox uses one keyring")},
		{"shared limits", shared},
		{"pipes", pipes},
		{"open files", openFiles},
	}
	checks = slices.DeleteFunc(checks, func(c check) bool {
		return cfg.WithoutStorage && c.name == storageCheck || cfg.WithoutCheckpoint && c.name == checkpointCheck
	})
	for _, port := range cfg.Ports {
		checks = append(checks, check{fmt.Sprintf("port %d", port), portFree(port)})
	}
	findings := make([]Finding, len(checks))
	var wg sync.WaitGroup
	for i, check := range checks {
		wg.Go(func() {
			findings[i] = check.run(ctx, cfg)
			findings[i].Name = check.name
		})
	}
	wg.Wait()
	return findings
}

// CanRun reports whether a sandbox could run: no check failed with LevelError.
func CanRun(findings []Finding) bool {
	return !slices.ContainsFunc(findings, func(f Finding) bool { return !f.OK && f.Level == LevelError })
}

func (c Config) withDefaults() Config {
	if c.Host == nil {
		c.Host = Machine{}
	}
	if program, err := os.Executable(); c.NetnsHelper == "" && err == nil {
		c.NetnsHelper = filepath.Join(filepath.Dir(program), "doze-netns")
	}
	if c.User == "" {
		c.User = strconv.Itoa(os.Getuid())
		if u, err := user.Current(); err == nil {
			c.User = u.Username
		}
	}
	home, _ := os.UserHomeDir()
	c.Home = cmp.Or(c.Home, os.Getenv("DOZE_HOME"), home+"/.local/share/doze")
	c.Cgroup = cmp.Or(c.Cgroup, os.Getenv("DOZE_CGROUP"))
	c.RuntimeDir = cmp.Or(c.RuntimeDir, os.Getenv("XDG_RUNTIME_DIR"))
	return c
}

func passed(format string, args ...any) Finding {
	return Finding{OK: true, Level: LevelInfo, Detail: fmt.Sprintf(format, args...)}
}

func failed(level Level, remedy, format string, args ...any) Finding {
	return Finding{Level: level, Detail: fmt.Sprintf(format, args...), Remedy: remedy}
}
