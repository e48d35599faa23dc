package testnode

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

const mib = 1 << 20

// MostGrowth is what a node may take for something huge that only passes through.
const MostGrowth = 64 * mib

// Memory is a field of a process' status, in bytes: man 5 proc_pid_status.
func Memory(t testing.TB, pid int, field string) int64 {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, value, ok := strings.Cut(string(status), "\n"+field+":")
	var kb int64
	if _, err := fmt.Sscanf(value, "%d kB", &kb); err != nil || !ok {
		t.Fatalf("the status has no %s", field)
	}
	return kb << 10
}

// StaysSmall runs f and fails if the node has taken more than MostGrowth at any
// time of it.
func (n *Node) StaysSmall(t testing.TB, f func()) {
	t.Helper()
	// Counts the peak from here on: man 5 proc_pid_clear_refs.
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", n.PID()), []byte("5"), 0); err != nil {
		t.Fatal(err)
	}
	before := Memory(t, n.PID(), "VmRSS")
	f()
	grown := Memory(t, n.PID(), "VmHWM") - before
	t.Logf("the node took %d MiB more at its peak", grown/mib)
	if grown > MostGrowth {
		t.Errorf("the node took %d MiB more, at most %d are right", grown/mib, MostGrowth/mib)
	}
}
