//go:build integration

package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// makeKinds writes files of each kind, and describe prints all that a snapshot must preserve of them.
const (
	makeKinds = `set -e
mkdir -p /srv/kinds/empty /srv/kinds/a && cd /srv/kinds
echo one >a/first && ln a/first second && ln -s a/first link && ln -s /nowhere dangling
mkfifo fifo && chmod 620 fifo
printf begin >sparse && truncate -s 5M sparse && printf end >>sparse
echo '#!/bin/sh' >program && chmod 4755 program && chown 1000:2000 program && chmod u+s program
touch -d @981173106.000000789 a/first && chmod 1777 empty
setfattr -n user.note -v kept a/first 2>/dev/null || python3 -c 'import os; os.setxattr("a/first", "user.note", b"kept")'
rm -rf /usr/share/doc && rm /etc/motd 2>/dev/null || true
`
	describe = `cd /srv/kinds && find . -printf '%P %y %m %U:%G %n %T@ %l\n' | sort
sha256sum $(find . -type f | sort)
python3 -c '
import os
print(os.getxattr("a/first", "user.note"))
f, end = os.open("sparse", os.O_RDONLY), 0
while end < os.fstat(f).st_size: # it ends with data
    begin = os.lseek(f, end, os.SEEK_DATA)
    end = os.lseek(f, begin, os.SEEK_HOLE)
    print(begin, end)
'
ls -d /usr/share/doc /etc/motd 2>&1 || true`
)

func (b *box) snapshot(req types.CreateSnapshotRequest) types.Snapshot {
	b.t.Helper()
	s, err := b.node.API.CreateSnapshot(testkit.Context(b.t), b.id, req)
	b.must(err)
	b.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
		defer cancel()
		if err := b.node.API.DeleteSnapshot(ctx, s.ID); err != nil && !problem.Has(err, problem.SnapshotNotFound) {
			b.t.Error(err)
		}
	})
	return s
}

func (b *box) restore(snapshot string) {
	b.t.Helper()
	_, err := b.node.API.Restore(testkit.Context(b.t), b.id, types.RestoreRequest{SnapshotID: snapshot}, false)
	b.must(err)
}

// newBoxOf creates a sandbox from a snapshot.
func (n *node) newBoxOf(t *testing.T, snapshot string) *box {
	t.Helper()
	sb, _, err := n.API.Create(testkit.Context(t), types.CreateSandboxRequest{Snapshot: snapshot})
	if err != nil {
		t.Fatal(err)
	}
	return n.boxOf(t, sb.ID)
}

func TestSnapshotHasEverythingInEachState(t *testing.T) {
	n := commonNode(t)
	for _, state := range []types.State{types.StateRunning, types.StateAsleep, types.StateStopped} {
		t.Run(string(state), func(t *testing.T) {
			b := n.newBox(t)
			b.exec(makeKinds)
			want := b.exec(describe)
			switch state {
			case types.StateAsleep:
				b.sleep()
			case types.StateStopped:
				b.stop()
			}
			s := b.snapshot(types.CreateSnapshotRequest{Quiesce: state != types.StateAsleep}) // it has no effect
			if b.state() != state {
				t.Errorf("the snapshot left the sandbox %s", b.state())
			}
			if running := state == types.StateRunning; running != (s.FrozenMS > 0) {
				t.Errorf("programs were stopped for %v ms", s.FrozenMS)
			}
			testkit.Diff(t, "source after the snapshot", b.exec(describe), want)
			b.exec("echo changed >/srv/kinds/a/first; rm /srv/kinds/link; echo new >/srv/new")
			of := n.newBoxOf(t, s.ID)
			testkit.Diff(t, "sandbox of the snapshot", of.exec(describe), want)
			of.exec("rm -r /srv/kinds")
			b.restore(s.ID)
			testkit.Diff(t, "restored sandbox", b.exec(describe), want)
			if got := b.exec("ls /srv"); strings.Contains(got, "new") {
				t.Errorf("the restored sandbox has a file from after the snapshot: %s", got)
			}
		})
	}
}

