// Package wire is the protocol between package backup and its helper. The helper reads one Request in
// JSON from standard input, and writes Messages in JSON to standard output. The last Message has a
// Result or an Error. Closing standard input cancels the operation. The helper also reads two Orders for a
// Request with Running: one after the Message with Ready, and one after the Message with Captured.
package wire

import (
	"encoding/json"
	"time"
)

// Operation is what the helper does.
type Operation string

const (
	Create   Operation = "create"
	Restore  Operation = "restore"
	List     Operation = "list"
	Delete   Operation = "delete"
	Maintain Operation = "maintain"
)

// Request to the helper.
type Request struct {
	Operation Operation
	Store     Store
	Password  string
	// Cache is a folder for the repository's cache.
	Cache string
	// Node is the id of the node.
	Node string
	// Owner of the backup to create, or of the backups to list.
	Owner string
	// Limit of the backups of the owner when creating one.
	Limit int
	// IDs of the backups to restore or delete, or of the one to create.
	IDs []string
	// Sandbox and Time of the backup to create.
	Sandbox string
	Time    time.Time
	// Record of the backup to create. List returns it unchanged. A Request with Running has none; its
	// second Order does.
	Record json.RawMessage
	// Layers are the folders to back up, highest first.
	Layers []string
	// Below are the folders of the image, highest first.
	Below []string
	// Running: programs change the files of the first of Layers. The helper sends Ready when it has
	// uploaded most of the content.
	Running bool
	// Paths are the absolute paths to back up, with the files of the image. Without paths, the
	// whole disk above the image is backed up.
	Paths []string
	// Shift is added to the user and group ids of the files of the image that Paths contain.
	Shift uint32
	// Excludes are patterns, relative to the root, of what to leave out. Gitignore also leaves out
	// what git ignores in its work trees.
	Excludes  []string
	Gitignore bool
	// Target is the folder to restore into. It must not exist.
	Target string
}

// Store is a bucket of an S3-compatible object store.
type Store struct {
	Endpoint             string // host and port
	TLS                  bool
	Region               string
	Bucket, Prefix       string
	AccessKey, SecretKey string
}

// Order to the helper.
type Order struct {
	// Record of the backup. The first Order has none: it reports that programs have stopped.
	Record json.RawMessage `json:",omitempty"`
}

// Message from the helper.
type Message struct {
	// Ready: the node must stop the programs and send an Order.
	Ready bool `json:",omitempty"`
	// Captured: programs may change files again. The node must send an Order with the record.
	Captured bool      `json:",omitempty"`
	Progress *Progress `json:",omitempty"`
	Result   *Result   `json:",omitempty"`
	Error    *Error    `json:",omitempty"`
}

// Progress of Create and Restore. Done never decreases.
type Progress struct{ Done, Total Usage }

// Usage is a number of entries and the size of their content in bytes.
type Usage struct{ Bytes, Entries int64 }

// Result of an operation.
type Result struct {
	// Of Create: the content of the disk, and the bytes sent to the object store. Of Restore: the
	// usage of the new folder.
	Usage    Usage
	Stored   int64
	Duration time.Duration // of Create: since Request.Time
	// Of List.
	Backups []Backup
}

// Backup as List returns it.
type Backup struct {
	Usage    Usage
	Stored   int64
	Duration time.Duration
	Record   json.RawMessage
}

// Code distinguishes failures for the caller.
type Code string

const (
	Unreachable Code = "unreachable"
	Denied      Code = "denied"
	NoBucket    Code = "no_bucket"
	Password    Code = "password"
	Damaged     Code = "damaged"
	NotFound    Code = "not_found"   // no backup has the id
	Full        Code = "full"        // the disk of the node
	Unsupported Code = "unsupported" // a backup cannot represent an entry
	NoPath      Code = "no_path"     // an entry of Request.Paths does not exist
	Limit       Code = "limit"       // the owner has Request.Limit backups
	// NeedsSnapshot: the disk of running programs does not fit into memory, or is not where it was.
	NeedsSnapshot Code = "needs_snapshot"
)

// Error is the failure of an operation.
type Error struct {
	Code    Code // empty: any other failure
	Message string
}

func (e *Error) Error() string { return e.Message }
