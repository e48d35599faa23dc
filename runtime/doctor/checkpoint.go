package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"
	"syscall"
)

const checkpointCheck = "checkpoint"

// checkpoint reports why a reboot ends the memory of sandboxes. It only informs, because the
// operator cannot change that. It tries each condition of a checkpoint on this host:
//
//   - The kernel lets the node's user suspend the seccomp filter that every sandbox has.
//   - Podman accepts checkpoints of rootless containers.
//   - crun was built with CRIU.
//   - CRIU is installed, and finds in Podman's user namespace what it requires.
func checkpoint(ctx context.Context, cfg Config) Finding {
	reasons := slices.DeleteFunc([]string{
		seccompObstacle(cfg),
		podmanObstacle(ctx, cfg),
		crunObstacle(ctx, cfg),
		criuObstacle(ctx, cfg),
	}, func(reason string) bool { return reason == "" })
	if len(reasons) == 0 {
		reasons = []string{"doze takes no checkpoints, although this host seems to permit them"}
	}
	return passed("a reboot ends the memory of sandboxes: %s", strings.Join(reasons, "; "))
}

// seccompObstacle returns why CRIU cannot dump a process with a seccomp filter, or "".
func seccompObstacle(cfg Config) string {
	switch err := cfg.Host.SuspendSeccomp(); {
	case err == nil:
		return ""
	case errors.Is(err, ErrUntraced):
		return fmt.Sprintf("the kernel may not suspend their seccomp filters: %v", err)
	case errors.Is(err, syscall.EINVAL):
		return "the kernel has no CONFIG_CHECKPOINT_RESTORE"
	case errors.Is(err, syscall.EPERM):
		return "the kernel suspends their seccomp filters, as CRIU requires, only with CAP_SYS_ADMIN on the host"
	default:
		return fmt.Sprintf("the kernel may not suspend their seccomp filters: %v", err)
	}
}

// unusedName is not the name of a container: names begin with a letter or a digit.
const unusedName = ".doctor"

// podmanObstacle returns why Podman takes no checkpoint, or "". Podman refuses rootless users
// before it searches for the container.
func podmanObstacle(ctx context.Context, cfg Config) string {
	// Its error is the last line: Podman may print warnings after it.
	_, err := podman(ctx, cfg, "--log-level=error", "container", "checkpoint", unusedName)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "podman is missing"
	case err == nil, strings.Contains(err.Error(), "no container with name or ID"):
		return ""
	}
	reason := err.Error() // exit status 125: Error: checkpointing a container requires root
	if _, message, ok := strings.Cut(reason, "Error: "); ok {
		reason = message
	}
	return "podman refuses: " + reason
}

// crunObstacle returns why crun takes no checkpoint, or "". Podman determines it in the same way.
func crunObstacle(ctx context.Context, cfg Config) string {
	path, err := cfg.Host.Find("crun")
	if err != nil {
		return "crun is missing"
	}
	if _, err := cfg.Host.Run(ctx, path, "checkpoint", "--help"); err != nil {
		return "crun is built without CRIU"
	}
	return ""
}

// criuError is a line of CRIU such as
//
//	Error (criu/cr-check.c:1056): Can't turn TCP repair mode ON: Operation not permitted
var criuError = regexp.MustCompile(`Error \([^)]*\): (.+)`)

// criuObstacle returns what CRIU lacks in Podman's user namespace, where crun starts it, or "".
func criuObstacle(ctx context.Context, cfg Config) string {
	path, err := cfg.Host.Find("criu")
	if err != nil {
		return "criu is not installed"
	}
	version, err := cfg.Host.Run(ctx, path, "--version") // Version: 4.1.1
	if err != nil {
		return fmt.Sprintf("criu does not run: %v", err)
	}
	version, _, _ = strings.Cut(strings.TrimPrefix(version, "Version: "), "\n")
	// CRIU's messages without Podman's.
	out, err := podman(ctx, cfg, "unshare", "--", "sh", "-c", `exec "$0" check 2>&1`, path)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	found := criuError.FindAllStringSubmatch(out, -1)
	if len(found) == 0 {
		return fmt.Sprintf("criu %s: %v", version, err)
	}
	var messages []string
	for _, match := range found[max(0, len(found)-2):] { // the last one alone may be a general one
		messages = append(messages, strings.TrimRight(match[1], ".\r"))
	}
	return fmt.Sprintf("criu %s: %s", version, strings.Join(messages, ", "))
}