// A snapshot of paths has everything at these, with the image's files, and a restore replaces only them.
func TestSnapshotOfPaths(t *testing.T) {
	n := commonNode(t)
	const etc = `cd /etc && find apt alternatives -printf '%P %y %m %U:%G %l\n' | sort; sha256sum $(find apt -type f | sort)`
	for _, state := range []types.State{types.StateRunning, types.StateAsleep, types.StateStopped} {
		t.Run(string(state), func(t *testing.T) {
			b := n.newBox(t)
			b.exec(makeKinds)
			b.exec("rm -r /etc/apt/sources.list.d; echo 1 >/etc/apt/own; echo 1 >/srv/rest")
			want, wantEtc := b.exec(describe), b.exec(etc)
			switch state {
			case types.StateAsleep:
				b.sleep()
			case types.StateStopped:
				b.stop()
			}
			if _, err := n.API.CreateSnapshot(testkit.Context(t), b.id, types.CreateSnapshotRequest{Paths: []string{"/srv", "/none/a"}}); !problem.Has(err, problem.RequestInvalid) || !strings.Contains(err.Error(), `"/none" does not exist`) {
				t.Errorf("a path that does not exist: %v", err)
			}
			paths := []string{"/srv/kinds", "/etc/apt", "/etc/alternatives"}
			s := b.snapshot(types.CreateSnapshotRequest{Paths: paths})
			testkit.Diff(t, "paths", s.Paths, paths)
			if b.state() != state {
				t.Errorf("the snapshot left the sandbox %s", b.state())
			}
			if running := state == types.StateRunning; running != (s.FrozenMS > 0) || s.Parent != "" || s.SizeBytes == 0 {
				t.Errorf("the snapshot is %+v", s)
			}
			b.exec("echo changed >/srv/kinds/a/first; rm /srv/kinds/link /etc/apt/own; echo 2 >/etc/apt/new; echo 2 >/srv/rest; echo 2 >/srv/new; chmod 701 /srv")
			b.restore(s.ID)
			testkit.Diff(t, "restored paths", b.exec(describe), want)
			testkit.Diff(t, "restored paths of the image", b.exec(etc), wantEtc)
			if got := b.exec("cat /srv/rest /srv/new; stat -c %a /srv"); got != "2\n2\n701" {
				t.Errorf("the rest of the disk is %q", got)
			}
			of := n.newBoxOf(t, s.ID)
			testkit.Diff(t, "paths in a new sandbox", of.exec("rm -rf /usr/share/doc /etc/motd; "+describe), want)
			testkit.Diff(t, "paths of the image in a new sandbox", of.exec(etc), wantEtc)
			if got := of.exec("ls /srv"); got != "kinds" {
				t.Errorf("the new sandbox has %q", got)
			}
			again := of.snapshot(types.CreateSnapshotRequest{})
			testkit.Diff(t, "a snapshot of the new sandbox", n.newBoxOf(t, again.ID).exec(etc), wantEtc)
		})
	}
}

func TestSnapshotOfASnapshot(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	var all []types.Snapshot
	for i := range 4 {
		b.exec(fmt.Sprintf("echo %d >/srv/n; echo %d >/srv/f%d", i, i, i))
		if i%2 == 1 {
			b.stop()
		}
		all = append(all, b.snapshot(types.CreateSnapshotRequest{}))
	}
	for i, s := range all {
		of := n.newBoxOf(t, s.ID)
		if got, want := of.exec("cat /srv/n; ls /srv | grep -c ^f"), fmt.Sprintf("%d\n%d", i, i+1); got != want {
			t.Errorf("snapshot %d has %q, want %q", i, got, want)
		}
	}
	// Disks outlive the snapshots that they are based on.
	last := n.newBoxOf(t, all[3].ID)
	for _, s := range all {
		b.must(n.API.DeleteSnapshot(testkit.Context(t), s.ID))
	}
	b.must(n.API.Delete(testkit.Context(t), b.id))
	last.stop()
	if got := last.exec("cat /srv/n; ls /srv | grep -c ^f"); got != "3\n4" {
		t.Errorf("after the deletion of its snapshots it has %q", got)
	}
}

