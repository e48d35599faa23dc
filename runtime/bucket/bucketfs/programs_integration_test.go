//go:build integration

package bucketfs

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/objectstore"
	"github.com/doze-run/doze/testkit"
)

func codeOf(err error) string {
	failed, ok := errors.AsType[*objectstore.Error](err)
	if !ok {
		return ""
	}
	return string(failed.Code)
}

func TestProgramsWork(t *testing.T) {
	r := newRig(t)
	r.run("sh", "-ec", `git init -q -b main origin && cd origin && for i in 1 2 3; do echo $i >f$i; git add .; git commit -qm $i; done
git fsck --strict && cd .. && git clone -q origin clone && test "$(git -C clone rev-list --count HEAD)" = 3 && rm -r clone`)
	r.run("sh", "-ec", `mkdir src && echo a >src/a && chmod 600 src/a && tar cf src.tar src && rm -r src && tar xf src.tar && test "$(cat src/a)" = a
cp -a src copy && mv copy moved && test "$(cat moved/a)" = a && test ! -e copy && sort -o src/a src/a && sed -i s/a/b/ src/a && test "$(cat src/a)" = b`)
	r.run("sh", "-ec", `! ln -s src link && ! ln src/a hard && touch -d 2001-01-01 src/a && chown 0:0 src/a && df . >/dev/null`)
}

// A rename directly after the close comes while the kernel releases the file.
func TestRenameAfterACloseRetainsTheContent(t *testing.T) {
	r := newRig(t)
	for i := range 30 {
		r.write("temporary", fmt.Sprint("version ", i))
		testkit.NoError(t, "rename", os.Rename(r.path("temporary"), r.path("file")))
		f, err := os.OpenFile(r.path("file"), os.O_WRONLY|os.O_APPEND, 0)
		testkit.NoError(t, "open", err)
		_, err = f.WriteString("+")
		testkit.NoError(t, "append", err)
		testkit.NoError(t, "close", f.Close())
		r.wantObject("file", fmt.Sprint("version ", i, "+"))
	}
}

func TestSharedMappingIsUploaded(t *testing.T) {
	r := newRig(t)
	r.put("file", strings.Repeat("a", 10000))
	r.run("python3", "-c", `import mmap
with open("file", "r+b") as f:
    m = mmap.mmap(f.fileno(), 0); m[5000:5003] = b"xyz"; m.flush(); m.close()`)
	r.wantObject("file", strings.Repeat("a", 5000)+"xyz"+strings.Repeat("a", 4997))
}

func TestLargeFolderIsListed(t *testing.T) {
	const files = 2500 // three pages
	r := newRig(t)
	folder := filepath.Join(r.s3.Folder, r.s3.Bucket, prefix, "large")
	testkit.NoError(t, "mkdir", os.MkdirAll(folder, 0o755))
	for i := range files {
		testkit.NoError(t, "write", os.WriteFile(filepath.Join(folder, fmt.Sprintf("f%05d", i)), nil, 0o644))
	}
	names := r.names("large")
	if len(names) != files || names[0] != "f00000" || names[files-1] != fmt.Sprintf("f%05d", files-1) {
		t.Errorf("got %d names", len(names))
	}
}

func TestNamesThatCannotBeKeysAreRefused(t *testing.T) {
	r := newRig(t)
	for name, want := range map[string]syscall.Errno{
		strings.Repeat("n", 256): syscall.ENAMETOOLONG,
		"not\xffUTF-8":           syscall.EILSEQ,
	} {
		err := os.WriteFile(r.path(name), nil, 0o644)
		if !errors.Is(err, want) && !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%.20q: got %v", name, err)
		}
	}
	deep := r.dir
	var err error
	for range 10 {
		deep = filepath.Join(deep, strings.Repeat("d", 200))
		if err = os.Mkdir(deep, 0o755); err != nil {
			break
		}
	}
	r.wantErrno("a long key", err, syscall.ENAMETOOLONG)
}

// TestOperationsHaveTheEffectsOfALocalFileSystem performs random operations on the mount and on a local folder.
func TestOperationsHaveTheEffectsOfALocalFileSystem(t *testing.T) {
	r := newRig(t)
	local := t.TempDir()
	random := rand.New(rand.NewPCG(1, 2))
	names := []string{"a", "b", "d/a", "d/b"}
	for _, root := range []string{local, r.dir} {
		testkit.NoError(t, "mkdir", os.Mkdir(filepath.Join(root, "d"), 0o755))
	}
	for step := range 300 {
		name, other := names[random.IntN(len(names))], names[random.IntN(len(names))]
		data := []byte(strings.Repeat(fmt.Sprint(step, " "), random.IntN(3000)))
		off, operation := int64(random.IntN(10000)), random.IntN(7)
		act := func(root string) error {
			path := filepath.Join(root, name)
			switch operation {
			case 0:
				return os.WriteFile(path, data, 0o644)
			case 1, 2:
				f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
				if err != nil {
					return err
				}
				_, err = f.WriteAt(data, off)
				return errors.Join(err, f.Close())
			case 3:
				f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
				if err != nil {
					return err
				}
				_, err = f.Write(data)
				return errors.Join(err, f.Close())
			case 4:
				return os.Truncate(path, off)
			case 5:
				return os.Rename(path, filepath.Join(root, other))
			}
			return unix.Unlink(path)
		}
		want, got := act(local), act(r.dir)
		if !sameError(got, want) {
			t.Fatalf("step %d: operation %d of %s: %v, locally %v", step, operation, name, got, want)
		}
		for _, n := range names {
			want, wantErr := os.ReadFile(filepath.Join(local, n))
			got, gotErr := os.ReadFile(r.path(n))
			if !sameError(gotErr, wantErr) {
				t.Fatalf("step %d: operation %d: %s: %v, locally %v", step, operation, n, gotErr, wantErr)
			}
			r.equalAt(fmt.Sprintf("step %d: operation %d: %s", step, operation, n), got, want)
		}
	}
}

func sameError(a, b error) bool { return (a == nil) == (b == nil) && errno(a) == errno(b) }

func TestConcurrentRandomReadsOfOneHandle(t *testing.T) {
	r := newRig(t)
	content := random(12 << 20)
	r.put("file", content)
	f, err := os.Open(r.path("file"))
	testkit.NoError(t, "open", err)
	defer f.Close()
	var readers sync.WaitGroup
	for i := range 8 {
		readers.Go(func() {
			offsets, b := rand.New(rand.NewPCG(uint64(i), 1)), make([]byte, 10_000)
			for range 20 {
				off := offsets.Int64N(int64(len(content) - len(b)))
				if _, err := f.ReadAt(b, off); err != nil || string(b) != content[off:off+int64(len(b))] {
					t.Errorf("at %d: %v", off, err)
				}
			}
		})
	}
	readers.Wait()
}

func TestConcurrentWriters(t *testing.T) {
	r := newRig(t)
	var writers sync.WaitGroup
	for i := range 8 {
		writers.Go(func() {
			for j := range 5 {
				name := fmt.Sprintf("w%d/f%d", i, j)
				if err := errors.Join(os.MkdirAll(r.path(fmt.Sprint("w", i)), 0o755), os.WriteFile(r.path(name), []byte(name), 0o644)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	writers.Wait()
	for i := range 8 {
		for j := range 5 {
			name := fmt.Sprintf("w%d/f%d", i, j)
			r.wantObject(name, name)
		}
	}
}
