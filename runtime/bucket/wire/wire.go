// Package wire is the protocol between package bucket and its helper: JSON-RPC 1.0 over a Unix
// socket, as net/rpc/jsonrpc speaks it.
package wire

// Service is the name of the helper's service.
const Service = "Buckets"

// Code distinguishes failures for the caller.
type Code string

const (
	Unreachable Code = "unreachable" // no connection, a timeout, or a server error
	Denied      Code = "denied"      // the object store rejects the credentials
	NoBucket    Code = "no_bucket"
	NoFolder    Code = "no_folder" // the path is not a folder, or has a symbolic link
	NoFUSE      Code = "no_fuse"   // the helper cannot open /dev/fuse
)

// Config of a helper.
type Config struct {
	// Scratch is a folder for files that programs write, until they are uploaded. The helper creates it.
	Scratch string
	// ScratchLimit bounds the size of all these files in bytes.
	ScratchLimit int64
	// UID and GID are the root of sandboxes in the helper's user namespace.
	UID, GID uint32
}

// Bucket is a folder of a bucket.
type Bucket struct {
	Endpoint, Region, Bucket string
	Prefix                   string // empty, or ends in a slash
	AccessKey, SecretKey     string
	ReadOnly                 bool
}

// Mount identifies a mount.
type Mount struct {
	Sandbox string
	PID     int    // of the sandbox's first process
	Cgroup  string // that the process must be in or below, so that a reused pid is detected; not checked if empty
	Path    string // absolute
}

// MountRequest requests a mount of a bucket. The mount replaces one of this helper, or of an earlier one, at that path.
type MountRequest struct {
	Mount
	Bucket Bucket
}

// Reply to a request.
type Reply struct {
	Code  Code   // of a failure
	Error string // of a failure, for people
}
