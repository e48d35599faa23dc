package helper

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"go.podman.io/storage"
	"go.podman.io/storage/pkg/idtools"
	"go.podman.io/storage/types"

	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/runtime/disk/wire"
)

// Layers returns the folders of the layers of a snapshot and of its image, highest first, and the digests of
// the image's layers.
func (d *Disks) Layers(r wire.Request, reply *wire.Reply) error {
	return d.respond(reply, func() error {
		image, err := d.store.Image(repository + r.Snapshot)
		if err != nil {
			return err
		}
		if reply.Folders, reply.ImageFolders, err = d.folders(image.TopLayer); err != nil {
			return err
		}
		reply.Image, err = d.imageLayers(image.ID)
		return err
	})
}

// DiskLayers returns the folders of the layers of a container's disk and of its image, highest first, and the digests
// of the image's layers.
func (d *Disks) DiskLayers(r wire.Request, reply *wire.Reply) error {
	return d.respond(reply, func() error {
		base, err := d.disk(r.Container)
		if err != nil {
			return err
		}
		if reply.Folders, reply.ImageFolders, err = d.folders(base.layer.ID); err != nil {
			return err
		}
		reply.Image, err = d.imageLayers(base.image)
		return err
	})
}

// folders returns the folders of the layers of a snapshot or a container, and of its image, highest first.
func (d *Disks) folders(top string) (own, image []string, err error) {
	return d.foldersOf(top, func(layer *storage.Layer) bool { return d.isSnapshot(layer) || layer.ID == top }) // a container's own layer is the top
}

// foldersBelow is folders for the layers below a container.
func (d *Disks) foldersBelow(container *storage.Layer) (own, image []string, err error) {
	return d.foldersOf(container.Parent, d.isSnapshot)
}

// foldersOf returns the folders of a layer and the layers below it, highest first, in those for which isOwn returns true
// and the rest.
func (d *Disks) foldersOf(top string, isOwn func(*storage.Layer) bool) (own, image []string, err error) {
	chain, err := d.chain(top)
	if err != nil {
		return nil, nil, err
	}
	for _, layer := range slices.Backward(chain) {
		folder := filepath.Join(d.config.GraphRoot, d.config.Driver, layer.ID, "diff")
		if isOwn(layer) {
			own = append(own, folder)
		} else {
			image = append(image, folder)
		}
	}
	return own, image, nil
}

// shift is what is added to the ids of an image's entries to get the ids that containers have for them.
func (d *Disks) shift() uint32 { return uint32(d.config.IDs.Host - d.config.IDs.Container) }

// imageLayers returns the digests of an image's layers, lowest first.
func (d *Disks) imageLayers(image string) ([]string, error) {
	_, config, err := d.documents(image)
	if err != nil {
		return nil, err
	}
	root, _ := config["rootfs"].(map[string]any)
	list, _ := root["diff_ids"].([]any)
	digests := make([]string, len(list))
	for i := range list {
		digests[i], _ = list[i].(string)
	}
	if len(digests) == 0 {
		return nil, fmt.Errorf("the configuration of image %s has no layers", image)
	}
	return digests, nil
}

// errNoImage means that the storage does not have the image of a request.
var errNoImage = errors.New("no image has these layers")

// Adopt converts the staging folder of a snapshot to the snapshot. The snapshot is based on the image with the
// layers of the request or, with OtherLayers, on the image with the name of the request. The snapshot is durable when Adopt returns.
func (d *Disks) Adopt(r wire.Request, reply *wire.Reply) error {
	return d.respond(reply, func() error {
		image, err := d.imageOf(r)
		if err != nil {
			return err
		}
		return d.adopt(r.Snapshot, image)
	})
}

// Overlay converts the staging folder of a snapshot, which has entries at the paths of the request, to the snapshot. Its
// disk is the disk of the snapshot Below with these entries instead of its own. The snapshot is durable when Overlay returns.
func (d *Disks) Overlay(r wire.Request, reply *wire.Reply) error {
	return d.respond(reply, func() error {
		image, err := d.store.Image(repository + r.Below)
		if err != nil {
			return err
		}
		own, lowest, err := d.folders(image.TopLayer)
		if err != nil {
			return err
		}
		below, err := tree.OpenMerged(own, lowest, d.shift())
		if err != nil {
			return err
		}
		defer below.Close()
		if err := tree.Overlay(d.staging(r.Snapshot), below, tree.NewPaths(r.Paths)); err != nil {
			return err
		}
		return d.adopt(r.Snapshot, image.ID)
	})
}

// adopt converts the staging folder of a snapshot to the snapshot, based on an image.
func (d *Disks) adopt(snapshot, image string) error {
	// A container of the image makes the storage map the image's layers to the user ids.
	ids := []idtools.IDMap{{ContainerID: d.config.IDs.Container, HostID: d.config.IDs.Host, Size: d.config.IDs.Size}}
	mappings := types.IDMappingOptions{UIDMap: ids, GIDMap: ids}
	c, err := d.store.CreateContainer("", []string{d.belowPrefix(snapshot) + "adopt"}, image, "", "", &storage.ContainerOptions{IDMappingOptions: mappings})
	if err != nil {
		return fmt.Errorf("create a container of image %s: %w", image, err)
	}
	layer, err := d.store.Layer(c.LayerID)
	if err == nil {
		err = d.publish(snapshot, base{image: image, layer: layer}, d.staging(snapshot))
	}
	return errors.Join(err, d.store.DeleteContainer(c.ID))
}

// HasImage returns errNoImage if Adopt would return it for the image of a request.
func (d *Disks) HasImage(r wire.Request, reply *wire.Reply) error {
	return d.respond(reply, func() error {
		_, err := d.imageOf(r)
		return err
	})
}

// imageOf returns the id of the image of a request that is not a snapshot. Images that differ only in their
// configuration, such as the environment, have the same layers.
func (d *Disks) imageOf(r wire.Request) (string, error) {
	named, err := d.store.Image(r.ImageName)
	if err == nil {
		have, err := d.imageLayers(named.ID)
		if err == nil && slices.Equal(have, r.Image) {
			return named.ID, nil
		}
	}
	images, err := d.store.Images()
	if err != nil {
		return "", err
	}
	for _, image := range images {
		if slices.ContainsFunc(image.Names, func(name string) bool { return strings.HasPrefix(name, repository) }) {
			continue
		}
		top, err := d.store.Layer(image.TopLayer)
		if err != nil || d.isSnapshot(top) {
			continue // the image is being removed, or is an untagged snapshot
		}
		have, err := d.imageLayers(image.ID)
		if err == nil && slices.Equal(have, r.Image) {
			return image.ID, nil
		}
	}
	if named != nil && r.OtherLayers {
		return named.ID, nil
	}
	return "", errNoImage
}
