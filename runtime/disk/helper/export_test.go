package helper

import (
	"io"
	"os"
	"path/filepath"
	"testing"

	"go.podman.io/storage/pkg/idtools"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/testkit"
)

// TestContentsOfALayerAreItsOwnFiles: an archive of an image may replace a file by a link or a pipe.
func TestContentsOfALayerAreItsOwnFiles(t *testing.T) {
	outside, dir := filepath.Join(t.TempDir(), "secret"), t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	for _, err := range []error{
		os.WriteFile(outside, []byte("secret"), 0o600), os.Mkdir(in("a"), 0o700), os.WriteFile(in("a/file"), []byte("own"), 0o600),
		os.Symlink(outside, in("link")), os.Symlink(filepath.Dir(outside), in("folder")), unix.Mkfifo(in("pipe"), 0o600),
	} {
		testkit.NoError(t, "make the layer", err)
	}
	root, err := os.OpenRoot(dir)
	testkit.NoError(t, "open", err)
	defer root.Close()
	for name, want := range map[string]string{
		"a/file": "own", "./a/file": "own", "/a/file": "own", "../a/file": "own", "pipe": "",
		"link": "refused", "folder/secret": "refused", "../" + filepath.Base(filepath.Dir(outside)) + "/secret": "refused",
	} {
		got := "refused"
		if file, err := (contents{root}).Get(name); err == nil {
			content, err := io.ReadAll(file)
			testkit.NoError(t, "read "+name, err)
			file.Close()
			got = string(content)
		}
		if got != want {
			t.Errorf("%s has %q, want %q", name, got, want)
		}
	}
}

func TestOwnersAreThoseInTheContainer(t *testing.T) {
	mappings := []idtools.IDMap{{ContainerID: 0, HostID: 1, Size: 1000}, {ContainerID: 1000, HostID: 5000, Size: 10}}
	for host, want := range map[int]int{1: 0, 1000: 999, 5000: 1000, 5009: 1009, 0: overflowID, 1001: overflowID, 5010: overflowID} {
		if got := inContainer(host, mappings); got != want {
			t.Errorf("%d is %d in the container, want %d", host, got, want)
		}
	}
	if got := inContainer(7, nil); got != 7 {
		t.Errorf("without mappings 7 is %d", got)
	}
}
