//go:build integration

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
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

// records fails unless the disk of the sandbox has each record that the writer acknowledged, and returns their
// number.
func (b *box) records() int {
	b.t.Helper()
	out := b.exec(`python3 -c '
n = int(open("/srv/acknowledged").read())
lines = open("/srv/log").read().splitlines()
assert lines[:n] == ["%08d" % i for i in range(n)], (n, lines[-3:])
print(n)
'`)
	n, err := strconv.Atoi(out)
	b.must(err)
	return n
}

// diskOperation is an operation on the disks of sandboxes.
type diskOperation struct {
	state types.State // of the sandbox before it
	run   func(ctx context.Context, n *node, b *box) error
	// check checks the sandbox after the node has started again. failed: the operation was not acknowledged.
	check func(t *testing.T, n *node, b *box, failed bool)
}

const killedSnapshot = "killed"

func createSnapshot(ctx context.Context, n *node, b *box) error {
	_, err := n.API.CreateSnapshot(ctx, b.id, types.CreateSnapshotRequest{Name: killedSnapshot})
	return err
}

// checkSnapshot: an acknowledged snapshot exists, and one that exists has all records.
func checkSnapshot(t *testing.T, n *node, b *box, failed bool) {
	t.Helper()
	b.records()
	list, err := n.API.Snapshots(testkit.Context(t), b.id)
	b.must(err)
	if len(list) == 0 {
		if !failed {
			t.Error("the snapshot is lost")
		}
		return
	}
	of := n.newBoxOf(t, list[0].ID)
	of.records()
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
		func(t *testing.T, n *node, b *box, failed bool) {
			t.Helper()
			b.records()
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
		func(t *testing.T, n *node, b *box, failed bool) {
			t.Helper()
			b.records()
			list, err := n.API.List(testkit.Context(t), client.Filter{})
			b.must(err)
			forks := slices.DeleteFunc(list, func(sb types.Sandbox) bool { return sb.ID == b.id })
			if !failed && len(forks) != 3 {
				t.Errorf("%d forks are left", len(forks))
			}
			for _, sb := range forks {
				of := n.boxOf(t, sb.ID)
				of.records()
				b.must(n.API.Delete(testkit.Context(t), of.id))
			}
		},
	},
}

// victims are the processes that take part in operations on disks.
var victims = map[string]func(n *node, b *box){
	"node":        func(n *node, b *box) { b.must(n.Kill()) },
	"disk helper": func(n *node, b *box) { n.killChildren(b.t, "doze-disk") },
	"podman":      func(n *node, b *box) { n.killChildren(b.t, "podman") },
	"guest":       func(_ *node, b *box) { b.killGuest() },
	"monitor":     func(_ *node, b *box) { b.killMonitor() },
}

// killChildren kills the children of the node that run a program, if there are any.
func (n *node) killChildren(t *testing.T, name string) {
	t.Helper()
	for _, pid := range n.children() {
		if program(pid) == name {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				t.Error(err)
			}
		}
	}
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

// killGuest kills the first process of the sandbox, which may not run.
func (b *box) killGuest() {
	for _, pid := range b.hostPIDs() {
		if program(pid) == "doze-guest" {
			_ = exec.Command("podman", "unshare", "kill", "-9", strconv.Itoa(pid)).Run() // it may have ended
		}
	}
}

// killMonitor kills the sandbox's conmon, which may not run.
func (b *box) killMonitor() {
	commands, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range commands {
		command, _ := os.ReadFile(path)
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err == nil && program(pid) == "conmon" && strings.Contains(string(command), "doze-"+b.id) {
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
		}
	}
}

// moment is a process and when it is killed: after a part of the duration of the operation.
type moment struct {
	victim string
	part   float64
}

var moments = []moment{
	{"node", 0.25}, {"node", 0.5}, {"node", 0.75}, {"disk helper", 0.3}, {"disk helper", 0.7}, {"podman", 0.4}, {"podman", 0.8}, {"guest", 0.5},
	{"monitor", 0.5},
}

// TestKilledProcessesLeaveWholeSnapshots kills the processes of the node at moments that are spread over the duration of each
// operation.
func TestKilledProcessesLeaveWholeSnapshots(t *testing.T) {
	n := ownNode(t)
	before := n.remains(t)
	for name, o := range diskOperations {
		var took time.Duration
		for _, at := range append([]moment{{}}, moments...) { // the first one is measured
			if at.victim == "guest" && o.state != types.StateRunning {
				continue
			}
			b := n.newBox(t)
			b.exec("mkdir /srv/files; cd /srv/files; seq 300 | xargs -n 20 touch; echo snapshot >/srv/which")
			_, err := n.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{Name: "writer", Command: types.Command{Command: writer}})
			b.must(err)
			testkit.Eventually(t, "the writer writes", func() bool { return b.try("cat /srv/acknowledged").ExitCode == 0 })
			if name == "restore" {
				b.must(createSnapshot(testkit.Context(t), n, b))
				b.exec("echo own >/srv/which")
			}
			b.enter(o.state)
			var ended sync.WaitGroup
			began := time.Now()
			ended.Go(func() { err = o.run(testkit.Context(t), n, b) })
			if at.victim != "" {
				// Chooses the moment of the kill; the checks hold for each.
				time.Sleep(time.Duration(float64(took) * at.part))
				victims[at.victim](n, b)
			}
			ended.Wait()
			switch at.victim {
			case "":
				b.must(err)
				took = time.Since(began)
			case "node":
				b.must(n.Start())
			}
			t.Run(fmt.Sprintf("%s/%s at %.0f %%", name, at.victim, 100*at.part), func(t *testing.T) { o.check(t, n, b, err != nil) })
			b.must(n.API.Delete(testkit.Context(t), b.id))
			n.awaitRemains(t, before)
		}
	}
}
