package ociimage_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"

	"github.com/doze-run/doze/archive/ociimage"
	"github.com/doze-run/doze/archive/ociimage/imagetest"
	"github.com/doze-run/doze/testkit"
)

// layerOf returns a layer with one file.
func layerOf(t *testing.T, name, content string) ociimage.Layer {
	t.Helper()
	layer, err := ociimage.Measure(func(w io.Writer) error {
		out := tar.NewWriter(w)
		err := out.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: int64(len(content))})
		if err == nil {
			_, err = io.WriteString(out, content)
		}
		return errors.Join(err, out.Close())
	})
	testkit.NoError(t, "measure the layer", err)
	return layer
}

func imageOf(t *testing.T) ociimage.Image {
	t.Helper()
	first := layerOf(t, "a", "1")
	return ociimage.Image{
		Name: "localhost/shop:before", Config: []byte(`{"os":"linux"}`),
		Layers: []ociimage.Layer{first, layerOf(t, "b", "2"), layerOf(t, ".wh.a", ""), first},
	}
}

func archiveOf(t *testing.T, image ociimage.Image) *bytes.Buffer {
	t.Helper()
	var archive bytes.Buffer
	testkit.NoError(t, "write the archive", ociimage.Write(&archive, image))
	return &archive
}

func TestArchiveHasAllLayersInTheirOrder(t *testing.T) {
	image := imageOf(t)
	got := imagetest.Read(t, archiveOf(t, image))
	if got.Config.OS != "linux" || len(got.Names) != 1 || got.Names[0] != image.Name {
		t.Errorf("got %+v", got)
	}
	testkit.Diff(t, "layers", got.Layers, []digest.Digest{image.Layers[0].Digest, image.Layers[1].Digest, image.Layers[2].Digest, image.Layers[0].Digest})
	if got.Files["a"].Content != "1" || got.Files["b"].Content != "2" || len(got.Files) != 2 {
		t.Errorf("files %+v", got.Files)
	}
}

func TestWriteFailsForALayerThatIsNotWhatItWas(t *testing.T) {
	failed := errors.New("it failed")
	for name, write := range map[string]func(io.Writer) error{
		"other content": func(w io.Writer) error { _, err := w.Write(make([]byte, 2048)); return err },
		"too long":      func(w io.Writer) error { _, err := w.Write(make([]byte, 4096)); return err },
		"too short":     func(io.Writer) error { return nil },
		"no content":    func(io.Writer) error { return failed },
	} {
		t.Run(name, func(t *testing.T) {
			image := imageOf(t)
			image.Layers[1].Write = write
			err := ociimage.Write(io.Discard, image)
			if err == nil || !strings.Contains(err.Error(), image.Layers[1].Digest.String()) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestUnpackedArchiveIsAnImageLayout(t *testing.T) {
	image := imageOf(t)
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	testkit.NoError(t, "open", err)
	defer root.Close()
	testkit.NoError(t, "unpack", ociimage.Unpack(root, archiveOf(t, image)))
	if content, err := os.ReadFile(filepath.Join(dir, "oci-layout")); err != nil || !strings.Contains(string(content), `"1.0.0"`) {
		t.Errorf("%s, %v", content, err)
	}
	var have []string
	testkit.NoError(t, "list", filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			have = append(have, path)
		}
		return err
	}))
	if len(have) != 7 { // two documents, manifest, configuration, three layers
		t.Errorf("unpacked %v", have)
	}
	content, err := os.ReadFile(filepath.Join(dir, "blobs", "sha256", image.Layers[1].Digest.Encoded()))
	if err != nil || digest.FromBytes(content) != image.Layers[1].Digest {
		t.Errorf("layer: %v", err)
	}
}

func TestUnpackRefusesOtherArchives(t *testing.T) {
	whole := archiveOf(t, imageOf(t)).Bytes()
	single := func(h tar.Header, content string) []byte {
		var archive bytes.Buffer
		out := tar.NewWriter(&archive)
		h.Size = int64(len(content))
		testkit.NoError(t, "write", errors.Join(out.WriteHeader(&h), func() error { _, err := io.WriteString(out, content); return err }(), out.Close()))
		return archive.Bytes()
	}
	blob := "blobs/sha256/" + strings.Repeat("0", 64)
	for name, archive := range map[string][]byte{
		"incomplete":     whole[:len(whole)-2000],
		"without index":  whole[:bytes.LastIndex(whole, []byte("index.json"))],
		"empty":          nil,
		"large index":    single(tar.Header{Name: "index.json"}, strings.Repeat(" ", 5<<20)),
		"outside":        single(tar.Header{Name: "../index.json"}, "{}"),
		"link":           single(tar.Header{Name: "index.json", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"}, ""),
		"other file":     single(tar.Header{Name: "blobs/x"}, "x"),
		"other digest":   single(tar.Header{Name: blob}, "x"),
		"without images": single(tar.Header{Name: "oci-layout"}, "{}"),
		"two images":     single(tar.Header{Name: "manifest.json"}, "[{},{}]"),
		"no blob listed": single(tar.Header{Name: "manifest.json"}, `[{"Config":"../x"}]`),
	} {
		t.Run(name, func(t *testing.T) {
			root, err := os.OpenRoot(t.TempDir())
			testkit.NoError(t, "open", err)
			defer root.Close()
			if err := ociimage.Unpack(root, bytes.NewReader(archive)); err == nil {
				t.Error("unpacked")
			}
		})
	}
}

// TestReadVerifiesBlobsThatItsCallerSkips: a caller need not read a blob, such as one that it has.
func TestReadVerifiesBlobsThatItsCallerSkips(t *testing.T) {
	image := imageOf(t)
	whole := archiveOf(t, image).Bytes()
	read := func(archive []byte) (listed ociimage.Contents, blobs []digest.Digest, err error) {
		err = ociimage.Read(bytes.NewReader(archive), ociimage.Visitor{
			Image: func(c ociimage.Contents) error { listed = c; return nil },
			Blob:  func(d digest.Digest, _ io.Reader) error { blobs = append(blobs, d); return nil },
		})
		return listed, blobs, err
	}
	listed, blobs, err := read(whole)
	testkit.NoError(t, "read", err)
	testkit.Diff(t, "listed layers", listed.Layers, []digest.Digest{image.Layers[0].Digest, image.Layers[1].Digest, image.Layers[2].Digest, image.Layers[0].Digest})
	if listed.Config != digest.FromBytes(image.Config) || len(blobs) != 5 { // and the manifest
		t.Errorf("listed %s, blobs %v", listed.Config, blobs)
	}
	changed := bytes.Replace(whole, []byte("linux"), []byte("minix"), 1)
	if _, _, err := read(changed); err == nil || !strings.Contains(err.Error(), listed.Config.Encoded()) {
		t.Errorf("changed blob: %v", err)
	}
}
