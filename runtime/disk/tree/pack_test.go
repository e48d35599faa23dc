package tree

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/testkit"
)

// sameOwner maps all files to one owner, so that the layers do not depend on the user of the test.
func sameOwner(uint32, uint32) (int, int) { return 1000, 2000 }

// pack returns the layer of a folder.
func pack(t *testing.T, dir string) []byte {
	t.Helper()
	var layer bytes.Buffer
	testkit.NoError(t, "pack", Pack(t.Context(), &layer, dir, sameOwner))
	return layer.Bytes()
}

// describe returns a line for each entry of a layer.
func describe(t *testing.T, layer []byte) []string {
	t.Helper()
	var lines []string
	in := tar.NewReader(bytes.NewReader(layer))
	for {
		h, err := in.Next()
		if err == io.EOF {
			return lines
		}
		testkit.NoError(t, "read the layer", err)
		content, err := io.ReadAll(in)
		testkit.NoError(t, "read the layer", err)
		line := fmt.Sprintf("%c %04o %d:%d %s", h.Typeflag, h.Mode, h.Uid, h.Gid, h.Name)
		if h.Linkname != "" {
			line += " -> " + h.Linkname
		}
		if len(content) > 0 && len(content) < 100 {
			line += " " + string(content)
		}
		for name, value := range h.PAXRecords {
			if name, ok := strings.CutPrefix(name, attributeRecord); ok {
				line += fmt.Sprintf(" %s=%s", name, value)
			}
		}
		lines = append(lines, line)
	}
}

// setAttribute sets an extended attribute of a file in dir.
func setAttribute(t *testing.T, path, name, value string) {
	t.Helper()
	if err := unix.Lsetxattr(path, name, []byte(value), 0); err != nil {
		t.Fatalf("set %s of %s, which the file system of TMPDIR has to support: %v", name, path, err)
	}
}

func TestPackWritesALayer(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	run := func(errs ...error) {
		t.Helper()
		testkit.NoError(t, "make the tree", errors.Join(errs...))
	}
	run(os.Chmod(dir, 0o750), os.Mkdir(in("a"), 0o700), os.Chmod(in("a"), 0o777|os.ModeSticky), os.Mkdir(in("new"), 0o755), os.Chmod(in("new"), 0o755))
	run(os.WriteFile(in("a/program"), []byte("run"), 0o700), os.Chmod(in("a/program"), 0o755|os.ModeSetuid))
	run(os.Link(in("a/program"), in("z-link")), os.Symlink("/nowhere", in("symlink")), unix.Mkfifo(in("fifo"), 0o600), os.Chmod(in("fifo"), 0o620))
	run(unix.Mknod(in("a/gone"), unix.S_IFCHR, 0), unix.Mknod(in("socket"), unix.S_IFSOCK|0o600, 0))
	run(os.WriteFile(in("sparse"), nil, 0o600), os.Truncate(in("sparse"), 1<<20), os.WriteFile(in("\xff"), nil, 0o600))
	setAttribute(t, in("a/program"), "user.note", "kept\x00\xff")
	setAttribute(t, in("new"), "user.overlay.opaque", "y")
	setAttribute(t, in("a"), "user.overlay.origin", "x")
	at := time.Unix(981173106, 789)
	run(os.Chtimes(in("a/program"), at, at))

	layer := pack(t, dir)
	testkit.Diff(t, "layer", describe(t, layer), []string{
		"5 0750 1000:2000 ./",
		"5 1777 1000:2000 a/",
		"0 0000 0:0 a/.wh.gone",
		"0 4755 1000:2000 a/program run user.note=kept\x00\xff",
		"6 0620 1000:2000 fifo",
		"5 0755 1000:2000 new/",
		"0 0000 0:0 new/.wh..wh..opq",
		"0 0600 1000:2000 sparse",
		"2 0777 1000:2000 symlink -> /nowhere",
		"1 4755 1000:2000 z-link -> a/program",
		"0 0600 1000:2000 \xff",
	})
	if again := pack(t, dir); !bytes.Equal(again, layer) {
		t.Error("the second layer has other bytes")
	}
	reader := tar.NewReader(bytes.NewReader(layer))
	for {
		h, err := reader.Next()
		testkit.NoError(t, "find the program", err)
		if h.Name == "a/program" {
			if !h.ModTime.Equal(at) {
				t.Errorf("the time is %v, want %v", h.ModTime, at)
			}
			break
		}
	}
}

