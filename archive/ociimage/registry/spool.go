package registry

import (
	"io"
	"os"
	"runtime"

	"github.com/klauspost/compress/gzip"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// layer is a compressed layer in a temporary file.
type layer struct {
	v1.Descriptor
	file    *os.File
	removed bool // the file has no name anymore
}

// spool compresses a layer into a temporary file. The same content results in the same file, so that
// the digest identifies what a registry already has.
func spool(folder string, content io.Reader) (_ *layer, err error) {
	file, err := os.CreateTemp(folder, "doze-layer-*.gz")
	if err != nil {
		return nil, err
	}
	// The file ends with the process, whatever ends that. Windows removes no open file.
	l := &layer{file: file, removed: os.Remove(file.Name()) == nil}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	sum := digest.SHA256.Digester()
	compressor := gzip.NewWriter(io.MultiWriter(file, sum.Hash()))
	if _, err = io.Copy(compressor, content); err != nil {
		return nil, err
	}
	if err = compressor.Close(); err != nil {
		return nil, err
	}
	size, err := file.Seek(0, io.SeekCurrent)
	l.Descriptor = v1.Descriptor{MediaType: v1.MediaTypeImageLayerGzip, Digest: sum.Digest(), Size: size}
	return l, err
}

// close deletes the file.
func (l *layer) close() {
	l.file.Close()
	if !l.removed {
		_ = os.Remove(l.file.Name())
	}
}

// content returns the compressed content, and reports to read, unless it is nil, what is read of it.
func (l *layer) content(read func(int)) io.Reader {
	return &layerReader{io.NewSectionReader(l.file, 0, l.Size), read}
}

type layerReader struct {
	io.Reader
	read func(int)
}

func (r *layerReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if r.read != nil {
		r.read(n)
	}
	return n, err
}

// TemporaryFolder returns the folder for layers: TMPDIR, or else /var/tmp, because /tmp is in memory
// on many systems.
func TemporaryFolder(getenv func(string) string) string {
	const onDisk = "/var/tmp"
	if folder := getenv("TMPDIR"); folder != "" {
		return folder
	}
	if info, err := os.Stat(onDisk); runtime.GOOS != "windows" && err == nil && info.IsDir() {
		return onDisk
	}
	return os.TempDir()
}
