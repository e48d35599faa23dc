// Package wire is the protocol between package disk and its helper: JSON-RPC 1.0 over a Unix
// socket, as net/rpc/jsonrpc speaks it.
package wire

// Service is the name of the helper's service.
const Service = "Disks"

// Driver is the driver of Podman's storage that the helper requires.
const Driver = "overlay"

// Code distinguishes failures for the caller.
type Code string

const (
	NoContainer Code = "no_container"
	InUse       Code = "in_use"
	Full        Code = "full"
	TooDeep     Code = "too_deep"
	NoImage     Code = "no_image"
	NotFolder   Code = "not_folder"
	NoPath      Code = "no_path" // the disk does not have a path of Request.Paths
)

// Config of a helper: the storage of Podman, as `podman info` reports it.
type Config struct {
	GraphRoot, RunRoot, Driver string
	Options                    []string
	// Transient: RunRoot has the lists of containers and of their layers.
	Transient bool
	// Folder is the helper's own, on the file system of GraphRoot.
	Folder string
	// Run contains a folder for each container, named after its sandbox, that its programs can write to.
	Run string
	// IDs are the user and group ids that sandboxes have in Podman's user namespace.
	IDs IDs
	// Node is the id of the node, whose snapshots no other node changes.
	Node string
}

// IDs maps the ids from Container on in a container to the ids from Host on in the user namespace.
type IDs struct{ Container, Host, Size int }

// Request names a container, a snapshot, or both.
type Request struct {
	Container string // Podman's name
	Snapshot  string
	// Of Usage:
	RunFolder string // in Config.Run
	PID       int    // of the first process; 0: none
	Limit     Usage  // beyond which counting stops; 0: none
	Flatten   bool   // of Publish: base the snapshot on the image instead of another snapshot
	// Of Adopt:
	Image       []string // digests of the image's layers, lowest first
	ImageName   string   // the image to prefer among several with these layers
	OtherLayers bool     // use the image of that name if no image has these layers
	Below       string   // of Overlay: the snapshot that the new one is based on
	From        string   // of Stage: the snapshot to copy
	// Paths are absolute. Of Prefetch and Capture: the only ones to copy; none: the whole disk. Of Overlay: the ones that the
	// new snapshot has.
	Paths []string
}

// Export is the request of `doze-disk export`, on its standard input.
type Export struct {
	Config
	Snapshot string
	Name     string // of the image
}

// Unexportable is the exit code of `doze-disk export` for a snapshot with a file that an image cannot
// represent. The process writes the reason to standard error.
const Unexportable = 3

// Reply to a Request.
type Reply struct {
	Code  Code   // of a failure
	Error string // of a failure, for people
	Usage Usage
	Moved bool // the snapshot has files
	Path  int  // with NoPath: the index of the path
	// Of Layers and DiskLayers:
	Folders      []string // of the layers above the image, highest first
	ImageFolders []string // of the image's layers, highest first
	Image        []string // digests of the image's layers, lowest first
}

// Usage of a disk.
type Usage struct {
	Bytes, Entries int64
}
