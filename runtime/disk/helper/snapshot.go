package helper

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	"go.podman.io/storage"
	"go.podman.io/storage/types"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/runtime/disk/wire"
)

// A snapshot is, in Podman's storage:
//
//	layer      its files, on the layer below the container's; owned by the node through its name
//	image      the image of the container with that layer on top, tagged with the snapshot's id
//	containers of the storage alone, without processes: `podman image prune -a` and `podman rmi`
//	           keep images that a container uses. One uses the image, one each image below it
//	           (see protectBelow)
//
// The layer has the container's ID mappings. Podman therefore creates containers from the image
// without a copy of the layer for their user ids, as it would make of one without mappings.

// Repository of the images of snapshots. sandbox.SnapshotRef is the reference of one.
const repository = "localhost/doze/snapshot:"

// label has the snapshot's id in the configuration of its image.
const label = "run.doze.snapshot"

func (d *Disks) layerName(snapshot string) string { return d.layerPrefix() + snapshot }

func (d *Disks) layerPrefix() string { return "doze-snapshot-" + d.config.Node + "-" }

// belowPrefix begins the names of the containers that protect images below a snapshot.
func (d *Disks) belowPrefix(snapshot string) string { return d.layerName(snapshot) + "-below-" }

// layerID returns the id that the storage has for the layer of a snapshot.
func (d *Disks) layerID(snapshot string) string {
	sum := sha256.Sum256([]byte(d.layerName(snapshot)))
	return hex.EncodeToString(sum[:])
}

// Publish makes a captured copy a snapshot, on the image of its container. With Flatten, the snapshot has the files of
// all snapshots below, and is based on their image. A copy of paths has the files of that image there, too, and is based
// on it. The snapshot is on the disk when Publish returns.
func (d *Disks) Publish(r wire.Request, reply *wire.Reply) error {
	return d.respond(reply, func() error {
		d.mu.Lock()
		c := d.copies[r.Snapshot]
		d.mu.Unlock()
		if c == nil {
			return errors.New("publish: the helper that captured the disk has ended")
		}
		if r.Flatten || len(c.paths) > 0 {
			return d.publishFlat(r.Snapshot, c)
		}
		d.end(r.Snapshot)
		return d.publish(r.Snapshot, c.base, d.staging(r.Snapshot))
	})
}

// publishFlat is Publish with Flatten, or of a copy of paths.
func (d *Disks) publishFlat(snapshot string, c *copying) error {
	staging, flat := d.staging(snapshot), d.flat(snapshot)
	digests, err := d.imageLayers(c.base.image)
	if err != nil {
		return err
	}
	base, err := d.imageOf(wire.Request{Image: digests}) // before the copy
	if err != nil {
		return fmt.Errorf("find the image below the snapshots: %w", err)
	}
	if err := d.flatten(c, staging, flat); err != nil {
		return err
	}
	if err := d.discard(staging); err != nil {
		return err
	}
	if err := os.Rename(flat, staging); err != nil {
		return err
	}
	d.end(snapshot)
	return d.adopt(snapshot, base)
}

// flatten creates the folder flat with the files of a copy, which are in the folder staging, and of the layers below.
func (d *Disks) flatten(c *copying, staging, flat string) error {
	own, image, err := d.foldersBelow(c.base.layer)
	if err != nil {
		return err
	}
	own = slices.Insert(own, 0, staging)
	if len(c.paths) > 0 {
		disk, err := tree.OpenMerged(own, image, d.shift())
		if err != nil {
			return err
		}
		defer disk.Close()
		return c.noPath(tree.FlattenPaths(c.ctx, disk, flat, tree.NewPaths(c.paths)))
	}
	disk, err := tree.OpenLayers(own, image)
	if err != nil {
		return err
	}
	defer disk.Close()
	return tree.Flatten(c.ctx, disk, flat)
}

// noPathError means that a disk does not have a path of a copy.
type noPathError struct {
	index int
	error
}

// noPath converts *tree.PathError to *noPathError.
func (c *copying) noPath(err error) error {
	missing, ok := errors.AsType[*tree.PathError](err)
	if !ok {
		return err
	}
	index := slices.IndexFunc(c.paths, func(p string) bool { return strings.HasPrefix(p+"/", missing.Path+"/") })
	return &noPathError{max(index, 0), missing}
}

// checkPaths returns *noPathError if the disk of a container does not have one of the paths of its copy.
func (d *Disks) checkPaths(c *copying) error {
	if len(c.paths) == 0 {
		return nil
	}
	own, image, err := d.foldersBelow(c.base.layer)
	if err != nil {
		return err
	}
	disk, err := tree.OpenMerged(slices.Insert(own, 0, d.files(c.base.layer.ID)), image, d.shift())
	if err != nil {
		return err
	}
	defer disk.Close()
	return c.noPath(tree.NewPaths(c.paths).Check(disk))
}

