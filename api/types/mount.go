package types

import "time"

// Mount is a bucket of an object store that is a folder of a sandbox.
type Mount struct {
	Bucket    string    `json:"bucket" doc:"Name of the bucket in the node's configuration" example:"datasets"`
	Prefix    string    `json:"prefix,omitempty" doc:"Folder in the bucket; missing for the whole bucket" example:"images/2026"`
	Path      string    `json:"path" doc:"Folder in the sandbox" example:"/data"`
	ReadOnly  bool      `json:"read_only,omitempty" doc:"Whether the mount was requested read-only; the node's configuration may make a bucket read-only, too"`
	CreatedAt time.Time `json:"created_at" doc:"When the bucket was mounted first"`
}

// MountList is the list of the mounts of a sandbox.
type MountList struct {
	Mounts []Mount `json:"mounts" nullable:"false" doc:"Mounts, sorted by path"`
}

// MountRequest mounts a bucket in a sandbox.
type MountRequest struct {
	Bucket   string `json:"bucket" minLength:"1" maxLength:"63" doc:"Name of the bucket in the node's configuration" example:"datasets"`
	Prefix   string `json:"prefix,omitempty" maxLength:"512" doc:"Folder in the bucket. Default: the whole bucket" example:"images/2026"`
	Path     string `json:"path" minLength:"1" maxLength:"4095" doc:"Folder in the sandbox, as an absolute path without symbolic links; created if necessary" example:"/data"`
	ReadOnly bool   `json:"read_only,omitempty" doc:"Mount the bucket read-only, so that programs in the sandbox cannot change it"`
}
