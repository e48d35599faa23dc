//go:build integration

package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// fileWatch is an open watch of a directory of a sandbox.
type fileWatch struct {
	b       *box
	root    string
	changes chan client.Change
	ended   chan error
	close   context.CancelFunc
	last    string // cursor
	marks   int
}

func (b *box) watchFiles(root string, o client.WatchOptions) *fileWatch {
	b.t.Helper()
	ctx, cancel := context.WithCancel(testkit.Context(b.t))
	w := &fileWatch{b: b, root: root, changes: make(chan client.Change, 1000), ended: make(chan error, 1), close: cancel}
	b.t.Cleanup(cancel)
	go func() {
		w.ended <- b.node.API.Watch(ctx, b.id, root, o, func(c client.Change) error {
			select {
			case w.changes <- c:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	return w
}

func (w *fileWatch) next() client.Change {
	w.b.t.Helper()
	c := testkit.Receive(w.b.t, "a change", w.changes)
	w.last = c.Cursor()
	return c
}

// begin waits until the watch has begun.
func (w *fileWatch) begin() types.WatchStarted {
	w.b.t.Helper()
	c := w.next()
	if c.Watching == nil {
		w.b.t.Fatalf("got %+v before the watch has begun", c)
	}
	return *c.Watching
}

// settle makes a change of its own, and returns everything until it is reported, with paths
// below the root.
func (w *fileWatch) settle() (events []types.FileEvent) {
	w.b.t.Helper()
	w.marks++
	mark := fmt.Sprint(".mark-", w.marks)
	w.b.exec("mkdir " + w.root + "/" + mark)
	for {
		c := w.next()
		if c.Event == nil {
			w.b.t.Fatalf("got %+v", c)
		}
		e := *c.Event
		e.Path, e.From = strings.TrimPrefix(e.Path, w.root+"/"), strings.TrimPrefix(e.From, w.root+"/")
		if e.Path == mark {
			return events
		}
		events = append(events, e)
	}
}

// apply changes the set of paths as the events describe. It fails the test when a path is
// created twice.
func apply(t *testing.T, paths map[string]bool, events []types.FileEvent) {
	t.Helper()
	for _, e := range events {
		switch e.Type {
		case types.FileEventTypeCreate:
			if paths[e.Path] {
				t.Errorf("%s is created twice", e.Path)
			}
			paths[e.Path] = true
		case types.FileEventTypeDelete:
			delete(paths, e.Path)
		case types.FileEventTypeMove: // git renames files only
			delete(paths, e.From)
			paths[e.Path] = true
		}
	}
}

// paths returns everything below the root, without .git and marks.
func (w *fileWatch) paths() map[string]bool {
	w.b.t.Helper()
	paths := map[string]bool{}
	for line := range strings.Lines(w.b.exec("cd " + w.root + "; find . -name .git -prune -o -name '.mark-*' -prune -o -mindepth 1 -print")) {
		paths[strings.TrimPrefix(strings.TrimSpace(line), "./")] = true
	}
	return paths
}

// A client that applies the events has the files of a checkout of 5,000 of them.
func TestWatchOfACheckout(t *testing.T) {
	b := commonNode(t).newBox(t)
	b.exec(`mkdir -p /srv/watched /srv/repo; cd /srv/repo; git init -q; git config user.email agent@example.com; git config user.name agent
		python3 - <<'END'
import os
for i in range(5000):
    folder = f"d{i % 50}/e{i % 500}"
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/{i}.txt", "w") as f: f.write(f"{i}\n")
END
		git add .; git commit -qm first
		git checkout -qb second; git rm -rq 'd1' 'd2'; git mv d3 z3
		for d in d4 d5; do for f in $(find $d -type f); do echo changed > $f; done; done
		mkdir new; for i in $(seq 200); do echo $i > new/$i; done; git add .; git commit -qm second; git checkout -q -`)
	w := b.watchFiles("/srv/watched", client.WatchOptions{})
	w.begin()
	b.exec("git clone -q /srv/repo /srv/watched/clone")
	paths := map[string]bool{}
	apply(t, paths, w.settle())
	testkit.Diff(t, "the clone", paths, w.paths())
	if len(paths) < 5500 {
		t.Errorf("only %d files and directories", len(paths))
	}
	b.exec("cd /srv/watched/clone; git checkout -q second")
	events := w.settle()
	apply(t, paths, events)
	testkit.Diff(t, "the other branch", paths, w.paths())
	written := map[string]bool{}
	for _, e := range events {
		written[e.Path] = true
	}
	for _, name := range strings.Fields(b.exec("cd /srv/watched/clone; git diff --name-only --no-renames --diff-filter=M second~ second")) {
		if !written["clone/"+name] {
			t.Errorf("the change of %s is not reported", name)
		}
	}
}

// A burst is reported as a whole, and the guest is as small as before when it sleeps.
func TestWatchOfABurst(t *testing.T) {
	const files = 10_000
	b := commonNode(t).newBox(t)
	w := b.watchFiles("/srv", client.WatchOptions{})
	w.begin()
	b.exec(fmt.Sprintf(`python3 -c 'for i in range(%d): open(f"/srv/file-{i:05}", "w").write("x")'`, files))
	next := 0
	for next < files {
		c := w.next()
		switch {
		case c.Overflow != nil:
			t.Fatalf("lost after %d files: %+v", next, c.Overflow)
		case c.Event != nil && c.Event.Type == types.FileEventTypeCreate:
			if want := fmt.Sprintf("/srv/file-%05d", next); c.Event.Path != want {
				t.Fatalf("got %s, want %s", c.Event.Path, want)
			}
			next++
		}
	}
	guest := b.hostPID()
	b.sleep()
	size := testnode.Memory(t, guest, "VmRSS")
	if size > mostGuest {
		t.Errorf("the guest has %d bytes", size)
	}
	t.Logf("the guest has %d bytes, at most %d", size, testnode.Memory(t, guest, "VmHWM"))
}

func TestWatchSleepsWithItsSandbox(t *testing.T) {
	b := commonNode(t).newBox(t)
	b.sleep()
	w := b.watchFiles("/srv", client.WatchOptions{})
	w.begin() // opening it wakes the sandbox
	b.sleep() // and it does not keep it awake
	woke := len(b.events(types.EventTypeWoke))
	// A client that comes back waits until something else wakes the sandbox.
	back := b.watchFiles("/srv", client.WatchOptions{After: w.last})
	b.exec("mkdir /srv/a")
	if c := w.next(); c.Event == nil || c.Event.Path != "/srv/a" {
		t.Errorf("got %+v", c)
	}
	if started := back.begin(); !started.Resumed {
		t.Errorf("got %+v", started)
	}
	if c := back.next(); c.Event == nil || c.Event.Path != "/srv/a" {
		t.Errorf("got %+v", c)
	}
	if n := len(b.events(types.EventTypeWoke)); n != woke+1 {
		t.Errorf("woke %d times", n-woke)
	}
	b.stop()
	for _, w := range []*fileWatch{w, back, b.watchFiles("/srv", client.WatchOptions{After: w.last})} {
		c := w.next()
		if c.Stopped == nil || c.Stopped.Reason != types.WatchStopReasonSandboxEnded || c.Stopped.StateReason != types.StateReasonRequested {
			t.Errorf("got %+v", c)
		}
		if err := testkit.Receive(t, "the end", w.ended); err != nil {
			t.Error(err)
		}
	}
	if state := b.state(); state != types.StateStopped {
		t.Errorf("the sandbox is %s", state)
	}
}

// The file systems of the kernel are not visited.
func TestWatchOfTheWholeSandbox(t *testing.T) {
	b := commonNode(t).newBox(t)
	w := b.watchFiles("/", client.WatchOptions{Exclude: []string{"/usr", "/var/lib", "/tmp"}})
	if started := w.begin(); started.Directories < 10 {
		t.Errorf("got %+v", started)
	}
	b.exec("mkdir /etc/new")
	for {
		if c := w.next(); c.Event != nil && c.Event.Path == "/etc/new" {
			break
		}
	}
	w.close()
	if err := testkit.Receive(t, "the end", w.ended); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
