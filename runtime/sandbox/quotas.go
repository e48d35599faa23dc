package sandbox

import (
	"cmp"
	"fmt"
	"math"
)

// Quotas bound what the kernel counts by user, over all users of a sandbox. Without them one
// sandbox could use up what all sandboxes of the node share. Zero means the default.
type Quotas struct {
	UserNamespaces    int64 `json:"user_namespaces,omitempty"`     // that programs in it may make, in each other too
	InotifyInstances  int64 `json:"inotify_instances,omitempty"`   // such as one for each program that watches files
	InotifyWatches    int64 `json:"inotify_watches,omitempty"`     // files and folders
	PendingSignals    int64 `json:"pending_signals,omitempty"`     // queued signals and POSIX timers
	MessageQueueBytes int64 `json:"message_queue_bytes,omitempty"` // of POSIX message queues
}

// DefaultQuotas returns the quotas of a size that sets no others. docs/RATIONALE.md has the
// reasons, under "Why the quotas of a sandbox are in a user namespace around it".
func DefaultQuotas() Quotas {
	return Quotas{
		InotifyInstances:  128,
		InotifyWatches:    65_536,
		PendingSignals:    1024,
		MessageQueueBytes: 200 << 10,
	}
}

// WithDefaults returns q with its zeros replaced by defaults.
func (q Quotas) WithDefaults() Quotas {
	d := DefaultQuotas()
	return Quotas{
		UserNamespaces:    cmp.Or(q.UserNamespaces, d.UserNamespaces),
		InotifyInstances:  cmp.Or(q.InotifyInstances, d.InotifyInstances),
		InotifyWatches:    cmp.Or(q.InotifyWatches, d.InotifyWatches),
		PendingSignals:    cmp.Or(q.PendingSignals, d.PendingSignals),
		MessageQueueBytes: cmp.Or(q.MessageQueueBytes, d.MessageQueueBytes),
	}
}

// maxQuota is less than the kernel's own bound, 1<<31 - 1, by what a sandbox needs itself.
const maxQuota = math.MaxInt32 / 2

func (q Quotas) validate(size string) error {
	for _, quota := range []struct {
		name  string
		value int64
	}{
		{"user_namespaces", q.UserNamespaces},
		{"inotify_instances", q.InotifyInstances},
		{"inotify_watches", q.InotifyWatches},
		{"pending_signals", q.PendingSignals},
		{"message_queue_bytes", q.MessageQueueBytes},
	} {
		if quota.value < 0 || quota.value > maxQuota {
			return &InvalidError{
				Field: fmt.Sprintf("size %s: %s", size, quota.name), Reason: fmt.Sprintf("%d is out of range", quota.value),
				Want: fmt.Sprintf("use 0 to %d", int64(maxQuota)),
			}
		}
	}
	return nil
}
