//go:build integration

package bucketfs

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/s3test"
	"github.com/doze-run/doze/testkit"
)

// inNamespace is set in the process that runs the tests.
const inNamespace = "BUCKETFS_TEST_NAMESPACE"

// TestMain runs the tests in a mount namespace and, for a user other than root, in a user namespace, where
// they may mount.
func TestMain(m *testing.M) {
	if os.Getenv(inNamespace) != "" {
		testkit.Main(m)
		return
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), inNamespace+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if os.Getuid() != 0 {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		os.Exit(exit.ExitCode())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "run the tests in a namespace:", err)
		os.Exit(1)
	}
}

// rig is a mounted bucket.
type rig struct {
	*testing.T
	s3      *s3test.Server
	client  minio.Core // of the bucket, not through the mount
	options Options
	dir     string // the mount
	server  *Server
	log     *testkit.Log
}

const prefix = "folder/"

func newRig(t *testing.T, change ...func(*Options)) *rig {
	t.Helper()
	r := &rig{T: t, s3: s3test.Start(t), log: testkit.NewLog(t)}
	r.client = newClient(t, r.s3)
	r.options = Options{
		Bucket: Bucket{
			Endpoint: r.s3.URL, Region: "us-east-1", Bucket: r.s3.Bucket, Prefix: prefix,
			AccessKey: r.s3.AccessKey, SecretKey: r.s3.SecretKey,
		},
		Share: NewResources(t.TempDir(), 1<<30).NewShare(),
		Log:   slog.New(slog.NewTextHandler(r.log, nil)),
	}
	for _, c := range change {
		c(&r.options)
	}
	share := r.options.Share
	t.Cleanup(func() { // after the end of all mounts
		for what, used := range map[string]*quota{"scratch space": share.space, "read-ahead": share.streams.memory, "handles": share.handles, "nodes": share.nodes} {
			if n := used.inUse(); n != 0 {
				t.Errorf("%d of %s are in use at the end", n, what)
			}
		}
	})
	r.dir, r.server = r.serve(r.options)
	return r
}

// serve mounts a file system of the bucket, until the end of the test.
func (r *rig) serve(o Options) (string, *Server) {
	r.Helper()
	dir, server := serve(r.T, o)
	r.disablePoll(dir)
	return dir, server
}

