//go:build integration

package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/guesttest"
	"github.com/doze-run/doze/testkit"
)

// The test binary runs itself as PID 1 of a new PID namespace with these
// variables; no shell or root is needed for that, only user namespaces.
const (
	runDirVariable = "DOZE_TEST_RUN_DIR"
	rootVariable   = "DOZE_TEST_ROOT" // to be the root folder, with folders proc and small (1 MiB) and a file bound (a mount); empty: none
	askVariable    = "DOZE_TEST_ASK"  // a guest's socket to send one request to
)

func asInit() {
	if socket := os.Getenv(askVariable); socket != "" {
		h, err := guest.NewClient(socket).Hello(context.Background())
		fmt.Println(h, err)
		os.Exit(0)
	}
	runDir := os.Getenv(runDirVariable)
	if runDir == "" {
		return
	}
	root := os.Getenv(rootVariable)
	os.Unsetenv(runDirVariable)
	os.Unsetenv(rootVariable)
	err := func() error {
		if err := syscall.Mount("", "/", "", syscall.MS_PRIVATE|syscall.MS_REC, ""); err != nil {
			return fmt.Errorf("make mounts private: %w", err)
		}
		if err := syscall.Mount("proc", filepath.Join("/", root, "proc"), "proc", 0, ""); err != nil {
			return fmt.Errorf("mount /proc: %w", err)
		}
		if root != "" {
			if err := syscall.Mount("tmpfs", filepath.Join(root, "small"), "tmpfs", 0, "size=1m"); err != nil {
				return fmt.Errorf("mount a small disk: %w", err)
			}
			bound := filepath.Join(root, "bound")
			if err := syscall.Mount(bound, bound, "", syscall.MS_BIND, ""); err != nil {
				return fmt.Errorf("bind a file: %w", err)
			}
			if err := syscall.Chroot(root); err != nil {
				return err
			}
			if err := os.Chdir("/"); err != nil {
				return err
			}
		}
		return run(nil, runDir, filepath.Join(runDir, "log"))
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// startInit starts the guest as PID 1. The returned channel gets how it ended.
func startInit(t *testing.T, root string) (*guest.Client, *exec.Cmd, <-chan error) {
	t.Helper()
	runDir := filepath.Join(root, "run")
	if root == "" {
		runDir = t.TempDir()
	} else if err := errors.Join(os.Mkdir(runDir, 0o777), os.Mkdir(root+"/proc", 0o755), os.Mkdir(root+"/small", 0o755), os.WriteFile(root+"/bound", []byte("old"), 0o644)); err != nil {
		t.Fatal(err)
	}
	inside := strings.TrimPrefix(runDir, root)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), runDirVariable+"="+inside, rootVariable+"="+root)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWPID | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait(); close(ended) }()
	c := guest.NewClient(filepath.Join(runDir, guest.SocketName))
	t.Cleanup(func() {
		c.Close()
		cmd.Process.Kill()
		<-ended
	})
	testkit.Eventually(t, "the guest came up as process 1", func() bool {
		h, err := c.Hello(t.Context())
		return err == nil && h.PID == 1
	})
	return c, cmd, ended
}

func sh(t *testing.T, c *guest.Client, command string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	out, err := guesttest.Run(ctx, c, guest.ExecRequest{Command: guest.Command{Command: command}})
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	if out.Result.ExitCode != 0 {
		t.Fatalf("%s: %+v, %s", command, out.Result, out.Stderr)
	}
	return string(out.Stdout)
}

const countZombies = `cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z ' || true`

func TestInitReapsOrphansAndLosesNoExitCode(t *testing.T) {
	c, _, _ := startInit(t, "")
	done := make(chan error, 4)
	for worker := range 4 {
		go func() {
			var err error
			for i := 0; i < 50 && err == nil; i++ {
				var out guesttest.Output
				want := (worker*50 + i) % 256
				out, err = guesttest.Run(t.Context(), c, guest.ExecRequest{Command: guest.Command{Command: fmt.Sprintf("(true &); (false & true &) ; echo %d; exit %d", i, want)}})
				if err == nil && (out.Result.ExitCode != want || string(out.Stdout) != fmt.Sprintln(i)) {
					err = fmt.Errorf("got %+v, want code %d", out, want)
				}
			}
			done <- err
		}()
	}
	for range 4 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	testkit.Eventually(t, "no zombies are left", func() bool { return sh(t, c, countZombies) == "0\n" })
}

