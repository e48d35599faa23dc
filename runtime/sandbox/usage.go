package sandbox

import (
	"context"
	"time"
)

// Usage is the CPU time, the memory and the disk of a sandbox.
type Usage struct {
	CPU    time.Duration // since its cgroup was made, which is at most since the machine booted
	Memory int64         // bytes, see Freezer.Memory; 0 when stopped
	Disk   DiskUsage     // as last measured, which may be minutes ago
}

// Usage reads the usage of a sandbox without waking it. Values that cannot be read, as of a
// sandbox that has not run since the machine booted, are zero.
func (m *Manager) Usage(ctx context.Context, id ID) (Usage, error) {
	b, err := m.live(id)
	if err != nil {
		return Usage{}, err
	}
	u := Usage{Disk: b.view.Load().Disk}
	u.CPU, _ = m.deps.Freezer.CPUTime(ctx, id)
	if b.pid.Load() != 0 {
		u.Memory, _ = m.deps.Freezer.Memory(ctx, id)
	}
	return u, nil
}
