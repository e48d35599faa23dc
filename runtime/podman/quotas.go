package podman

import (
	"github.com/doze-run/doze/runtime/podman/ociruntime"
	"github.com/doze-run/doze/runtime/sandbox"
)

// ownNamespaces is how many namespaces of a kind the OCI runtime may create for the sandbox.
// crun creates one, and temporarily some more mount namespaces.
const ownNamespaces = 64

// Quotas of fanotify; the first is an eighth of Linux's default for a user. Few programs use
// fanotify, because it offers little more than inotify to unprivileged ones.
const (
	maxFanotifyGroups = 16
	maxFanotifyMarks  = 8192
)

// ownProcesses is an upper bound of the OCI runtime's processes during a sandbox's start,
// which count as the sandbox's. With it, the pids controller refuses first if it is
// delegated.
const ownProcesses = 16

// writeQuotas writes the file that the OCI runtime reads when the container starts.
func (e *Engine) writeQuotas(id sandbox.ID, limits sandbox.Limits) error {
	e.quotas.Lock() // concurrent calls may start the same container
	defer e.quotas.Unlock()
	return quotasOf(limits).Write(e.files.quotas(id))
}

// quotasOf converts limits for the OCI runtime.
func quotasOf(limits sandbox.Limits) ociruntime.Quotas {
	q := limits.Quotas.WithDefaults()
	sysctls := map[string]int64{
		"max_user_namespaces":   1 + q.UserNamespaces, // 1 is the sandbox's own
		"max_inotify_instances": q.InotifyInstances,
		"max_inotify_watches":   q.InotifyWatches,
		"max_fanotify_groups":   maxFanotifyGroups,
		"max_fanotify_marks":    maxFanotifyMarks,
	}
	// A program may create other namespaces only in a user namespace that it created.
	for _, kind := range []string{"cgroup", "ipc", "mnt", "net", "pid", "time", "uts"} {
		sysctls["max_"+kind+"_namespaces"] = ownNamespaces + q.UserNamespaces
	}
	processes := limits.PIDs
	if processes != 0 {
		processes += ownProcesses
	}
	return ociruntime.Quotas{
		Sysctls:    sysctls,
		NPROC:      processes,
		SIGPENDING: q.PendingSignals,
		MSGQUEUE:   q.MessageQueueBytes,
	}
}