func TestInitSurvivesSignalsFromInside(t *testing.T) {
	c, _, _ := startInit(t, "")
	for sig := 1; sig <= 64; sig++ {
		if sig != int(syscall.SIGTERM) && sig != 32 && sig != 33 { // the C library keeps these two
			sh(t, c, fmt.Sprintf("kill -%d 1", sig))
		}
	}
	if _, err := c.Hello(t.Context()); err != nil {
		t.Fatal(err)
	}
	// Commands get every signal as the kernel made them. The C library's own two
	// are inherited: glibc's posix_spawn, by which make started this test, ignores them.
	const libraries = 3 << (32 - 1)
	for line := range strings.Lines(sh(t, c, `grep -E '^Sig(Ign|Blk)' /proc/self/status`)) {
		name, text, _ := strings.Cut(strings.TrimSpace(line), ":\t")
		set, err := strconv.ParseUint(text, 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		if set&^libraries != 0 {
			t.Errorf("a command starts with %s %016x", name, set)
		}
	}
}

func TestInitRefusesPeersInside(t *testing.T) {
	c, cmd, _ := startInit(t, "")
	socket := ""
	for _, variable := range cmd.Env {
		if runDir, ok := strings.CutPrefix(variable, runDirVariable+"="); ok {
			socket = filepath.Join(runDir, guest.SocketName)
		}
	}
	// A shell cannot connect to a Unix socket, so this binary does it: as a
	// process of the sandbox.
	out, err := guesttest.Run(t.Context(), c, guest.ExecRequest{Command: guest.Command{Argv: []string{"/proc/1/exe"}, Env: map[string]string{askVariable: socket}}})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(out.Stdout), guest.ErrLost.Error()) {
		t.Errorf("a process inside got %s%s", out.Stdout, out.Stderr)
	}
}

