//go:build integration

package e2e

import (
	"context"
	"fmt"
	"net/http/httptrace"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

// writer is a program that appends numbered records to /srv/log with fsync, and then puts their number into
// /srv/acknowledged.
const writer = `exec python3 -c '
import os
f = os.open("/srv/log", os.O_CREAT | os.O_RDWR | os.O_APPEND)
n = len(os.pread(f, 1 << 30, 0)) // 9
while True:
    os.write(f, b"%08d\n" % n); os.fsync(f); n += 1
    with open("/srv/acknowledged.new", "w") as i: i.write(str(n)); i.flush(); os.fsync(i.fileno())
    os.rename("/srv/acknowledged.new", "/srv/acknowledged")
'`

// startWriter starts the writer, and returns when it has acknowledged a record.
func (b *box) startWriter() {
	b.t.Helper()
	_, err := b.node.API.StartProcess(testkit.Context(b.t), b.id, types.StartProcessRequest{Name: "writer", Command: types.Command{Command: writer}})
	b.must(err)
	testkit.Eventually(b.t, "the writer writes", func() bool { return b.try("cat /srv/acknowledged").ExitCode == 0 })
}

// acknowledged returns how many records the writer has acknowledged.
func (b *box) acknowledged() int {
	b.t.Helper()
	n, err := strconv.Atoi(b.exec("cat /srv/acknowledged"))
	b.must(err)
	return n
}

// records fails unless the disk has the first records, at least this many, and no part of another.
func (b *box) records(least int) {
	b.t.Helper()
	b.exec(fmt.Sprintf(`python3 -c '
lines = open("/srv/log").read().split("\n")
assert lines.pop() == "", lines[-3:]
assert lines == ["%%08d" %% i for i in range(len(lines))], lines[-3:]
assert len(lines) >= %d, len(lines)
'`, least))
}

// diskOperation is an operation on the disks of sandboxes.
type diskOperation struct {
	state types.State // of the sandbox before it
	run   func(ctx context.Context, n *node, b *box) error
	// check checks the sandbox after the node has started again. failed: the operation was not acknowledged. Each disk has
	// at least the first records.
	check func(t *testing.T, n *node, b *box, failed bool, records int)
}

const killedSnapshot = "killed"

func createSnapshot(ctx context.Context, n *node, b *box) error {
	_, err := n.API.CreateSnapshot(ctx, b.id, types.CreateSnapshotRequest{Name: killedSnapshot})
	return err
}

// checkSnapshot: an acknowledged snapshot exists, and one that exists has all records.
func checkSnapshot(t *testing.T, n *node, b *box, failed bool, records int) {
	t.Helper()
	b.records(records)
	list, err := n.API.Snapshots(testkit.Context(t), b.id)
	b.must(err)
	if len(list) == 0 {
		if !failed {
			t.Error("the snapshot is lost")
		}
		return
	}
	of := n.newBoxOf(t, list[0].ID)
	of.records(records)
	b.must(n.API.Delete(testkit.Context(t), of.id))
	b.must(n.API.DeleteSnapshot(testkit.Context(t), list[0].ID))
}

// diskOperations are the operations during which processes are killed.
var diskOperations = map[string]diskOperation{
	"snapshot of a running sandbox": {types.StateRunning, createSnapshot, checkSnapshot},
	"snapshot of a stopped sandbox": {types.StateStopped, createSnapshot, checkSnapshot},
	"restore": {
		types.StateRunning,
		func(ctx context.Context, n *node, b *box) error {
			_, err := n.API.Restore(ctx, b.id, types.RestoreRequest{SnapshotID: killedSnapshot}, true)
			return err
		},
		func(t *testing.T, n *node, b *box, failed bool, records int) {
			t.Helper()
			b.records(records)
			if which := b.exec("cat /srv/which"); which != "snapshot" && (!failed || which != "own") {
				t.Errorf("the sandbox has the disk %q", which)
			}
			b.must(n.API.DeleteSnapshot(testkit.Context(t), killedSnapshot))
		},
	},
	"fork": {
		types.StateRunning,
		func(ctx context.Context, n *node, b *box) error {
			_, err := n.API.Fork(ctx, b.id, types.ForkRequest{Count: 3, Names: []string{"fork-a", "fork-b", "fork-c"}})
			return err
		},
		func(t *testing.T, n *node, b *box, failed bool, records int) {
			t.Helper()
			b.records(records)
			list, err := n.API.List(testkit.Context(t), client.Filter{})
			b.must(err)
			forks := slices.DeleteFunc(list, func(sb types.Sandbox) bool { return sb.ID == b.id })
			if len(forks) != 3 && (!failed || len(forks) != 0) {
				t.Errorf("%d forks of 3 are left", len(forks))
			}
			for _, sb := range forks {
				of := n.boxOf(t, sb.ID)
				of.records(records)
				b.must(n.API.Delete(testkit.Context(t), of.id))
			}
		},
	},
}

// victims kill the processes that take part in operations on disks, and return how many they have killed.
var victims = map[string]func(n *node, b *box) int{
	"node":        func(n *node, b *box) int { b.must(n.Kill()); return 1 },
	"disk helper": func(n *node, _ *box) int { return signal(n.diskHelpers(), syscall.SIGKILL) },
	// The service outlives a killed node.
	"podman":  func(n *node, _ *box) int { return signal(processes("podman", n.Home), syscall.SIGKILL) },
	"guest":   func(_ *node, b *box) int { return b.killPrograms() },
	"monitor": func(_ *node, b *box) int { return signal(b.monitors(), syscall.SIGKILL) },
}

// diskHelpers returns the disk helper of the node, if it runs.
func (n *node) diskHelpers() []int {
	return slices.DeleteFunc(n.children(), func(pid int) bool { return program(pid) != "doze-disk" })
}

// signal sends a signal to processes, and returns how many of them existed.
func signal(pids []int, s syscall.Signal) (count int) {
	for _, pid := range pids {
		if syscall.Kill(pid, s) == nil {
			count++
		}
	}
	return count
}

// program returns the name of the program that a process runs; empty if it has ended.
func program(pid int) string {
	command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	first, _, _ := strings.Cut(string(command), "\x00")
	if first == "" {
		return ""
	}
	return filepath.Base(first)
}

// killPrograms kills the guest and all other processes of the sandbox, which belong to other users than the node.
func (b *box) killPrograms() int {
	b.t.Helper()
	count := len(b.hostPIDs())
	b.must(os.WriteFile(filepath.Join(os.Getenv("DOZE_CGROUP"), "sandboxes", b.id, "cgroup.kill"), []byte("1"), 0))
	return count
}

// monitors returns the conmon of the sandbox, if it runs.
func (b *box) monitors() []int { return processes("conmon", "doze-"+b.id) }

// processes returns the processes that run a program and whose command contains a text.
func processes(name, text string) (pids []int) {
	commands, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range commands {
		command, _ := os.ReadFile(path)
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err == nil && program(pid) == name && strings.Contains(string(command), text) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// moment is a process and when it is killed: after a part of the duration of the operation. At 0, the kill surely hits the
// operation, which waits for the disk helper. Later, the operation may have ended.
type moment struct {
	victim string
	part   float64
}

var moments = []moment{
	{"node", 0}, {"node", 0.25}, {"node", 0.5}, {"node", 0.75}, {"disk helper", 0}, {"disk helper", 0.3}, {"disk helper", 0.7},
	{"podman", 0}, {"podman", 0.4}, {"podman", 0.8}, {"guest", 0}, {"guest", 0.5}, {"monitor", 0}, {"monitor", 0.5},
}

// interrupt runs an operation and kills processes after a delay, unless the operation has ended. With the delay 0 it cannot
// end before, because the disk helper, which it needs, is suspended until the kill. It returns the number of processes
// killed.
func (n *node) interrupt(t *testing.T, delay time.Duration, run func(context.Context) error, kill func() int) (killed int, err error) {
	t.Helper()
	var helpers []int
	if delay == 0 {
		helpers = n.diskHelpers()
		if signal(helpers, syscall.SIGSTOP) == 0 {
			t.Error("the node has no disk helper")
		}
		defer signal(helpers, syscall.SIGCONT)
	}
	requested, ended := make(chan struct{}), make(chan error, 1)
	ctx := httptrace.WithClientTrace(testkit.Context(t), &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) { close(requested) }})
	go func() { ended <- run(ctx) }()
	testkit.Closed(t, "the request", requested)
	select {
	case err := <-ended:
		return 0, err
	case <-time.After(delay):
	}
	killed = kill()
	signal(helpers, syscall.SIGCONT)
	return killed, testkit.Receive(t, "the end of the operation", ended)
}

// TestKilledProcessesLeaveWholeSnapshots kills the processes of the node at moments that are spread over the duration of each
// operation.
func TestKilledProcessesLeaveWholeSnapshots(t *testing.T) {
	n := ownNode(t)
	before := n.remains(t)
	for name, o := range diskOperations {
		var took time.Duration
		for _, at := range append([]moment{{}}, moments...) { // the first one is measured
			// They do not run, or the restore ends them at its beginning.
			if (o.state != types.StateRunning || name == "restore") && (at.victim == "guest" || at.victim == "monitor") {
				continue
			}
			t.Run(fmt.Sprintf("%s/%s at %.0f %%", name, at.victim, 100*at.part), func(t *testing.T) {
				b := n.newBox(t)
				b.exec("mkdir /srv/files; cd /srv/files; seq 300 | xargs -n 20 touch; echo snapshot >/srv/which")
				b.startWriter()
				records := b.acknowledged()
				if name == "restore" {
					b.must(createSnapshot(testkit.Context(t), n, b))
					b.exec("echo own >/srv/which")
				}
				b.enter(o.state)
				run := func(ctx context.Context) error { return o.run(ctx, n, b) }
				var err error
				if at.victim == "" {
					began := time.Now()
					b.must(run(testkit.Context(t)))
					took = time.Since(began)
				} else {
					var killed int
					killed, err = n.interrupt(t, time.Duration(float64(took)*at.part), run, func() int { return victims[at.victim](n, b) })
					if at.part == 0 && killed == 0 {
						t.Errorf("no %s was killed", at.victim)
					}
					if at.victim == "node" && killed > 0 {
						if at.part == 0 && err == nil {
							t.Error("the operation succeeded")
						}
						b.must(n.Start())
					}
				}
				o.check(t, n, b, err != nil, records)
				b.must(n.API.Delete(testkit.Context(t), b.id))
			})
			if t.Failed() {
				return
			}
			n.awaitRemains(t, before)
		}
	}
}
