package helper

import (
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.podman.io/storage"
	"go.podman.io/storage/pkg/idtools"

	"github.com/doze-run/doze/internal/durable"
	"github.com/doze-run/doze/runtime/disk/wire"
)

const (
	// linkNameLength is the length of the short names of layers in Podman's storage, idLength of ids.
	linkNameLength = 26
	idLength       = 64
	// orphanAge is longer than any creation of a container.
	orphanAge = 15 * time.Minute
)

// Repair repairs the short names of layers. Podman's storage does not sync the file "link", which has the short name of
// its layer, so a loss of power may leave it empty or with zeros. When the storage removes a layer whose file is empty, it removes
// the folder of all short names instead of the layer's. Podman creates them again only if each folder of the storage is a layer, which newer
// versions of the storage, as in this program, do not ensure.
//
// Repair also removes layers whose creation or removal was interrupted, see removeOrphans.
func (d *Disks) Repair(_ wire.Request, reply *wire.Reply) error {
	return d.respond(reply, func() error {
		children, err := d.children()
		if err != nil {
			return err
		}
		if err := repairLinks(filepath.Join(d.config.GraphRoot, d.config.Driver), children); err != nil { // first: removals need them
			return err
		}
		return d.removeOrphans(time.Now())
	})
}

// removeOrphans removes layers of containers that do not exist: a kill or a loss of power after the storage has created a
// layer and before it has the container leaves one. The layers of other users of the storage differ in their ids. It also removes
// folders that are not in the storage's lists, which Btrfs may have after a loss of power.
func (d *Disks) removeOrphans(now time.Time) error {
	before := now.Add(-orphanAge)
	// Podman creates the file after each boot. The creators of anything older are dead.
	if info, err := os.Stat(filepath.Join(os.Getenv("XDG_RUNTIME_DIR"), "libpod", "tmp", "alive")); err == nil && info.ModTime().After(before) {
		before = info.ModTime()
	}
	var folders []string // before the lists: what is created later is not an orphan
	for kind, parent := range map[string]string{"layers": d.layerFolder(""), "images": d.listFolder("images"), "containers": d.listFolder("containers")} {
		if !hasList(filepath.Join(d.listFolder(kind), kind+".json")) {
			continue
		}
		old, err := foldersBefore(parent, before)
		if err != nil {
			return err
		}
		folders = append(folders, old...)
	}
	layers, listed, err := d.orphans()
	if err != nil {
		return err
	}
	for _, folder := range folders {
		if listed[filepath.Base(folder)] {
			continue
		}
		if name, err := os.ReadFile(filepath.Join(folder, "link")); err == nil && isLinkName(string(name)) {
			_ = os.Remove(filepath.Join(d.layerFolder("l"), string(name)))
		}
		if err := d.discard(folder); err != nil {
			return err
		}
	}
	return d.removeLayers(slices.DeleteFunc(layers, func(l storage.Layer) bool { return l.Created.After(before) }))
}

// removeInterrupted removes what interrupted creations of containers have left of layers above a layer that no container will
// be based on any more. Unlike removeOrphans it does not consider their age: it relies on the Manager, which does not create
// containers from a snapshot that is being deleted.
func (d *Disks) removeInterrupted(below string) error {
	layers, _, err := d.orphans()
	if err != nil {
		return err
	}
	return d.removeLayers(slices.DeleteFunc(layers, func(l storage.Layer) bool { return l.Parent != below }))
}

// orphans returns the layers of sandboxes that neither containers nor images nor other layers use, and the ids of all layers,
// images and containers in the storage's lists. Containers may be in creation for the layers. Without the list of containers, it
// returns no layers.
func (d *Disks) orphans() (orphans []storage.Layer, listed map[string]bool, err error) {
	layers, err := d.store.Layers()
	if err != nil {
		return nil, nil, err
	}
	images, err := d.store.Images()
	if err != nil {
		return nil, nil, err
	}
	containers, err := d.store.Containers() // after the layers: the storage lists a layer first
	if err != nil {
		return nil, nil, err
	}
	listed = map[string]bool{}
	used := map[string]bool{} // layers
	for _, l := range layers {
		listed[l.ID], used[l.Parent] = true, true
	}
	for _, i := range images {
		listed[i.ID], used[i.TopLayer] = true, true
		for _, id := range i.MappedTopLayers {
			used[id] = true
		}
	}
	for _, c := range containers {
		listed[c.ID], used[c.LayerID] = true, true
	}
	if !hasList(d.containersList()) {
		return nil, listed, nil
	}
	return slices.DeleteFunc(layers, func(l storage.Layer) bool { return used[l.ID] || !d.ofSandbox(l) }), listed, nil
}

func (d *Disks) removeLayers(layers []storage.Layer) error {
	for _, l := range layers {
		if err := d.empty(l.ID); err != nil {
			return err
		}
		if err := d.store.DeleteLayer(l.ID); err != nil && !errors.Is(err, storage.ErrLayerUnknown) {
			return fmt.Errorf("remove a layer without a container: %w", err)
		}
	}
	return nil
}

