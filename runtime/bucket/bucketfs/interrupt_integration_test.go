//go:build integration

package bucketfs

import (
	"bufio"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/backup/s3test"
	"github.com/doze-run/doze/testkit"
)

// pause is pauseIf for the requests of a method.
func (r *rig) pause(method string) (arrived <-chan struct{}, resume func()) {
	return r.pauseIf(func(req *http.Request) bool { return req.Method == method })
}

// pauseIf holds the requests that match until the caller calls resume, or the test ends. arrived receives a value for each.
func (r *rig) pauseIf(match func(*http.Request) bool) (arrived <-chan struct{}, resume func()) {
	first, resumed := make(chan struct{}, 1000), make(chan struct{})
	r.s3.Fail(func(req *http.Request) s3test.Fault {
		if match(req) {
			first <- struct{}{}
			<-resumed
		}
		return s3test.Fault{}
	})
	resume = sync.OnceFunc(func() {
		r.s3.Fail(nil)
		close(resumed)
	})
	r.Cleanup(resume) // before the end of the mount and of the server, which wait for the requests
	return first, resume
}

// start starts a program, whose folder is not the mount. It prints ready when it begins.
func (r *rig) start(program string, args ...string) *exec.Cmd {
	r.Helper()
	cmd := exec.CommandContext(testkit.Context(r), program, args...)
	cmd.Stderr = r.log
	out, err := cmd.StdoutPipe()
	testkit.NoError(r, "pipe", err)
	testkit.NoError(r, "start", cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	testkit.NoError(r, "read "+line, err)
	return cmd
}

// stat reports the result of a stat of the file, which other than open is not repeated after EINTR.
const stat = `import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
print("ready", flush=True)
os.stat(sys.argv[1])`

func TestSignalDoesNotInterruptABriefRequest(t *testing.T) {
	r := newRig(t)
	r.put("file", "content")
	arrived, resume := r.pause(http.MethodHead)
	cmd := r.start("python3", "-c", stat, r.path("file"))
	testkit.Receive(t, "a request", arrived)
	testkit.NoError(t, "signal", cmd.Process.Signal(syscall.SIGUSR1))
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select { // it waits for the response, or is too early
	case err := <-ended:
		t.Errorf("the program ended: %v", err)
		ended <- nil
	case <-time.After(10 * signalPoll):
	}
	resume()
	testkit.NoError(t, "stat", testkit.Receive(t, "the end of the program", ended))
}

func TestFreezeDoesNotInterruptARequest(t *testing.T) {
	root := os.Getenv("DOZE_CGROUP")
	if root == "" {
		t.Fatal("DOZE_CGROUP is not set: run the test by packaging/host/enter")
	}
	cgroup, err := os.MkdirTemp(root, "bucketfs-test-")
	testkit.NoError(t, "create cgroup", err)
	t.Cleanup(func() {
		_ = os.WriteFile(filepath.Join(cgroup, "cgroup.freeze"), []byte("0"), 0o644) // of a test that failed
		_ = os.WriteFile(filepath.Join(cgroup, "cgroup.kill"), []byte("1"), 0o644)
		testkit.Eventually(t, "the cgroup is removed", func() bool { return os.Remove(cgroup) == nil })
	})
	control := func(file, value string) {
		testkit.NoError(t, "write "+file, os.WriteFile(filepath.Join(cgroup, file), []byte(value), 0o644))
	}
	frozen := func() bool {
		events, err := os.ReadFile(filepath.Join(cgroup, "cgroup.events"))
		testkit.NoError(t, "read events", err)
		return strings.Contains(string(events), "frozen 1")
	}
	r := newRig(t)
	r.put("file", "content")
	arrived, resume := r.pause(http.MethodHead)
	cmd := r.start("sh", "-c", `echo $$ >"$0" && exec python3 -c "$1" "$2"`, filepath.Join(cgroup, "cgroup.procs"), stat, r.path("file"))
	testkit.Receive(t, "a request", arrived)
	control("cgroup.freeze", "1")
	<-time.After(10 * signalPoll) // time for a response that would be too early
	resume()
	testkit.Eventually(t, "the cgroup is frozen", frozen)
	control("cgroup.freeze", "0")
	testkit.NoError(t, "stat", cmd.Wait())
}

// The upload of a file whose program was killed in close(2) goes on.
func TestKilledProgramDoesNotWaitForItsUpload(t *testing.T) {
	r := newRig(t)
	arrived, resume := r.pause(http.MethodPut)
	cmd := r.start("python3", "-c", `import os, sys
print("ready", flush=True)
fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
os.write(fd, b"content")
os.close(fd)`, r.path("file"))
	testkit.Receive(t, "a request", arrived)
	testkit.NoError(t, "kill", cmd.Process.Kill())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	testkit.Receive(t, "the end of the program", ended)
	r.wantNoObject("file")
	resume()
	testkit.Eventually(t, "the file is uploaded", func() bool { content, _ := r.object("file"); return content == "content" })
}