func TestInitEndsEverythingOnTerm(t *testing.T) {
	c, cmd, ended := startInit(t, "")
	dir := t.TempDir()
	p, err := c.StartProcess(t.Context(), guest.ProcessSpec{Command: guest.Command{Command: "trap 'echo ended > " + dir + "/graceful; exit 0' TERM; echo up; while :; do sleep 0.05; done"}, Restart: guest.RestartAlways})
	if err != nil {
		t.Fatal(err)
	}
	logs, err := c.Logs(t.Context(), p.ID, true)
	if err != nil {
		t.Fatal(err)
	}
	defer logs.Close()
	if ev, err := logs.Next(); err != nil || string(ev.Data) != "up\n" {
		t.Fatal(ev, err)
	}
	sh(t, c, "setsid sh -c 'env -i sleep 1000 &' ; true") // not even kin
	s, err := c.Exec(t.Context(), guest.ExecRequest{Command: guest.Command{Command: "exec sleep 1000"}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Next(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	// Those who wait learn how it ended.
	if ev, err := s.Next(); err != nil || ev.Kind != guest.FrameComplete || ev.Result.Signal != "SIGTERM" {
		t.Errorf("the command ended as %+v, %v", ev.Result, err)
	}
	var last guest.LogEvent
	for err = nil; err == nil && last.Process == nil; { // the shell may still write that its child was terminated
		last, err = logs.Next()
	}
	if err != nil || *last.Process.ExitCode != 0 || last.Process.RestartCount != 0 {
		t.Errorf("the process ended as %+v, %v", last.Process, err)
	}
	if err := testkit.Receive(t, "the end of the guest", ended); err != nil {
		t.Errorf("the guest ended with %v", err)
	}
	if b, err := os.ReadFile(dir + "/graceful"); err != nil || string(b) != "ended\n" {
		t.Errorf("the process was not asked: %q, %v", b, err)
	}
}

func TestInitKillsWhatResistsTerm(t *testing.T) {
	c, cmd, ended := startInit(t, "")
	sh(t, c, "trap '' TERM; (while :; do sleep 1000; done) & true")
	began := time.Now()
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := testkit.Receive(t, "the end of the guest", ended); err != nil {
		t.Errorf("the guest ended with %v", err)
	}
	if took := time.Since(began); took < 4*time.Second {
		t.Errorf("it got only %s to end by itself", took)
	}
}

func TestForkBombIsKilled(t *testing.T) {
	c, _, _ := startInit(t, "")
	out, err := guesttest.Run(t.Context(), c, guest.ExecRequest{Command: guest.Command{Command: `ulimit -u 300 2>/dev/null; f() { setsid sh -c 'sleep 1000' & f & f & sleep 1000; }; f`}, Timeout: 500 * time.Millisecond})
	if err != nil || !out.Result.TimedOut {
		t.Fatalf("%+v, %v", out, err)
	}
	testkit.Eventually(t, "only the shell that counts has the words in its command line", func() bool {
		return sh(t, c, `cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' ' ' | grep -c 'sleep 1000 ' || true`) == "1\n"
	})
}

func TestImageWithoutShell(t *testing.T) {
	root := t.TempDir()
	c, _, _ := startInit(t, root)
	for _, tt := range []struct {
		req        guest.ExecRequest
		code, hint string
	}{
		{guest.ExecRequest{Command: guest.Command{Command: "true"}}, guest.CodeNoShell, "argv"},
		{guest.ExecRequest{Command: guest.Command{Argv: []string{"true"}}}, guest.CodeNoCommand, "PATH"},
	} {
		_, err := c.Exec(t.Context(), tt.req)
		var refusal *guest.Error
		if !errors.As(err, &refusal) || refusal.Code != tt.code || !strings.Contains(refusal.Message, tt.hint) {
			t.Errorf("%+v: %v", tt.req, err)
		}
	}
	if _, err := c.WriteFile(t.Context(), "/deep/file", 0, strings.NewReader("x")); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(root + "/deep/file"); err != nil || string(b) != "x" {
		t.Error(string(b), err)
	}
}

func TestFullDisk(t *testing.T) {
	c, _, _ := startInit(t, t.TempDir())
	if _, err := c.WriteFile(t.Context(), "/small/file", 0, strings.NewReader("old")); err != nil {
		t.Fatal(err)
	}
	wantNoSpace := func(what string, err error) {
		t.Helper()
		var refusal *guest.Error
		if !errors.As(err, &refusal) || refusal.Code != guest.CodeNoSpace || refusal.Status != 507 {
			t.Errorf("%s: %v", what, err)
		}
	}
	large := bytes.Repeat([]byte("x"), 4<<20)
	_, err := c.WriteFile(t.Context(), "/small/file", 0, bytes.NewReader(large))
	wantNoSpace("writing a file", err)
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	if err := w.WriteHeader(&tar.Header{Name: "large", Size: int64(len(large)), Mode: 0o644, Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(large); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = c.PutArchive(t.Context(), "/small", &archive)
	wantNoSpace("unpacking", err)
	entries, _, err := c.List(t.Context(), "/small", guest.ListOptions{Hidden: true})
	if err != nil || len(entries) != 1 || entries[0].Size != 3 {
		t.Errorf("the disk holds %+v, %v", entries, err)
	}
}

// The sandbox starts, and the node gets the reason why its programs refuse intercepted hosts.
func TestTrustOnAFullDiskIsReported(t *testing.T) {
	root := t.TempDir()
	if err := os.Symlink("small", filepath.Join(root, "etc")); err != nil {
		t.Fatal(err)
	}
	c, _, _ := startInit(t, root)
	ca, err := os.ReadFile("../../runtime/guest/trust/testdata/public.pem")
	if err != nil {
		t.Fatal(err)
	}
	for size := 1 << 20; size > 0; size /= 2 { // until there is no room for anything
		_, err := c.WriteFile(t.Context(), fmt.Sprint("/small/", size), 0, bytes.NewReader(make([]byte, size)))
		if err != nil && !strings.Contains(err.Error(), "no space left") {
			t.Fatal(err)
		}
	}
	_, err = c.Trust(t.Context(), guest.Trust{CA: string(ca)})
	var refusal *guest.Error
	if !errors.As(err, &refusal) || refusal.Code != guest.CodeNoSpace || !strings.Contains(refusal.Message, "/etc/doze/ca-bundle.pem") {
		t.Errorf("got %v", err)
	}
	if h, err := c.Hello(t.Context()); err != nil || h.Trust != guest.TrustDigest(ca) {
		t.Errorf("hello: %+v, %v", h, err)
	}
	for size := 1 << 20; size > 0; size /= 2 {
		if err := c.Remove(t.Context(), fmt.Sprint("/small/", size), false, ""); err != nil && !strings.Contains(err.Error(), "no such file") {
			t.Fatal(err)
		}
	}
	if _, err := c.Trust(t.Context(), guest.Trust{CA: string(ca)}); err != nil {
		t.Errorf("with room again: %v", err)
	}
	// Only the guest sees its small disk.
	bundle, err := c.ReadFile(t.Context(), "/etc/doze/ca-bundle.pem", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer bundle.Body.Close()
	if got, err := io.ReadAll(bundle.Body); err != nil || string(got) != string(ca) {
		t.Errorf("the bundle has %q, %v", got, err)
	}
}

func TestFileThatIsAMountIsOverwritten(t *testing.T) {
	root := t.TempDir()
	c, _, _ := startInit(t, root)
	if info, err := c.WriteFile(t.Context(), "/bound", 0o600, strings.NewReader("brand new")); err != nil || info.Size != 9 || info.Mode != "0600" {
		t.Fatal(info, err)
	}
	if b, err := os.ReadFile(root + "/bound"); err != nil || string(b) != "brand new" {
		t.Errorf("it holds %q, %v", b, err)
	}
	entries, _, err := c.List(t.Context(), "/", guest.ListOptions{Hidden: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name, ".doze-") {
			t.Errorf("%s is left", e.Path)
		}
	}
}
