// Package ociimage writes container images as tar archives, and reads and unpacks them.
//
// An archive is an OCI image layout that also contains the manifest.json of the docker-archive format:
// `podman load`, `docker load` and skopeo can read it as either format. See
// https://github.com/opencontainers/image-spec/blob/main/image-layout.md.
package ociimage

import (
	"archive/tar"
	"encoding/json"
	"fmt"
	"io"
	"path"
	"slices"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// MediaType is the media type of an archive.
const MediaType = "application/x-tar"

// Image is a container image for Write.
type Image struct {
	Name   string // such as localhost/shop:latest
	Config []byte // the image configuration as JSON; rootfs lists the layers
	Layers []Layer
}

// Layer is an uncompressed tar stream.
type Layer struct {
	Digest digest.Digest
	Size   int64
	// Write writes the stream. Each call writes the same bytes.
	Write func(io.Writer) error
}

// Measure calls write once to compute the digest and the size of a layer, and returns the layer.
func Measure(write func(io.Writer) error) (Layer, error) {
	sum := newSummer(io.Discard)
	err := write(sum)
	return Layer{Digest: sum.digester.Digest(), Size: sum.size, Write: write}, err
}

// summer computes the digest and the size of the data written to it.
type summer struct {
	io.Writer
	digester digest.Digester
	size     int64
}

func newSummer(w io.Writer) *summer {
	d := digest.SHA256.Digester()
	return &summer{Writer: io.MultiWriter(d.Hash(), w), digester: d}
}

func (s *summer) Write(b []byte) (int, error) {
	n, err := s.Writer.Write(b)
	s.size += int64(n)
	return n, err
}

// Write writes an image as an archive. If it fails, the stream is incomplete. It fails if the content
// of a layer does not match the layer's digest.
func Write(w io.Writer, image Image) error {
	config := descriptor(v1.MediaTypeImageConfig, image.Config)
	var layers []v1.Descriptor
	listed := dockerImage{Config: blobPath(config.Digest), RepoTags: []string{image.Name}}
	for _, l := range image.Layers {
		layers = append(layers, v1.Descriptor{MediaType: v1.MediaTypeImageLayer, Digest: l.Digest, Size: l.Size})
		listed.Layers = append(listed.Layers, blobPath(l.Digest))
	}
	version := specs.Versioned{SchemaVersion: 2}
	manifest := encode(v1.Manifest{Versioned: version, MediaType: v1.MediaTypeImageManifest, Config: config, Layers: layers})
	entry := descriptor(v1.MediaTypeImageManifest, manifest)
	entry.Annotations = map[string]string{v1.AnnotationRefName: image.Name}
	out := tar.NewWriter(w)
	document := func(name string, content []byte) error {
		return writeFile(out, name, int64(len(content)), func(w io.Writer) error {
			_, err := w.Write(content)
			return err
		})
	}
	for _, d := range []struct {
		name    string
		content []byte
	}{
		{v1.ImageLayoutFile, encode(v1.ImageLayout{Version: v1.ImageLayoutVersion})},
		{dockerManifest, encode([]dockerImage{listed})},
		{blobPath(config.Digest), image.Config},
		{blobPath(entry.Digest), manifest},
	} {
		if err := document(d.name, d.content); err != nil {
			return err
		}
	}
	for i, l := range image.Layers {
		if slices.ContainsFunc(image.Layers[:i], func(other Layer) bool { return other.Digest == l.Digest }) {
			continue
		}
		err := writeFile(out, blobPath(l.Digest), l.Size, func(w io.Writer) error {
			sum := newSummer(w)
			if err := l.Write(sum); err != nil {
				return err
			}
			if got := sum.digester.Digest(); got != l.Digest {
				return fmt.Errorf("it has the digest %s", got)
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("layer %s: %w", l.Digest, err)
		}
	}
	// The index comes last, so that an archive that is cut off between two files has none.
	index := v1.Index{Versioned: version, MediaType: v1.MediaTypeImageIndex, Manifests: []v1.Descriptor{entry}}
	if err := document(v1.ImageIndexFile, encode(index)); err != nil {
		return err
	}
	return out.Close()
}

func writeFile(out *tar.Writer, name string, size int64, write func(io.Writer) error) error {
	if err := out.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: size}); err != nil {
		return err
	}
	if err := write(out); err != nil {
		return err
	}
	return out.Flush() // fails if the file is shorter than its size
}

// dockerManifest is the file of a docker-archive that lists its images.
const dockerManifest = "manifest.json"

type dockerImage struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// encode marshals a document of a type that always marshals without an error.
func encode(document any) []byte {
	content, err := json.Marshal(document)
	if err != nil {
		panic(err)
	}
	return content
}

func descriptor(mediaType string, content []byte) v1.Descriptor {
	return v1.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(content), Size: int64(len(content))}
}

// blobFolder is the folder of an image layout for blobs with SHA-256 digests.
const blobFolder = v1.ImageBlobsDir + "/sha256"

func blobPath(d digest.Digest) string { return path.Join(blobFolder, d.Encoded()) }
