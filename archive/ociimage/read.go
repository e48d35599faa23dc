package ociimage

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"regexp"
	"strings"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

const (
	// maxEntries exceeds what Write writes: a snapshot adds up to 64 layers to its image's.
	maxEntries = 1000
	// maxDocument limits the size of files that are not blobs.
	maxDocument = 4 << 20
)

var isBlob = regexp.MustCompile("^" + blobFolder + "/[0-9a-f]{64}$").MatchString

// Visitor receives the content of an archive in the order of the archive. Unset functions are not
// called. An error ends Read, which returns it.
type Visitor struct {
	// Image receives the list of the image's blobs. Write writes it before the blobs.
	Image func(Contents) error
	// Document receives the documents of the image layout.
	Document func(name string, content []byte) error
	// Blob receives each blob once: the configuration, the manifest and the layers. It need not
	// read the content to its end.
	Blob func(d digest.Digest, content io.Reader) error
}

// Contents lists the blobs of an image, whose manifest is not among them.
type Contents struct {
	Config digest.Digest
	Layers []digest.Digest // a layer can be listed twice
}

// Read reads an archive that Write has written. It verifies the digest of each blob after Blob has
// returned, so that Blob must not complete anything with content that is not verified.
func Read(archive io.Reader, v Visitor) error {
	in := tar.NewReader(archive)
	complete := false
	for range maxEntries {
		h, err := in.Next()
		if err == io.EOF && complete {
			return nil
		}
		if err == io.EOF {
			return errors.New("the archive has no image")
		}
		if err != nil {
			return err
		}
		switch {
		case h.Typeflag != tar.TypeReg:
			return fmt.Errorf("unexpected entry %q in the archive", h.Name)
		case isBlob(h.Name):
			err = v.readBlob(h.Name, in)
		case h.Name == dockerManifest || h.Name == v1.ImageLayoutFile || h.Name == v1.ImageIndexFile:
			complete = complete || h.Name == v1.ImageIndexFile
			if h.Size > maxDocument {
				return fmt.Errorf("%s in the archive has more than %d MiB", h.Name, maxDocument>>20)
			}
			err = v.readDocument(h.Name, in)
		default:
			return fmt.Errorf("unexpected entry %q in the archive", h.Name)
		}
		if err != nil {
			return err
		}
	}
	return fmt.Errorf("the archive has more than %d entries", maxEntries)
}

func (v Visitor) readDocument(name string, in io.Reader) error {
	content, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	if name != dockerManifest {
		if v.Document == nil {
			return nil
		}
		return v.Document(name, content)
	}
	var images []dockerImage
	if err := json.Unmarshal(content, &images); err != nil || len(images) != 1 {
		return fmt.Errorf("%s in the archive does not list one image", name)
	}
	var contents Contents
	for _, blob := range append(images[0].Layers, images[0].Config) {
		if !isBlob(blob) {
			return fmt.Errorf("%s in the archive lists %q, which is not a blob", name, blob)
		}
		contents.Layers = append(contents.Layers, digest.NewDigestFromEncoded(digest.SHA256, path.Base(blob)))
	}
	last := len(contents.Layers) - 1
	contents.Layers, contents.Config = contents.Layers[:last], contents.Layers[last]
	if v.Image == nil {
		return nil
	}
	return v.Image(contents)
}

func (v Visitor) readBlob(name string, in io.Reader) error {
	want := digest.NewDigestFromEncoded(digest.SHA256, strings.TrimPrefix(name, blobFolder+"/"))
	sum := want.Algorithm().Digester()
	in = io.TeeReader(in, sum.Hash())
	if v.Blob != nil {
		if err := v.Blob(want, in); err != nil {
			return err
		}
	}
	if _, err := io.Copy(io.Discard, in); err != nil {
		return err
	}
	if got := sum.Digest(); got != want {
		return fmt.Errorf("%s has the digest %s", name, got)
	}
	return nil
}

// Unpack unpacks an archive that Write has written, as an OCI image layout in a folder. It verifies
// the digests, and writes nothing outside the folder.
func Unpack(root *os.Root, archive io.Reader) error {
	if err := root.MkdirAll(blobFolder, 0o755); err != nil {
		return err
	}
	return Read(archive, Visitor{
		Document: func(name string, content []byte) error { return root.WriteFile(name, content, 0o644) },
		Blob: func(d digest.Digest, content io.Reader) error {
			file, err := root.OpenFile(blobPath(d), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
			if err != nil {
				return err
			}
			_, err = io.Copy(file, content)
			return errors.Join(err, file.Close())
		},
	})
}
