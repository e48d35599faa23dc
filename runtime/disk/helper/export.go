package helper

import (
	"bufio"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vbatts/tar-split/tar/asm"
	splitstorage "github.com/vbatts/tar-split/tar/storage"
	"go.podman.io/storage"
	"go.podman.io/storage/pkg/idtools"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/archive/ociimage"
	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/runtime/disk/wire"
)

// exportBuffer joins the small writes of headers and padding.
const exportBuffer = 64 << 10

// ErrUnexportable means that a container image cannot represent a file of the snapshot. It is wrapped.
var ErrUnexportable = tree.ErrUnpackable

// Export reads a wire.Export from r, and writes a snapshot to w as an archive of an image: the
// layers of the sandbox's image as they were imported, then one layer for each snapshot.
//
// Unlike the export of Podman's storage, it does not hold a storage lock while it reads layers:
// otherwise a slow client would block the creation of containers. The caller must prevent the
// deletion of the snapshot until Export returns.
func Export(r io.Reader, w io.Writer) error {
	var request wire.Export
	if err := json.NewDecoder(r).Decode(&request); err != nil {
		return fmt.Errorf("read the request: %w", err)
	}
	var d Disks
	if err := d.open(request.Config); err != nil {
		return err
	}
	image, err := d.exported(request.Snapshot)
	if err != nil {
		return err
	}
	image.Name = request.Name
	out := bufio.NewWriterSize(w, exportBuffer)
	if err := ociimage.Write(out, image); err != nil {
		return err
	}
	return out.Flush()
}

// exported returns the image to export for a snapshot.
func (d *Disks) exported(snapshot string) (ociimage.Image, error) {
	var result ociimage.Image
	image, err := d.store.Image(repository + snapshot)
	if err != nil {
		return result, err
	}
	_, config, err := d.documents(image.ID)
	if err != nil {
		return result, err
	}
	layers, err := d.chain(image.TopLayer)
	if err != nil {
		return result, err
	}
	history, _ := config["history"].([]any)
	digests := make([]string, 0, len(layers))
	for _, layer := range layers {
		packed, err := d.exportedLayer(layer)
		if err != nil {
			return result, fmt.Errorf("layer %s: %w", layer.ID, err)
		}
		if len(history) > 0 && d.isSnapshot(layer) {
			history = append(history, map[string]string{"created_by": "doze snapshot"})
		}
		result.Layers = append(result.Layers, packed)
		digests = append(digests, packed.Digest.String())
	}
	config["rootfs"] = map[string]any{"type": "layers", "diff_ids": digests}
	if len(history) > 0 {
		config["history"] = history
	}
	result.Config, err = json.Marshal(config)
	return result, err
}

// chain returns a layer and the layers below it, lowest first. Podman squashes an image into one layer
// with the user ids of sandboxes; chain returns the image's own layers instead, which other nodes have.
func (d *Disks) chain(top string) ([]*storage.Layer, error) {
	images, err := d.store.Images()
	if err != nil {
		return nil, err
	}
	var layers []*storage.Layer
	for id := top; id != ""; {
		copied := slices.IndexFunc(images, func(i storage.Image) bool { return slices.Contains(i.MappedTopLayers, id) })
		if copied >= 0 {
			id = images[copied].TopLayer
		}
		layer, err := d.store.Layer(id)
		if err != nil {
			return nil, err
		}
		layers = append(layers, layer)
		id = layer.Parent
	}
	slices.Reverse(layers)
	return layers, nil
}

// isSnapshot reports whether a layer belongs to a snapshot. The digest and the tar-split that Podman's
// storage has for such a layer are an empty layer's.
func (d *Disks) isSnapshot(layer *storage.Layer) bool {
	return slices.ContainsFunc(layer.Names, func(name string) bool { return strings.HasPrefix(name, d.layerPrefix()) })
}

// exportedLayer returns the layer to export. If the storage has no digest, it reads all files first.
func (d *Disks) exportedLayer(layer *storage.Layer) (ociimage.Layer, error) {
	split := filepath.Join(d.config.GraphRoot, d.config.Driver+"-layers", layer.ID+".tar-split.gz")
	_, err := os.Stat(split)
	if d.isSnapshot(layer) || errors.Is(err, os.ErrNotExist) {
		return ociimage.Measure(func(w io.Writer) error { return d.pack(w, layer) })
	}
	write := func(w io.Writer) error { return d.assemble(w, layer, split) }
	if layer.UncompressedDigest == "" || layer.UncompressedSize <= 0 {
		return ociimage.Measure(write)
	}
	return ociimage.Layer{Digest: layer.UncompressedDigest, Size: layer.UncompressedSize, Write: write}, nil
}

// overflowID is the kernel's overflow uid and gid, which a container sees for unmapped owners.
const overflowID = 65534

// pack writes a layer as a tar stream of its files.
func (d *Disks) pack(w io.Writer, layer *storage.Layer) error {
	mappings := idtools.NewIDMappingsFromMaps(layer.UIDMap, layer.GIDMap)
	return tree.Pack(context.Background(), w, d.files(layer.ID), func(uid, gid uint32) (int, int) {
		return inContainer(int(uid), mappings.UIDs()), inContainer(int(gid), mappings.GIDs())
	})
}

// inContainer maps a host id to the container's id.
func inContainer(id int, mappings []idtools.IDMap) int {
	if len(mappings) == 0 {
		return id
	}
	for _, m := range mappings {
		if id >= m.HostID && id < m.HostID+m.Size {
			return m.ContainerID + id - m.HostID
		}
	}
	return overflowID
}

// assemble writes an image layer byte for byte as it was imported. The content comes from the layer's
// files, everything else from its tar-split.
func (d *Disks) assemble(w io.Writer, layer *storage.Layer, split string) error {
	file, err := os.Open(split)
	if err != nil {
		return err
	}
	defer file.Close()
	plain, err := gzip.NewReader(file)
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(d.files(layer.ID))
	if err != nil {
		return err
	}
	defer root.Close()
	return asm.WriteOutputTarStream(contents{root}, splitstorage.NewJSONUnpacker(plain), w)
}

// contents opens the files of a layer. An archive can have several entries with the same name, so the
// name of a regular file can now be a symbolic link or a pipe. A link must not escape the layer, and
// opening a pipe must not block.
type contents struct{ root *os.Root }

func (c contents) Get(name string) (io.ReadCloser, error) {
	return c.root.OpenFile(strings.TrimPrefix(filepath.Clean("/"+name), "/"), os.O_RDONLY|unix.O_NONBLOCK, 0)
}
