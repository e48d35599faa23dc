package server

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
)

func TestNamesOfFoldersInAnArchiveAreBounded(t *testing.T) {
	name := strings.Repeat(strings.Repeat("n", 200)+"/", 18)
	r, w := io.Pipe()
	go func() { // ended by the end of the archive, or of its reader
		archive := tar.NewWriter(w)
		for i := range maxArchiveNames/len(name) + 10 {
			h := &tar.Header{Name: fmt.Sprint(name, i, "/"), Typeflag: tar.TypeDir, Mode: 0o755}
			if archive.WriteHeader(h) != nil {
				return
			}
		}
		w.CloseWithError(archive.Close())
	}()
	defer r.Close()
	_, err := Unpack(t.Context(), t.TempDir(), r)
	var refusal *guest.Error
	if !errors.As(err, &refusal) || refusal.Code != guest.CodeTooLarge {
		t.Errorf("got %v", err)
	}
}