// The kernel returns the names of a large folder in several parts.
func TestPackWritesAllEntriesOfALargeFolder(t *testing.T) {
	dir := t.TempDir()
	const files = 5000
	for i := range files {
		testkit.NoError(t, "create a file", os.WriteFile(filepath.Join(dir, fmt.Sprintf("file-with-a-longer-name-%d", i)), nil, 0o600))
	}
	if entries := describe(t, pack(t, dir)); len(entries) != files+1 {
		t.Errorf("the layer has %d entries, want %d files and the root", len(entries), files)
	}
}

func TestPackRefusesFoldersThatAreNestedTooDeep(t *testing.T) {
	dir := t.TempDir()
	fd, err := openFolder(unix.AT_FDCWD, dir)
	testkit.NoError(t, "open", err)
	for range maxDepth + 1 {
		testkit.NoError(t, "create a folder", unix.Mkdirat(fd, "d", 0o700))
		inner, err := openFolder(fd, "d")
		testkit.NoError(t, "open", err)
		unix.Close(fd)
		fd = inner
	}
	unix.Close(fd)
	t.Cleanup(func() { testkit.NoError(t, "remove", Remove(dir, "d")) })
	if err := Pack(t.Context(), io.Discard, dir, sameOwner); !errors.Is(err, ErrUnpackable) || !errors.Is(err, ErrTooDeep) {
		t.Errorf("packed: %v", err)
	}
}

func TestPackRefusesWhatALayerCannotHave(t *testing.T) {
	for name, c := range map[string]struct {
		entry string
		make  func(path string) error
	}{
		"a name that marks a deletion": {".wh.a", func(path string) error { return os.WriteFile(path, nil, 0o600) }},
		"a folder with such a name":    {".wh..wh..opq", func(path string) error { return os.Mkdir(path, 0o700) }},
		"a hole beyond the limit": {"sparse", func(path string) error {
			return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, maxPacked+1))
		}},
		"an attribute with =": {"attribute", func(path string) error {
			return errors.Join(os.WriteFile(path, nil, 0o600), unix.Lsetxattr(path, "user.a=b", []byte("c"), 0))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			testkit.NoError(t, "make the entry", c.make(filepath.Join(dir, c.entry)))
			err := Pack(t.Context(), io.Discard, dir, sameOwner)
			if !errors.Is(err, ErrUnpackable) || !strings.Contains(err.Error(), c.entry) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestPackEndsWithItsContext(t *testing.T) {
	dir := t.TempDir()
	testkit.NoError(t, "write", os.WriteFile(filepath.Join(dir, "a"), nil, 0o600))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Pack(ctx, io.Discard, dir, sameOwner); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// TestCapabilitiesInALayerHaveNoUserNamespace: the kernel reports capabilities of
// another user namespace with its root.
func TestCapabilitiesInALayerHaveNoUserNamespace(t *testing.T) {
	value := func(revision, root uint32) []byte {
		b := binary.LittleEndian.AppendUint32(nil, revision|1)
		b = append(b, make([]byte, 16)...)
		if revision == capabilities3 {
			b = binary.LittleEndian.AppendUint32(b, root)
		}
		return b
	}
	p := packer{owner: func(uid, _ uint32) (int, int) { return int(uid) - 1, 0 }}
	for name, c := range map[string]struct{ have, want []byte }{
		"of the container":          {value(capabilities3, 1), value(capabilities2, 0)},
		"of a namespace in it":      {value(capabilities3, 1001), nil},
		"of the image":              {value(capabilities2, 0), value(capabilities2, 0)},
		"that are not capabilities": {[]byte("x"), []byte("x")},
	} {
		t.Run(name, func(t *testing.T) { testkit.Diff(t, "capabilities", p.capabilities(c.have), c.want) })
	}
}
