//go:build integration

package e2e

import (
	"strconv"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// limitedNode is a node with the size small: 64 MiB in 2,000 files.
func limitedNode(t *testing.T) *node {
	t.Helper()
	return &node{testnode.Start(t, testnode.Config{Caddyfile: caddyfile(t, "size small {\n cpus 1\n memory 512MiB\n pids 256\n disk 64MiB\n files 2000\n}")})}
}

func small(req *types.CreateSandboxRequest) { req.Size = "small" }

// runToTheStop runs a command until its sandbox is stopped.
func (b *box) runToTheStop(command string) {
	b.t.Helper()
	result, err := b.node.API.Exec(testkit.Context(b.t), b.id, client.ExecRequest{Command: types.Command{Command: command}, Timeout: types.Duration(testkit.Patience)})
	if err == nil {
		b.t.Errorf("%s ended: %+v", command, result)
	}
}

func TestSandboxBeyondTheLimitOfItsDiskIsStoppedAndStartsAgain(t *testing.T) {
	n := limitedNode(t)
	neighbor := n.newBox(t, small)
	neighbor.exec("dd if=/dev/zero of=/srv/file bs=1M count=50 2>&1")
	about, err := n.API.Node(testkit.Context(t))
	neighbor.must(err)
	if size := about.Sizes["small"]; size.DiskBytes != 64<<20 || size.Files != 2000 {
		t.Errorf("the node has the size %+v", size)
	}
	for _, c := range []struct{ name, fill, free string }{
		{"bytes", "dd if=/dev/zero of=/srv/big bs=1M count=150; sleep 1000", "rm /srv/big"},
		{"files", "cd /srv; mkdir many; cd many; seq 3000 | xargs touch; sleep 1000", "rm -r /srv/many"},
		{"deleted file", "exec 3>/srv/open; rm /srv/open; dd if=/dev/zero bs=1M count=150 >&3; sleep 1000", "true"},
		{"run folder", "dd if=/dev/zero of=/.doze/run/big bs=1M count=150; sleep 1000", "rm /.doze/run/big"},
		{"another user", "setpriv --reuid 1000 --regid 1000 --clear-groups sh -c 'umask 077; mkdir /tmp/own; cd /tmp/own; dd if=/dev/zero of=big bs=1M count=150'; sleep 1000", "rm -r /tmp/own"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := n.newBox(t, small)
			b.runToTheStop(c.fill)
			b.awaitState(types.StateStopped)
			if sb := b.show(); sb.StateReason != types.StateReasonDiskLimit || sb.Condition != nil {
				t.Errorf("it is stopped: %s, condition %+v", sb.StateReason, sb.Condition)
			}
			stopped := b.awaitEvents("stopped", 1)
			if ev := stopped[0]; ev.Reason != types.StateReasonDiskLimit || ev.Disk == nil || ev.DiskLimit == nil || ev.DiskLimit.Bytes != 64<<20 ||
				ev.Disk.Bytes <= ev.DiskLimit.Bytes && ev.Disk.Files <= ev.DiskLimit.Files || !strings.Contains(ev.Detail, "the limit of size small is 64 MiB in 2000 files") {
				t.Errorf("it stopped: %+v, had %+v, limit %+v", ev, ev.Disk, ev.DiskLimit)
			}
			if neighbor.exec("echo goes on") != "goes on" || neighbor.state() != types.StateRunning {
				t.Error("its neighbor does not run")
			}
			// The sandbox starts again, files can be deleted, and the sandbox keeps running.
			b.exec(c.free)
			b.exec("dd if=/dev/zero of=/srv/small bs=1M count=8 2>&1")
			if sb := b.show(); sb.State != types.StateRunning || len(b.events("stopped")) != 1 {
				t.Errorf("it is %s; it stopped: %+v", sb.State, b.events("stopped"))
			}
		})
	}
	if got := n.metric(t, "doze_disk_stops_total", `reason="disk_limit"`); got != 5 {
		t.Errorf("%v stops are counted", got)
	}
}

func TestSandboxThatFillsItsDiskDuringASnapshot(t *testing.T) {
	n := limitedNode(t)
	b := n.newBox(t, small)
	b.start("fill", "while :; do dd if=/dev/zero bs=1M count=4 >>/srv/big 2>/dev/null; sleep .05; done", nil)
	var made []types.Snapshot
	for b.state() == types.StateRunning {
		made = append(made, b.snapshot(types.CreateSnapshotRequest{}))
	}
	if sb := b.show(); sb.StateReason != types.StateReasonDiskLimit {
		t.Errorf("it is %s (%s)", sb.State, sb.StateReason)
	}
	// Each snapshot is complete: a sandbox created from it starts, and has at least what the one before has.
	least := 0
	for _, s := range made {
		of := n.newBoxOf(t, s.ID)
		if got := of.exec(`ls /srv; tr -d '\0' </srv/big | wc -c`); got != "big\n0" {
			t.Errorf("the snapshot has %q", got)
		}
		size, err := strconv.Atoi(of.exec("stat -c %s /srv/big"))
		b.must(err)
		if size < least {
			t.Errorf("the snapshot has %d bytes, the one before %d", size, least)
		}
		least = size
		b.must(n.API.Delete(testkit.Context(t), of.id))
	}
	b.exec("rm /srv/big; sync")
}

// The reserve exceeds the free space of any machine, so the node reports low disk space.
func TestShortDiskStopsTheSandboxThatGrows(t *testing.T) {
	n := ownNode(t)
	grows, other := n.newBox(t), n.newBox(t)
	reload := func(options ...string) {
		t.Helper()
		grows.must(n.Configure(caddyfile(t, options...)))
		if out, err := n.Command("reload", "--config", n.Caddyfile()).CombinedOutput(); err != nil {
			t.Fatalf("doze reload: %v\n%s", err, out)
		}
	}
	reload("disk_reserve 1000TiB")
	testkit.Eventually(t, "doze_disk_short is 1", func() bool { return n.metric(t, "doze_disk_short") == 1 })
	_, _, created := n.API.Create(testkit.Context(t), types.CreateSandboxRequest{Name: "refused"})
	_, snapshot := n.API.CreateSnapshot(testkit.Context(t), other.id, types.CreateSnapshotRequest{})
	_, upload := n.API.WriteFile(testkit.Context(t), other.id, "/srv/file", 0, strings.NewReader("text"))
	for what, err := range map[string]error{"create": created, "snapshot": snapshot, "upload": upload} {
		if !problem.Has(err, problem.NodeDiskFull) || !strings.Contains(err.Error(), "the reserve is") {
			t.Errorf("%s: %v", what, err)
		}
	}
	grows.runToTheStop("dd if=/dev/zero of=/srv/big bs=1M count=300; sleep 1000")
	grows.awaitState(types.StateStopped)
	if ev := grows.awaitEvents("stopped", 1)[0]; ev.Reason != types.StateReasonDiskPressure || !strings.Contains(ev.Detail, "had grown the most") {
		t.Errorf("it stopped: %+v", ev)
	}
	if other.exec("echo goes on") != "goes on" || len(other.events("stopped")) != 0 {
		t.Errorf("the other one stopped: %+v", other.events("stopped"))
	}
	grows.exec("rm /srv/big")
	reload()
	testkit.Eventually(t, "doze_disk_short returns to 0", func() bool { return n.metric(t, "doze_disk_short") == 0 })
	n.newBox(t)
}