// ofSandbox reports whether a layer was created for the container of a sandbox: it has the sandboxes' ids, and neither
// a name, as layers of snapshots have, nor a digest, as layers of images have.
func (d *Disks) ofSandbox(l storage.Layer) bool {
	ids := []idtools.IDMap{{ContainerID: d.config.IDs.Container, HostID: d.config.IDs.Host, Size: d.config.IDs.Size}}
	return len(l.Names) == 0 && l.CompressedDigest == "" && l.UncompressedDigest == "" && l.TOCDigest == "" && slices.Equal(l.UIDMap, ids)
}

// hasList reports whether the file of a list of the storage has a list, which may be without entries. The storage reads a
// file that is missing or empty like such a list, and then everything would seem to be an orphan.
func hasList(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Size() > 0
}

// containersList returns the file with the list of containers.
func (d *Disks) containersList() string {
	if d.config.Transient {
		return filepath.Join(d.config.RunRoot, d.config.Driver+"-containers", "volatile-containers.json")
	}
	return filepath.Join(d.listFolder("containers"), "containers.json")
}

// foldersBefore returns the paths of the folders of layers, images or containers that have not changed since that time.
func foldersBefore(parent string, before time.Time) (paths []string, err error) {
	entries, err := os.ReadDir(parent)
	for _, e := range entries {
		info, err := e.Info()
		if err == nil && info.IsDir() && len(e.Name()) == idLength && info.ModTime().Before(before) {
			paths = append(paths, filepath.Join(parent, e.Name()))
		}
	}
	return paths, err
}

// children returns the ids of the layers that are based on each layer. It reads the storage's lists itself: the storage
// may remove layers before it returns its lists.
func (d *Disks) children() (map[string][]string, error) {
	children := map[string][]string{}
	lists := []string{filepath.Join(d.listFolder("layers"), "layers.json"), filepath.Join(d.listFolder("layers"), "volatile-layers.json")}
	if d.config.Transient {
		lists[1] = filepath.Join(d.config.RunRoot, d.config.Driver+"-layers", "volatile-layers.json")
	}
	for _, list := range lists {
		text, err := os.ReadFile(list)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var layers []storage.Layer
		if err := json.Unmarshal(text, &layers); err != nil {
			return nil, fmt.Errorf("decode %s: %w", list, err)
		}
		for _, l := range layers {
			children[l.Parent] = append(children[l.Parent], l.ID)
		}
	}
	return children, nil
}

// nameInChildren returns the short name by which the layers above a layer refer to it, or "": the first one in their
// file "lower", such as l/NAME:l/NAME.
func nameInChildren(overlay string, children []string) string {
	for _, child := range children {
		lower, err := os.ReadFile(filepath.Join(overlay, child, "lower"))
		if err != nil {
			continue // lost as well, or being created or removed
		}
		parent, _, _ := strings.Cut(string(lower), ":")
		name, ok := strings.CutPrefix(parent, "l/")
		if ok && isLinkName(name) {
			return name
		}
	}
	return ""
}

// isLinkName reports whether a name can be the short name of a layer: the storage encodes random bytes in base32 (RFC 4648).
func isLinkName(name string) bool {
	return len(name) == linkNameLength && strings.Trim(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") == ""
}

// repairLinks makes the file "link" of each layer and the folder of short names agree. children are the ids of the
// layers that are based on each layer.
func repairLinks(overlay string, children map[string][]string) error {
	links := filepath.Join(overlay, "l")
	if err := os.Mkdir(links, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	names := map[string]string{} // by target
	list, err := os.ReadDir(links)
	if err != nil {
		return err
	}
	for _, e := range list {
		link := filepath.Join(links, e.Name())
		target, err := os.Readlink(link)
		if err != nil {
			continue
		}
		if _, err := os.Lstat(filepath.Join(links, target)); errors.Is(err, fs.ErrNotExist) { // of a layer that was removed
			if err := os.Remove(link); err != nil {
				return err
			}
			continue
		}
		names[target] = e.Name()
	}
	layers, err := filepath.Glob(filepath.Join(overlay, "*", "diff"))
	if err != nil {
		return err
	}
	for _, files := range layers {
		layer := filepath.Dir(files)
		target := filepath.Join("..", filepath.Base(layer), "diff")
		name, err := os.ReadFile(filepath.Join(layer, "link"))
		if errors.Is(err, fs.ErrNotExist) {
			continue // the layer is being created or removed
		}
		if err != nil {
			return err
		}
		switch {
		case isLinkName(string(name)) && names[target] == string(name):
			continue
		case isLinkName(string(name)):
		case names[target] != "":
			name = []byte(names[target])
		default:
			// A random name has the same length and alphabet.
			name = []byte(cmp.Or(nameInChildren(overlay, children[filepath.Base(layer)]), rand.Text()))
		}
		if err := os.Symlink(target, filepath.Join(links, string(name))); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if err := durable.Write(filepath.Join(layer, "link"), name, os.Rename); err != nil {
			return err
		}
	}
	return nil
}
