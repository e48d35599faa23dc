package sandbox

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/doze-run/doze/runtime/guest"
)

var (
	// ErrNotFound: no sandbox, port or process has that name.
	ErrNotFound = errors.New("not found")
	// ErrNotQuarantined: nothing of that id is in quarantine.
	ErrNotQuarantined = errors.New("not in quarantine")
	// ErrDestroyed: the sandbox is being destroyed.
	ErrDestroyed = errors.New("sandbox is destroyed")
	// ErrTooManyWaiters: more callers wait for a wake than the node allows.
	ErrTooManyWaiters = errors.New("too many requests wait for this sandbox to wake")
	// ErrTooManySandboxes: the node has as many as its configuration allows.
	ErrTooManySandboxes = errors.New("the node has as many sandboxes as it allows")
	// ErrImageNotAllowed: the node's configuration does not name that image.
	ErrImageNotAllowed = errors.New("image is not allowed")
	// ErrNotRunning: the sandbox sleeps or is stopped and was not to be woken.
	ErrNotRunning = errors.New("sandbox is not running")
	// ErrBusy: a lease is held, so the sandbox cannot sleep or stop now.
	ErrBusy = errors.New("sandbox is in use")
	// ErrSnapshotNotFound: no snapshot of the owner has that name or id.
	ErrSnapshotNotFound = errors.New("snapshot not found")
	// ErrTooManySnapshots: the node has as many as it can.
	ErrTooManySnapshots = errors.New("the node has as many snapshots as it can")
	// ErrSnapshotInUse is returned by Disks for a snapshot that containers are based on.
	ErrSnapshotInUse = errors.New("snapshot is in use")
	// ErrUnexportable means that a container image cannot represent a file of the snapshot.
	ErrUnexportable = errors.New("snapshot cannot be exported")
	// ErrNotFolder is returned by Disks for a disk with an entry that is not a folder where it needs a folder.
	ErrNotFolder = errors.New("not a folder")
	// ErrClosed: the Manager is shutting down.
	ErrClosed = errors.New("the node is shutting down")
	// ErrNoContainer is returned by an Engine for a container it does not have.
	ErrNoContainer = errors.New("container does not exist")
	// ErrImageMissing is returned by an Engine for an image that is not present and cannot
	// be pulled.
	ErrImageMissing = errors.New("image is missing and could not be pulled")
	// ErrEngineDown is returned by an Engine that does not respond.
	ErrEngineDown = errors.New("the container engine does not respond")
	// ErrTooDeep is returned by Disks for a disk that cannot be measured.
	ErrTooDeep = errors.New("folders are nested too deep")
	// ErrStoreFull is returned by a Store whose disk is full, and when the disk has no
	// space for the files that a new container needs.
	ErrStoreFull = errors.New("no space left for the node's data")
)

// isGuestError reports whether a guest has refused a request with that code.
func isGuestError(err error, code string) bool {
	refused, ok := errors.AsType[*guest.Error](err)
	return ok && refused.Code == code
}

// fullDisk adds ErrStoreFull to an error with ENOSPC or EDQUOT.
func fullDisk(err error) error {
	if !errors.Is(err, ErrStoreFull) && (errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)) {
		return fmt.Errorf("%w: %w", ErrStoreFull, err)
	}
	return err
}

// ImageNotBuiltError is the ErrImageMissing of an image that no registry has.
type ImageNotBuiltError struct {
	Ref string // such as "localhost/doze/python:latest"
}

// Is makes the error an ErrImageMissing.
func (e *ImageNotBuiltError) Is(target error) bool { return target == ErrImageMissing }

func (e *ImageNotBuiltError) Error() string {
	remedy := "build or import it there, as the node's user"
	if name, ok := strings.CutPrefix(e.Ref, "localhost/doze/"); ok {
		name, _, _ = strings.Cut(name, ":")
		remedy = fmt.Sprintf("`make image-%s` in a checkout of doze there builds it", name)
	}
	return fmt.Sprintf("image %s has not been built on the node's machine; %s", e.Ref, remedy)
}

// InvalidError refuses an argument. Nothing has changed.
type InvalidError struct {
	Field  string // such as "name", as the API calls it
	Reason string // such as "has 300 variables"
	Want   string // the remedy, such as "at most 256 are allowed"
	Err    error  // a sentinel for errors.Is, or nil
}

func (e *InvalidError) Unwrap() error { return e.Err }

func (e *InvalidError) Error() string {
	return fmt.Sprintf("%s: %s; %s", e.Field, e.Reason, e.Want)
}

// ConflictError refuses a change that contradicts what exists.
type ConflictError struct {
	Name   string
	Reason string
	Want   string
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("sandbox %q %s; %s", e.Name, e.Reason, e.Want)
}

// SnapshotExistsError refuses a name that another snapshot of the owner has.
type SnapshotExistsError struct {
	Name string
	ID   SnapshotID // of the other
}

func (e *SnapshotExistsError) Error() string {
	return fmt.Sprintf("snapshot %q exists (%s); use a name that is free, or delete it first", e.Name, e.ID)
}

// FreezeError: the processes of a sandbox could not be frozen, and run on.
type FreezeError struct {
	ID  ID
	Err error
}

func (e *FreezeError) Error() string { return fmt.Sprintf("freeze %s: %v", e.ID, e.Err) }

func (e *FreezeError) Unwrap() error { return e.Err }

// WakeError: a sandbox could not be woken or created.
type WakeError struct {
	ID  ID
	Err error
	// LastLog is the last line that the container wrote, if it wrote any.
	LastLog string
}

func (e *WakeError) Error() string {
	if e.LastLog == "" {
		return fmt.Sprintf("wake %s: %v", e.ID, e.Err)
	}
	return fmt.Sprintf("wake %s: %v; it last wrote: %s", e.ID, e.Err, e.LastLog)
}

func (e *WakeError) Unwrap() error { return e.Err }
