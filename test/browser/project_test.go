//go:build integration

package browser_test

import (
	"archive/tar"
	"io"
	"os"
)

// pack returns folders as one tar stream, each with its symbolic links. A path that is
// in several folders is the last one's.
func pack(folders ...string) io.Reader {
	r, w := io.Pipe()
	go func() { // ends with the stream
		archive := tar.NewWriter(w)
		for _, folder := range folders {
			if err := archive.AddFS(os.DirFS(folder)); err != nil {
				w.CloseWithError(err)
				return
			}
		}
		w.CloseWithError(archive.Close())
	}()
	return r
}
