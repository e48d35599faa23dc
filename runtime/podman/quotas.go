package podman

import (
	"github.com/doze-run/doze/runtime/podman/ociruntime"
	"github.com/doze-run/doze/runtime/sandbox"
)

// ownNamespaces is how many namespaces of a kind the OCI runtime may make for a sandbox
// itself. crun makes one, and some mount namespaces more for a moment.
const ownNamespaces = 64

// Quotas of fanotify, the first an eighth of what Linux allows a user. Few programs use it: without
// privileges it does little more than inotify.
const (
	maxFanotifyGroups = 16
	maxFanotifyMarks  = 8192
)

// ownProcesses are more than the OCI runtime has while it starts a sandbox, which count as the
// sandbox's. They also make the pids controller refuse first where it is delegated.
const ownProcesses = 16

// writeQuotas stores what the OCI runtime reads when the container starts.
func (e *Engine) writeQuotas(id sandbox.ID, limits sandbox.Limits) error {
	e.quotas.Lock() // one container may be started many times at once
	defer e.quotas.Unlock()
	return quotasOf(limits).Write(e.files.quotas(id))
}

// quotasOf translates limits for the OCI runtime.
func quotasOf(limits sandbox.Limits) ociruntime.Quotas {
	q := limits.Quotas.WithDefaults()
	sysctls := map[string]int64{
		"max_user_namespaces":   1 + q.UserNamespaces, // the sandbox's own
		"max_inotify_instances": q.InotifyInstances,
		"max_inotify_watches":   q.InotifyWatches,
		"max_fanotify_groups":   maxFanotifyGroups,
		"max_fanotify_marks":    maxFanotifyMarks,
	}
	// Only within a user namespace of its own may a program make others.
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
