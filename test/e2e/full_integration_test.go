//go:build integration

package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// smallDisk returns a folder on a file system of its own with that many MiB. It is
// a tmpfs in Podman's user and mount namespaces, where this user may mount and where
// containers find it; outside of them it is seen through the root of a process in
// there. That process unmounts it when the test, or its process, ends.
func smallDisk(t *testing.T, size int) string {
	t.Helper()
	folder, err := os.MkdirTemp(os.Getenv("HOME"), "disk")
	if err != nil {
		t.Fatal(err)
	}
	keeper := exec.Command("podman", "unshare", "sh", "-c",
		`mount -t tmpfs -o "size=$2m,mode=0700" none "$1" && echo $$ && read end; umount -l "$1"`, "sh", folder, fmt.Sprint(size))
	keeper.Dir = folder
	keeper.Stderr = t.Output()
	stdin, err := keeper.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := keeper.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := keeper.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		keeper.Wait()
		if err := os.Remove(folder); err != nil {
			t.Error(err)
		}
	})
	pid, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatalf("no small disk: %v", err)
	}
	disk := filepath.Join("/proc", strings.TrimSpace(pid), "root", folder)
	var fs syscall.Statfs_t
	if err := syscall.Statfs(disk, &fs); err != nil || fs.Blocks*uint64(fs.Bsize) != uint64(size)*mib {
		t.Fatalf("the small disk has %d blocks of %d bytes, %v", fs.Blocks, fs.Bsize, err)
	}
	return disk
}

// fill takes a disk's last byte, and returns what gives all back.
func fill(t *testing.T, disk string) (free func()) {
	t.Helper()
	f, err := os.Create(filepath.Join(disk, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for chunk := make([]byte, mib); err == nil; {
		_, err = f.Write(chunk)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := os.Remove(f.Name()); err != nil {
			t.Fatal(err)
		}
	}
}

// containers are the names of this node's, found by the label of one of them.
func (n *node) containers(t *testing.T, b *box) []string {
	t.Helper()
	id := strings.TrimSpace(n.podman(t, "inspect", "--format", `{{index .Config.Labels "doze.node"}}`, "doze-"+b.id))
	return strings.Fields(n.podman(t, "ps", "--all", "--filter", "label=doze.node="+id, "--format", "{{.Names}}"))
}

func TestFullDiskOfTheNodeRefusesWhatIsNewAndLosesNothing(t *testing.T) {
	disk := smallDisk(t, 512)
	n := ownNodeIn(t, filepath.Join(disk, "home"))
	c := n.browser(t, "h2")
	b := n.newWebBox(t)
	b.write("/srv/kept", []byte("kept"))
	asleep, removed := n.newBox(t), n.newBox(t)
	asleep.sleep()
	started, _ := b.get(c, "/started", http.StatusOK)
	first := b.hostPID()

	free := fill(t, disk)
	before, containers := b.show(), n.containers(t, b)
	for _, refused := range []struct{ method, path, body string }{
		{"POST", "/sandbox", `{"name":"new"}`},
		{"POST", "/sandbox/" + b.id + "/expose", `{"port":9000}`},
		{"DELETE", fmt.Sprintf("/sandbox/%s/ports/%d", b.id, webPort), ""},
		{"PATCH", "/sandbox/" + b.id, `{"labels":{"new":"label"}}`},
		{"POST", "/sandbox/" + b.id + "/process", `{"argv":["sleep","100000"],"name":"new","restart":"always"}`},
	} {
		status, text := n.do(t, refused.method, refused.path, "application/json", strings.NewReader(refused.body))
		if status != http.StatusInsufficientStorage || !strings.Contains(text, `"code":"node_disk_full"`) || !strings.Contains(text, "free disk space") {
			t.Errorf("%s %s on a full disk: %d %s", refused.method, refused.path, status, text)
		}
	}
	if status, text := n.do(t, "GET", "/sandbox/new", "", nil); status != http.StatusNotFound {
		t.Errorf("the refused sandbox exists: %d %s", status, text)
	}
	if after := n.containers(t, b); len(after) != len(containers) {
		t.Errorf("containers: %v, and before what was refused %v", after, containers)
	}
	if after := b.show(); fmt.Sprint(after.Ports) != fmt.Sprint(before.Ports) || len(after.Labels) != 0 {
		t.Errorf("ports and labels were %v, %v and are %v, %v", before.Ports, before.Labels, after.Ports, after.Labels)
	}
	if out := b.exec("pgrep -fx 'sleep 100000' || true"); out != "" {
		t.Errorf("the refused process runs: %s", out)
	}
	// Existing sandboxes can be read, used, put to sleep, stopped and woken.
	if all, err := n.API.List(testkit.Context(t), client.Filter{}); err != nil || len(all) != 3 {
		t.Errorf("%d sandboxes, %v", len(all), err)
	}
	b.get(c, "/", http.StatusOK)
	b.sleep()
	if again, header := b.get(c, "/started", http.StatusOK); again != started || header.Get("Doze-Wake") != "warm" {
		t.Errorf("after a sleep: started %s and %s, %v", started, again, header)
	}
	b.write("/srv/more", []byte("more"))
	if out := b.exec("cat /srv/kept /srv/more"); out != "keptmore" {
		t.Errorf("its files: %s", out)
	}
	asleep.stop()
	asleep.exec("true")
	// Deleting is what makes room.
	if err := n.API.Delete(testkit.Context(t), removed.id); err != nil {
		t.Errorf("deleting on a full disk: %v", err)
	}

	free()
	made := n.newBox(t)
	made.exec("true")
	made.sleep()

	free = fill(t, disk)
	b.must(n.Kill())
	if out := n.fails(t, func(*exec.Cmd) {}); !strings.Contains(out, "are free for "+n.Home) && !strings.Contains(out, "no space left for the node's data") {
		t.Errorf("started on a full disk, it printed:\n%s", out)
	}
	free()
	b.must(n.Start())
	if after := b.show(); fmt.Sprint(after.Ports) != fmt.Sprint(before.Ports) || after.State != types.StateRunning || b.hostPID() != first {
		t.Errorf("it was %+v with the first process %d, and is %+v with %d", before, first, after, b.hostPID())
	}
	if again, _ := b.get(n.browser(t, "h2"), "/started", http.StatusOK); again != started {
		t.Error("the server was started again")
	}
	if out := b.exec("cat /srv/kept /srv/more"); out != "keptmore" {
		t.Errorf("its files: %s", out)
	}
	if asleep.state() != types.StateRunning || made.state() != types.StateAsleep {
		t.Errorf("the others are %s and %s", asleep.state(), made.state())
	}
	if _, err := n.API.Get(testkit.Context(t), removed.id); !problem.Has(err, problem.SandboxNotFound) {
		t.Errorf("the deleted one: %v", err)
	}
	b.stop() // declared processes exist too
	b.get(n.browser(t, "h2"), "/", http.StatusOK)
	n.newBox(t).exec("true")
}
