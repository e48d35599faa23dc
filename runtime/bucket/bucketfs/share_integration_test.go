//go:build integration

package bucketfs

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

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
