package disk

import (
	"context"
	"errors"
	"path/filepath"

	"github.com/doze-run/doze/runtime/disk/wire"
	"github.com/doze-run/doze/runtime/sandbox"
)

// ErrNoImage means that Podman's storage does not have the image that Adopt needs. Errors wrap it.
var ErrNoImage = errors.New("image not found")

// Layers describes the disk of a snapshot or of a container.
type Layers struct {
	// Folders of the layers above the image, highest first. Their files have the user ids of Podman's
	// user namespace. The files of snapshots do not change.
	Folders []string
	// Below are the folders of the image's layers, highest first.
	Below []string
	// Image has the digests of the layers of the image, lowest first.
	Image []string
}

// Layers returns the layers of a snapshot.
func (c *Client) Layers(ctx context.Context, snapshot sandbox.SnapshotID) (Layers, error) {
	reply, err := c.call(ctx, "Layers", "", snapshot)
	return Layers{Folders: reply.Folders, Below: reply.ImageFolders, Image: reply.Image}, err
}

// DiskLayers returns the layers of the disk of a container. The first of its folders has the files that its programs
// change.
func (c *Client) DiskLayers(ctx context.Context, id sandbox.ID) (Layers, error) {
	reply, err := c.call(ctx, "DiskLayers", id, "")
	return Layers{Folders: reply.Folders, Below: reply.ImageFolders, Image: reply.Image}, err
}

// Staging returns the path of the folder for the files of a new snapshot, for Adopt and Overlay. The caller creates the
// folder; its parent exists. Delete removes the folder.
func (c *Client) Staging(ctx context.Context, snapshot sandbox.SnapshotID) (string, error) {
	if _, err := c.helper(ctx); err != nil { // the helper creates the parent
		return "", err
	}
	return filepath.Join(c.cfg.Folder, "staging", string(snapshot)), nil
}

// Image describes the image on which to base a disk.
type Image struct {
	Layers []string // digests, lowest first
	Name   string   // to prefer among several images with these layers
	// OtherLayers: if no image has these layers, use the image with the name.
	OtherLayers bool
}

// Adopt converts the folder from Staging to a snapshot that is based on the image. It returns ErrNoImage if there is
// none. The snapshot is durable when Adopt returns.
func (c *Client) Adopt(ctx context.Context, snapshot sandbox.SnapshotID, image Image) error {
	_, err := c.callHelper(ctx, "Adopt", "", wire.Request{Snapshot: string(snapshot), Image: image.Layers, ImageName: image.Name, OtherLayers: image.OtherLayers})
	return err
}

// HasImage returns ErrNoImage if Adopt would return it.
func (c *Client) HasImage(ctx context.Context, image Image) error {
	_, err := c.callHelper(ctx, "HasImage", "", wire.Request{Image: image.Layers, ImageName: image.Name, OtherLayers: image.OtherLayers})
	return err
}
