// Package imagetest reads archives of container images for tests.
package imagetest

import (
	"archive/tar"
	"bufio"
	"encoding/json"
	"io"
	"path"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// Image is the content of an archive.
type Image struct {
	Names  []string // from manifest.json; Read checks that index.json has the same name
	Config v1.Image
	Layers []digest.Digest
	Files  map[string]File // by cleaned name, after all layers
}

// File is an entry of a layer.
type File struct {
	tar.Header
	Content string // the first maxContent bytes
}

const maxContent = 4096

// Read reads an archive, and verifies its digests and references.
func Read(t testing.TB, r io.Reader) Image {
	t.Helper()
	var image Image
	fatal := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	documents := map[string][]byte{}
	blobs := map[string]blob{}
	in := tar.NewReader(r)
	for {
		h, err := in.Next()
		if err == io.EOF {
			break
		}
		fatal(err)
		content := bufio.NewReader(in)
		if first, err := content.Peek(1); err == nil && (first[0] == '{' || first[0] == '[') {
			documents[h.Name], err = io.ReadAll(content)
			fatal(err)
			blobs[h.Name] = blob{digest: digest.FromBytes(documents[h.Name]), size: h.Size}
			continue
		}
		b, err := readLayer(content)
		fatal(err)
		b.size = h.Size
		blobs[h.Name] = b
	}
	decode := func(name string, into any) {
		t.Helper()
		if err := json.Unmarshal(documents[name], into); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	checked := func(d v1.Descriptor) string {
		t.Helper()
		name := "blobs/sha256/" + d.Digest.Encoded()
		if b := blobs[name]; b.digest != d.Digest || b.size != d.Size {
			t.Fatalf("%s has %d bytes and the digest %s, want %+v", name, b.size, b.digest, d)
		}
		return name
	}
	var layout v1.ImageLayout
	decode(v1.ImageLayoutFile, &layout)
	var index v1.Index
	decode(v1.ImageIndexFile, &index)
	if layout.Version != v1.ImageLayoutVersion || len(index.Manifests) != 1 {
		t.Fatalf("layout %+v, index %+v", layout, index)
	}
	var manifest v1.Manifest
	decode(checked(index.Manifests[0]), &manifest)
	config := checked(manifest.Config)
	decode(config, &image.Config)
	var docker []struct {
		Config           string
		RepoTags, Layers []string
	}
	decode("manifest.json", &docker)
	if len(docker) != 1 || docker[0].Config != config || len(docker[0].Layers) != len(manifest.Layers) {
		t.Fatalf("manifest.json has %+v, the layout has %+v", docker, manifest)
	}
	if image.Names = docker[0].RepoTags; len(image.Names) != 1 || index.Manifests[0].Annotations[v1.AnnotationRefName] != image.Names[0] {
		t.Fatalf("names %v, %v", image.Names, index.Manifests[0].Annotations)
	}
	image.Files = map[string]File{}
	for i, layer := range manifest.Layers {
		if name := checked(layer); docker[0].Layers[i] != name {
			t.Fatalf("layer %d of manifest.json is %s, want %s", i, docker[0].Layers[i], name)
		}
		image.Layers = append(image.Layers, layer.Digest)
		image.apply(blobs[docker[0].Layers[i]].files)
	}
	return image
}

// blob is a file in the archive, and the entries of a layer.
type blob struct {
	digest digest.Digest
	size   int64
	files  []File
}

func readLayer(r io.Reader) (blob, error) {
	sum := digest.SHA256.Digester()
	r = io.TeeReader(r, sum.Hash())
	var b blob
	in := tar.NewReader(r)
	for {
		h, err := in.Next()
		if err == io.EOF {
			_, err = io.Copy(io.Discard, r) // the zeros after the end of the archive
			b.digest = sum.Digest()
			return b, err
		}
		if err != nil {
			return b, err
		}
		content, err := io.ReadAll(io.LimitReader(in, maxContent))
		if err != nil {
			return b, err
		}
		b.files = append(b.files, File{*h, string(content)})
	}
}

// apply applies a layer to the files.
func (i *Image) apply(layer []File) {
	for _, file := range layer { // whiteouts hide files of the layers below
		folder, last := path.Split(path.Clean(file.Name))
		if last == ".wh..wh..opq" {
			i.remove(strings.TrimSuffix(folder, "/"), false)
		} else if name, ok := strings.CutPrefix(last, ".wh."); ok {
			i.remove(folder+name, true)
		}
	}
	for _, file := range layer {
		name := path.Clean(file.Name)
		if strings.HasPrefix(path.Base(name), ".wh.") {
			continue
		}
		if i.Files[name].Typeflag == tar.TypeDir && file.Typeflag != tar.TypeDir {
			i.remove(name, false)
		}
		i.Files[name] = file
	}
}

// remove removes the content of a folder and, with itself, the folder or file.
func (i *Image) remove(name string, itself bool) {
	for other := range i.Files {
		if strings.HasPrefix(other, name+"/") || itself && other == name {
			delete(i.Files, other)
		}
	}
}