// disablePoll makes the kernel learn that the file system does not implement poll, before Go's runtime uses epoll for
// a file of the mount: that would block the poller of this process, which serves the mount.
func (r *rig) disablePoll(dir string) {
	r.Helper()
	r.put("poll", "x")
	fd, err := unix.Open(filepath.Join(dir, "poll"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	testkit.NoError(r, "open", err)
	_, err = testkit.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	testkit.NoError(r, "poll", err)
	testkit.NoError(r, "close", unix.Close(fd))
	testkit.NoError(r, "remove", r.client.RemoveObject(testkit.Context(r), r.s3.Bucket, prefix+"poll", minio.RemoveObjectOptions{}))
}

// serve mounts a file system, until the end of the test.
func serve(t *testing.T, o Options) (string, *Server) {
	t.Helper()
	dir := t.TempDir()
	dev, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	testkit.NoError(t, "open /dev/fuse", err)
	options := append([]string{fmt.Sprintf("fd=%d", dev.Fd()), "rootmode=40000", "user_id=0", "group_id=0"}, MountOptions()...)
	testkit.NoError(t, "mount", unix.Mount("bucketfs", dir, "fuse.bucketfs", unix.MS_NOSUID|unix.MS_NODEV, strings.Join(options, ",")))
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	s, err := Serve(dev, o)
	testkit.NoError(t, "serve", err)
	t.Cleanup(func() { testkit.NoError(t, "close", s.Close()) })
	return dir, s
}

func newClient(t *testing.T, s *s3test.Server) minio.Core {
	t.Helper()
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	c, err := minio.NewCore(strings.TrimPrefix(s.URL, "http://"), &minio.Options{
		Creds: credentials.NewStaticV4(s.AccessKey, s.SecretKey, ""), Transport: transport, Region: "us-east-1",
	})
	testkit.NoError(t, "new client", err)
	return *c
}

// path returns the path of a name in the mount.
func (r *rig) path(name string) string { return filepath.Join(r.dir, name) }

// object returns the content of an object, and false if it does not exist.
func (r *rig) object(key string) (string, bool) {
	r.Helper()
	b, err := os.ReadFile(filepath.Join(r.s3.Folder, r.s3.Bucket, prefix, key))
	if errors.Is(err, os.ErrNotExist) {
		return "", false
	}
	testkit.NoError(r, "read object", err)
	return string(b), true
}

// wantObject fails the test if the bucket does not have the object.
func (r *rig) wantObject(key, want string) {
	r.Helper()
	if got, ok := r.object(key); !ok || got != want {
		r.Errorf("object %s: %s (exists: %t), want %s", key, abbreviate(got), ok, abbreviate(want))
	}
}

func (r *rig) wantNoObject(key string) {
	r.Helper()
	if _, ok := r.object(key); ok {
		r.Errorf("object %s exists", key)
	}
}

// put creates an object, not through the mount.
func (r *rig) put(key, data string) {
	r.Helper()
	_, err := r.client.Client.PutObject(testkit.Context(r), r.s3.Bucket, prefix+key, strings.NewReader(data), int64(len(data)), minio.PutObjectOptions{})
	testkit.NoError(r, "put "+key, err)
}

func (r *rig) write(name, data string) {
	r.Helper()
	testkit.NoError(r, "write "+name, os.WriteFile(r.path(name), []byte(data), 0o644))
}

func (r *rig) wantFile(name, want string) {
	r.Helper()
	got, err := os.ReadFile(r.path(name))
	testkit.NoError(r, "read "+name, err)
	if string(got) != want {
		r.Errorf("file %s: %s, want %s", name, abbreviate(string(got)), abbreviate(want))
	}
}

// names returns the entries of a folder.
func (r *rig) names(folder string) []string {
	r.Helper()
	entries, err := os.ReadDir(r.path(folder))
	testkit.NoError(r, "list "+folder, err)
	names := []string{}
	for _, e := range entries {
		name := e.Name()
		if e.IsDir() {
			name += "/"
		}
		names = append(names, name)
	}
	return names
}

func (r *rig) wantNames(folder string, want ...string) {
	r.Helper()
	testkit.Diff(r, "names in "+folder, r.names(folder), append([]string{}, want...))
}

// run runs a program in the mount, and returns its output. It does not set cmd.Dir: this process, which serves the
// mount, is suspended until its child has changed its folder.
func (r *rig) run(program string, args ...string) string {
	r.Helper()
	cmd := exec.CommandContext(testkit.Context(r), "sh", append([]string{"-ec", `cd "$0" && exec "$@"`, r.dir, program}, args...)...)
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null",
		"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.com", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.com")
	out, err := cmd.CombinedOutput()
	if err != nil {
		r.Errorf("%s %q: %v\n%s", program, args, err, out)
	}
	return string(out)
}

func (r *rig) wantErrno(call string, err error, want syscall.Errno) {
	r.Helper()
	testkit.ErrorIs(r, call, err, want)
}

// random returns n bytes, the same ones in each run.
func random(n int) string {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(b)
	return string(b)
}

func abbreviate(s string) string {
	if len(s) > 60 {
		return fmt.Sprintf("%q... (%d bytes)", s[:40], len(s))
	}
	return fmt.Sprintf("%q", s)
}

// equalAt fails the test where two contents differ.
func (r *rig) equalAt(what string, got, want []byte) {
	r.Helper()
	if bytes.Equal(got, want) {
		return
	}
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			r.Fatalf("%s: differs at %d; sizes %d and %d", what, i, len(got), len(want))
		}
	}
	r.Fatalf("%s: size %d, want %d", what, len(got), len(want))
}
