package sandbox

import (
	"context"
	"time"
)

// Usage is what a sandbox uses of the machine.
type Usage struct {
	CPU    time.Duration // in all since its cgroup was made, such as by a boot of the machine
	Memory int64         // bytes, see Freezer.Memory; 0 when stopped
}

// Usage reads what a sandbox uses. It wakes nothing. What cannot be read, as of a
// sandbox that has never run since the machine booted, is zero.
func (m *Manager) Usage(ctx context.Context, id ID) (Usage, error) {
	b, err := m.live(id)
	if err != nil {
		return Usage{}, err
	}
	return b.usage(ctx), nil
}

func (b *liveSandbox) usage(ctx context.Context) (u Usage) {
	u.CPU, _ = b.m.freezer.CPUTime(ctx, b.id)
	if b.pid.Load() != 0 {
		u.Memory, _ = b.m.freezer.Memory(ctx, b.id)
	}
	return u
}
