// Package doctor checks whether a node can run on this host, and finds for each problem
// the command that fixes it.
package doctor

import (
	"context"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
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
	// Host answers the checks' questions; default: this machine.
	Host Host
}

// limit bounds all checks together. The slowest is Podman's own start-up, with some
// 0.2 s, or 2 s when it is the user's first.
const limit = 20 * time.Second

// Check runs all checks concurrently, for at most 20 seconds, and returns one finding for
// each in a fixed order.
func Check(ctx context.Context, cfg Config) []Finding {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cfg = cfg.withDefaults()
	checks := []func(context.Context, Config) Finding{
		runsAs, userNamespaces, appArmor,
		subIDs("sub-uids", "/etc/subuid", "--add-subuids"),
		subIDs("sub-gids", "/etc/subgid", "--add-subgids"),
		idMappers, runtimeDir, cgroup, controllers, podmanVersion, programs, storage,
		tun, network, disk, inotify, keyrings, shared, pipes, openFiles,
	}
	for _, port := range cfg.Ports {
		checks = append(checks, portFree(port))
	}
	findings := make([]Finding, len(checks))
	var wg sync.WaitGroup
	for i, check := range checks {
		wg.Go(func() { findings[i] = check(ctx, cfg) })
	}
	wg.Wait()
	return findings
}

// CanRun reports whether a sandbox could run: no check failed with LevelError.
func CanRun(findings []Finding) bool {
	for _, f := range findings {
		if !f.OK && f.Level == LevelError {
			return false
		}
	}
	return true
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
	if c.Home == "" {
		c.Home = os.Getenv("DOZE_HOME")
	}
	if c.Home == "" {
		home, _ := os.UserHomeDir()
		c.Home = home + "/.local/share/doze"
	}
	if c.Cgroup == "" {
		c.Cgroup = os.Getenv("DOZE_CGROUP")
	}
	if c.RuntimeDir == "" {
		c.RuntimeDir = os.Getenv("XDG_RUNTIME_DIR")
	}
	return c
}

func passed(name, format string, args ...any) Finding {
	return Finding{Name: name, OK: true, Level: LevelInfo, Detail: fmt.Sprintf(format, args...)}
}

func failed(name string, level Level, remedy, format string, args ...any) Finding {
	return Finding{Name: name, Level: level, Detail: fmt.Sprintf(format, args...), Remedy: remedy}
}
