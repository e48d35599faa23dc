package archive

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/doze-run/doze/archive/archivetest"
)

func TestLimits(t *testing.T) {
	two := archivetest.Tar(t, archivetest.Entry{Name: "abc/", Kind: tar.TypeDir, Mode: 0o755}, archivetest.Entry{Name: "def/", Kind: tar.TypeDir, Mode: 0o755})
	for _, tt := range []struct {
		name                    string
		entries, folders, names int // that there were before two of each
		fits                    bool
	}{
		{"at the limits", maxEntries - 2, 0, maxFolderNames - 6, true},
		{"entries", maxEntries - 1, 0, 0, false},
		{"names of folders", 0, 0, maxFolderNames - 5, false},
		{"folders", 0, maxFolders - 1, 0, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root, err := os.OpenRoot(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			u := &unpacker{root: root}
			u.entries, u.names, u.folders = tt.entries, tt.names, make([]folderEntry, tt.folders)
			if err := u.run(t.Context(), bytes.NewReader(two)); tt.fits && err != nil || !tt.fits && !errors.Is(err, ErrTooLarge) {
				t.Errorf("got %v", err)
			}
		})
	}
}