// Stage copies the files of the partial snapshot From for Overlay.
func (d *Disks) Stage(r wire.Request, reply *wire.Reply) error {
	return d.respond(reply, func() error {
		image, err := d.store.Image(repository + r.From)
		if err != nil {
			return err
		}
		d.end(r.Snapshot)
		if err := d.discard(d.staging(r.Snapshot)); err != nil {
			return err
		}
		c := &copying{tree: tree.New(d.files(image.TopLayer), d.staging(r.Snapshot))}
		d.begin(r.Snapshot, c)
		defer d.end(r.Snapshot)
		usage, err := c.tree.Complete(c.ctx)
		reply.Usage = wire.Usage(usage)
		return err
	})
}

// Move makes the disk of a container that does not run a snapshot, and leaves the container an
// empty one. It is on the disk when Move returns.
func (d *Disks) Move(r wire.Request, reply *wire.Reply) error {
	return d.respond(reply, func() error {
		base, err := d.disk(r.Container)
		if err != nil {
			return err
		}
		// A container that has been stopped since its disk was prefetched has left a copy.
		d.end(r.Snapshot)
		if err := d.discard(d.staging(r.Snapshot)); err != nil {
			return err
		}
		return d.publish(r.Snapshot, base, d.files(base.layer.ID))
	})
}

// publish creates layer, image and container of a snapshot. At last it exchanges the layer's
// empty folder for the one with the files, in one step.
func (d *Disks) publish(snapshot string, base base, files string) error {
	below := base.layer
	mappings := types.IDMappingOptions{UIDMap: below.UIDMap, GIDMap: below.GIDMap}
	// Podman refuses images whose layers have neither size nor digest. The digest is of no
	// content, so that an attempt to push the image fails instead of pushing an empty layer. Export
	// has the content.
	layer, _, err := d.store.PutLayer(d.layerID(snapshot), below.Parent, []string{d.layerName(snapshot)}, below.MountLabel, false,
		&storage.LayerOptions{IDMappingOptions: mappings, UncompressedDigest: digest.FromString(d.layerName(snapshot))},
		bytes.NewReader(make([]byte, 1024))) // an archive without entries
	if err != nil {
		return fmt.Errorf("create the layer: %w", err)
	}
	image, err := d.createImage(snapshot, base.image, layer.ID)
	if err != nil {
		return fmt.Errorf("create the image: %w", err)
	}
	if err := d.protect(d.layerName(snapshot), image.ID, mappings); err != nil {
		return err
	}
	if err := d.protectBelow(snapshot, below.Parent, mappings); err != nil {
		return err
	}
	// After a loss of power, a layer that has files also has their contents and all that the storage needs.
	if err := d.sync(); err != nil {
		return err
	}
	if err := unix.Renameat2(unix.AT_FDCWD, files, unix.AT_FDCWD, d.files(layer.ID), unix.RENAME_EXCHANGE); err != nil {
		return fmt.Errorf("put the files into the layer: %w", err)
	}
	if files == d.staging(snapshot) {
		if err := os.Remove(files); err != nil {
			return err
		}
	}
	return d.sync()
}

// protect creates a container that keeps an image.
func (d *Disks) protect(name, image string, mappings types.IDMappingOptions) error {
	_, err := d.store.CreateContainer("", []string{name}, image, "", "", &storage.ContainerOptions{IDMappingOptions: mappings})
	if err != nil {
		return fmt.Errorf("protect image %s: %w", image, err)
	}
	return nil
}

// protectBelow protects the images whose copies for the user ids of sandboxes are below a
// snapshot. The storage removes such a copy with its image even if other layers are based on it,
// as when an image gets the name of an older one, which is then pruned.
func (d *Disks) protectBelow(snapshot, layer string, mappings types.IDMappingOptions) error {
	images, err := d.store.Images()
	if err != nil {
		return err
	}
	for layer != "" {
		for _, image := range images {
			if !slices.Contains(image.MappedTopLayers, layer) {
				continue
			}
			if err := d.protect(d.belowPrefix(snapshot)+image.ID[:12], image.ID, mappings); err != nil {
				return err
			}
		}
		l, err := d.store.Layer(layer)
		if err != nil {
			return err
		}
		layer = l.Parent
	}
	return nil
}

// unprotect removes what protect and protectBelow created for a snapshot.
func (d *Disks) unprotect(snapshot string) error {
	containers, err := d.store.Containers()
	if err != nil {
		return err
	}
	for _, c := range containers {
		if len(c.Names) == 0 || c.Names[0] != d.layerName(snapshot) && !strings.HasPrefix(c.Names[0], d.belowPrefix(snapshot)) {
			continue
		}
		if err := d.store.DeleteContainer(c.ID); err != nil && !errors.Is(err, storage.ErrContainerUnknown) {
			return err
		}
	}
	return nil
}