func TestForksAreIndependent(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	b.exec("echo source >/srv/f")
	b.start("program", "exec sleep 100000", nil)
	const program = "pgrep -x sleep && cut -d ' ' -f 22 /proc/$(pgrep -x sleep)/stat" // its pid and when it started
	running := b.exec(program)
	forks, err := n.API.Fork(testkit.Context(t), b.id, types.ForkRequest{Count: 3})
	b.must(err)
	var boxes []*box
	for _, sb := range forks {
		boxes = append(boxes, n.boxOf(t, sb.ID))
	}
	for i, f := range boxes {
		f.exec(fmt.Sprintf("cat /srv/f && echo fork %d >/srv/f", i))
	}
	for i, f := range boxes {
		if got := f.exec("cat /srv/f"); got != fmt.Sprintf("fork %d", i) {
			t.Errorf("fork %d has %q", i, got)
		}
	}
	if got := b.exec("cat /srv/f"); got != "source" {
		t.Errorf("the source has %q", got)
	}
	testkit.Diff(t, "the program of the source", b.exec(program), running)
	snapshots, err := n.API.Snapshots(testkit.Context(t), b.id)
	if err != nil || len(snapshots) != 0 {
		t.Errorf("the fork left %v, %v", snapshots, err)
	}
}

func TestRestoreStartsDeclaredProcesses(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	b.exec("echo old >/srv/page")
	_, err := n.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{
		Name: "web", Restart: "on_wake", Command: types.Command{Command: "exec python3 -m http.server 8000 --directory /srv"},
	})
	b.must(err)
	s := b.snapshot(types.CreateSnapshotRequest{Name: "before-" + b.id})
	b.exec("echo new >/srv/page")
	b.restore(s.Name)
	if b.state() != types.StateRunning {
		t.Errorf("the restored sandbox is %s", b.state())
	}
	testkit.Eventually(t, "the declared server serves the old file", func() bool {
		return b.try("curl -sS http://localhost:8000/page").Stdout == "old\n"
	})
	if events := b.awaitEvents(types.EventTypeRestored, 1); events[0].Snapshot != s.ID {
		t.Errorf("event %+v", events[0])
	}
	_, err = n.API.CreateSnapshot(testkit.Context(t), b.id, types.CreateSnapshotRequest{Name: s.Name})
	if p, ok := errors.AsType[*problem.Problem](err); !ok || p.Code != problem.SnapshotExists {
		t.Errorf("second snapshot with the name: %v", err)
	}
}

// TestRecordsOfAWriterAreWhole takes snapshots while a program writes and syncs numbered records.
func TestRecordsOfAWriterAreWhole(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	_, err := n.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{Command: types.Command{Command: `exec python3 -c '
import os
f = os.open("/srv/log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
n = 0
while True:
    os.write(f, b"%08d\n" % n); os.fsync(f); n += 1
    if n % 50 == 0:
        with open("/srv/index.new", "w") as i: i.write(str(n)); i.flush(); os.fsync(i.fileno())
        os.rename("/srv/index.new", "/srv/index")
'`}})
	b.must(err)
	for range 5 {
		testkit.Eventually(t, "the writer writes", func() bool { return b.try("cat /srv/index").Stdout != "" })
		s := b.snapshot(types.CreateSnapshotRequest{})
		of := n.newBoxOf(t, s.ID)
		of.exec(`python3 -c '
lines = open("/srv/log").read().splitlines()
assert lines == ["%08d" % i for i in range(len(lines))], lines[-3:]
n = int(open("/srv/index").read())
assert n <= len(lines), (n, len(lines))
'`)
	}
}

func TestKeepLastAndMaxAgeDeleteSnapshots(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	named := b.snapshot(types.CreateSnapshotRequest{Name: "named-" + b.id})
	b.snapshot(types.CreateSnapshotRequest{})
	second := b.snapshot(types.CreateSnapshotRequest{})
	third := b.snapshot(types.CreateSnapshotRequest{RetainLast: 2, MaxAge: new(types.Duration(time.Hour))})
	list, err := n.API.Snapshots(testkit.Context(t), b.id)
	b.must(err)
	ids := make([]string, 0, len(list))
	for _, s := range list {
		ids = append(ids, s.ID)
	}
	testkit.Diff(t, "snapshots", ids, []string{third.ID, second.ID, named.ID})
	if got := time.Until(list[0].ExpiresAt); got <= 0 || got > time.Hour {
		t.Errorf("the last one expires in %v", got)
	}
}
