//go:build integration

package bucketfs

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/testkit"
)

func TestMountsOfASandboxHaveOneShareOfTheScratchSpace(t *testing.T) {
	resources := NewResources(t.TempDir(), 4<<20)
	r := newRig(t, func(o *Options) { o.Share = resources.NewShare() })
	second, _ := r.serve(r.options)
	r.options.Share = resources.NewShare()
	other, _ := r.serve(r.options)

	f, err := os.Create(r.path("file"))
	testkit.NoError(t, "create", err)
	defer f.Close()
	_, err = f.Write(make([]byte, 2<<20))
	testkit.NoError(t, "write half of the space", err)
	_, err = f.Write([]byte("x"))
	r.wantErrno("write more", err, syscall.ENOSPC)
	r.wantErrno("write to another mount of the sandbox", os.WriteFile(filepath.Join(second, "second"), []byte("x"), 0o644), syscall.ENOSPC)
	testkit.NoError(t, "write in another sandbox", os.WriteFile(filepath.Join(other, "other"), make([]byte, 1<<20), 0o644))
	r.wantErrno("write more in another sandbox", os.WriteFile(filepath.Join(other, "other"), make([]byte, 1<<20+1), 0o644), syscall.ENOSPC)
}

func TestMountsOfASandboxHaveOneLimitOfOpenFiles(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Share.handles.max = 2 })
	r.put("file", "content")
	second, _ := r.serve(r.options)
	a, err := os.Open(r.path("file"))
	testkit.NoError(t, "open", err)
	b, err := os.Open(second)
	testkit.NoError(t, "open a folder of another mount", err)
	defer b.Close()
	_, err = os.Open(r.path("file"))
	r.wantErrno("open a third", err, syscall.ENFILE)
	_, err = os.Create(filepath.Join(second, "new"))
	r.wantErrno("create a third", err, syscall.ENFILE)
	testkit.NoError(t, "rename", os.Rename(r.path("file"), r.path("renamed")))
	testkit.NoError(t, "close", a.Close())
	testkit.Eventually(t, "the kernel has released the file", func() bool { return r.options.Share.handles.inUse() == 1 })
	testkit.NoError(t, "create", os.WriteFile(filepath.Join(second, "new"), nil, 0o644))
}

// hold makes the kernel know a name until the test calls release, without an open file. If there are too many, it waits
// until the kernel forgets one.
func hold(t *testing.T, path string) (release func()) {
	t.Helper()
	var fd int
	testkit.Eventually(t, "hold "+path, func() bool {
		var err error
		fd, err = unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
		return err == nil
	})
	return sync.OnceFunc(func() { unix.Close(fd) })
}

// kernelPrunes reports whether the kernel forgets nodes on request: from Linux 6.18 on.
func (r *rig) kernelPrunes() bool { return r.server.mount.device.prune(nil) == nil }

func TestMountsOfASandboxHaveOneLimitOfNodes(t *testing.T) {
	const limit = 4
	r := newRig(t, func(o *Options) { o.Share.nodes.max = limit })
	second, _ := r.serve(r.options)
	var releases []func()
	for i := range limit {
		name := fmt.Sprint("file-", i)
		r.put(name, "content")
		release := hold(t, filepath.Join([]string{r.dir, second}[i%2], name))
		defer release()
		releases = append(releases, release)
	}
	r.put("other", "content")
	_, err := os.Stat(r.path("other"))
	r.wantErrno("stat", err, syscall.ENFILE)
	r.wantErrno("create", os.WriteFile(r.path("new"), nil, 0o644), syscall.ENFILE)
	r.wantErrno("mkdir", os.Mkdir(filepath.Join(second, "dir"), 0o755), syscall.ENFILE)
	r.wantNoObject("dir/")
	r.wantNames("", "file-0", "file-1", "file-2", "file-3", "other")
	r.wantFile("file-0", "content")
	for _, release := range releases {
		release()
	}
	if !r.kernelPrunes() {
		return
	}
	testkit.Eventually(t, "the kernel has forgotten files", func() bool { _, err := os.Stat(r.path("other")); return err == nil })
}

func TestKernelForgetsNodesThatNoProgramUses(t *testing.T) {
	const limit = 40
	r := newRig(t, func(o *Options) { o.Share.nodes.max = limit })
	second, _ := r.serve(r.options)
	testkit.NoError(t, "mkdir", os.Mkdir(r.path("folder"), 0o755))
	release := hold(t, r.path("folder"))
	defer release()
	for i := range 3 * limit {
		path := filepath.Join([]string{r.dir, second}[i%2], fmt.Sprint("folder/file-", i))
		if !r.kernelPrunes() && i > limit {
			r.wantErrno("create", os.WriteFile(path, nil, 0o644), syscall.ENFILE)
			continue
		}
		testkit.Eventually(t, "create "+path, func() bool { return os.WriteFile(path, nil, 0o644) == nil })
	}
	m := r.server.mount
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.nodes) > limit+1 { // and the root
		t.Errorf("%d nodes remain", len(m.nodes))
	}
	if n := m.byKey[nodeKey{prefix + "folder/", true}]; n == nil || n.lookups == 0 {
		t.Error("the kernel has forgotten a folder that is in use")
	}
}

func TestMountsOfASandboxHaveOneReadAhead(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Share.streams.memory.max = readWindow })
	content := random(3 * readWindow)
	r.put("file", content)
	second, _ := r.serve(r.options)
	memory := r.options.Share.streams.memory
	var files []*os.File
	for _, dir := range []string{r.dir, second} {
		f, err := os.Open(filepath.Join(dir, "file"))
		testkit.NoError(t, "open", err)
		defer f.Close()
		files = append(files, f)
	}
	b := make([]byte, 1<<20)
	for off := int64(0); off < int64(len(content)); off += int64(len(b)) {
		for _, f := range files {
			_, err := f.ReadAt(b, off)
			testkit.NoError(t, "read", err)
			r.equalAt("content", b, []byte(content)[off:off+int64(len(b))])
			if used := memory.inUse(); used == 0 || used > memory.max {
				t.Fatalf("read-ahead has %d bytes", used)
			}
		}
	}
}