// createImage creates the image of a snapshot: the container's image with the snapshot's id as a
// label, which gives it an id of its own.
func (d *Disks) createImage(snapshot, base, layer string) (*storage.Image, error) {
	manifest, config, err := d.documents(base)
	if err != nil {
		return nil, err
	}
	reference, _ := manifest["config"].(map[string]any)
	settings, _ := config["config"].(map[string]any)
	if settings == nil {
		settings = map[string]any{}
	}
	labels, _ := settings["Labels"].(map[string]any)
	if labels == nil {
		labels = map[string]any{}
	}
	labels[label] = snapshot
	settings["Labels"], config["config"] = labels, settings
	configured, err := json.Marshal(config)
	if err != nil {
		return nil, err
	}
	sum := digest.FromBytes(configured)
	reference["digest"], reference["size"] = sum.String(), len(configured)
	manifested, err := json.Marshal(manifest)
	if err != nil {
		return nil, err
	}
	return d.store.CreateImage(sum.Encoded(), []string{repository + snapshot}, layer, "", &storage.ImageOptions{
		Digest: digest.FromBytes(manifested),
		BigData: []storage.ImageBigDataOption{
			{Key: sum.String(), Data: configured, Digest: sum},
			{Key: storage.ImageDigestBigDataKey, Data: manifested, Digest: digest.FromBytes(manifested)},
		},
	})
}

// documents returns the manifest and the configuration of an image.
func (d *Disks) documents(image string) (manifest, config map[string]any, err error) {
	if manifest, err = d.document(image, storage.ImageDigestBigDataKey); err != nil {
		return nil, nil, err
	}
	reference, _ := manifest["config"].(map[string]any)
	key, _ := reference["digest"].(string)
	config, err = d.document(image, key)
	return manifest, config, err
}

// document returns a JSON document of an image.
func (d *Disks) document(image, key string) (map[string]any, error) {
	data, err := d.store.ImageBigData(image, key)
	if err != nil {
		return nil, err
	}
	var document map[string]any
	if err := json.Unmarshal(data, &document); err != nil {
		return nil, fmt.Errorf("decode %s of the image: %w", key, err)
	}
	return document, nil
}

// errInUse: containers are based on the snapshot.
var errInUse = errors.New("snapshot is in use")

// Delete deletes a snapshot, or what an interrupted call has left of one. Layers that other
// snapshots are based on stay in the storage until those are deleted. Idempotent.
func (d *Disks) Delete(r wire.Request, reply *wire.Reply) error {
	return d.respond(reply, func() error {
		d.end(r.Snapshot)
		for _, folder := range []string{d.staging(r.Snapshot), d.flat(r.Snapshot)} {
			if err := d.discard(folder); err != nil {
				return err
			}
		}
		image, err := d.store.Image(repository + r.Snapshot)
		if err == nil {
			if err := d.unused(image.ID, d.layerName(r.Snapshot)); err != nil {
				return err
			}
			if err := d.unprotect(r.Snapshot); err != nil {
				return err
			}
			if err := d.emptyLayer(r.Snapshot); err != nil {
				return err
			}
			if _, err := d.store.DeleteImage(image.ID, true); err != nil {
				return err
			}
		} else if !errors.Is(err, storage.ErrImageUnknown) {
			return err
		} else if err := d.unprotect(r.Snapshot); err != nil { // of an incomplete one, or the image was removed by force
			return err
		}
		if err := d.removeInterrupted(d.layerID(r.Snapshot)); err != nil {
			return err
		}
		err = d.store.DeleteLayer(d.layerID(r.Snapshot)) // of an incomplete one
		if err != nil && !errors.Is(err, storage.ErrLayerUnknown) && !errors.Is(err, storage.ErrLayerHasChildren) && !errors.Is(err, storage.ErrNotALayer) {
			return err
		}
		return d.syncLists() // before the node forgets the snapshot
	})
}

// emptyLayer discards the files of the layer of a snapshot that is about to be deleted, unless
// other layers are based on it: their number must not delay the deletion.
func (d *Disks) emptyLayer(snapshot string) error {
	layers, err := d.store.Layers()
	if err != nil {
		return err
	}
	id := d.layerID(snapshot)
	for _, layer := range layers {
		if layer.Parent == id {
			return nil
		}
	}
	return d.empty(id)
}

// unused returns errInUse if a container other than the snapshot's own has the image.
func (d *Disks) unused(image, own string) error {
	containers, err := d.store.Containers()
	if err != nil {
		return err
	}
	for _, c := range containers {
		if c.ImageID == image && (len(c.Names) == 0 || c.Names[0] != own) {
			return errInUse
		}
	}
	return nil
}

// Moved reports whether an interrupted Move had moved the files: the layer has some. Then it makes the snapshot durable.
func (d *Disks) Moved(r wire.Request, reply *wire.Reply) error {
	return d.respond(reply, func() error {
		entries, err := os.ReadDir(d.files(d.layerID(r.Snapshot)))
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil || len(entries) == 0 {
			return err
		}
		reply.Moved = true
		return d.sync()
	})
}

// Discard empties the disk of a container that does not run.
func (d *Disks) Discard(r wire.Request, reply *wire.Reply) error {
	return d.respond(reply, func() error {
		base, err := d.disk(r.Container)
		if err != nil {
			return err
		}
		return d.empty(base.layer.ID)
	})
}
