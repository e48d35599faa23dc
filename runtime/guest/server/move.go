package server

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/doze-run/doze/archive"
	"github.com/doze-run/doze/runtime/guest"
)

// movePath renames from to to. Between file systems, and for folders of an image
// (which overlayfs cannot rename), it copies to a name next to to, renames that,
// and then removes from.
func movePath(ctx context.Context, from, to string) error {
	info, err := os.Lstat(from)
	if err != nil {
		return err
	}
	if info.IsDir() && archive.Within(to, from) && to != from {
		return refuse(guest.CodeInvalid, "a folder cannot be moved into itself")
	}
	if there, err := os.Lstat(to); err == nil && (there.IsDir() || info.IsDir()) && !os.SameFile(there, info) {
		return &fs.PathError{Op: "move", Path: to, Err: syscall.EEXIST}
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	err = os.Rename(from, to)
	if !errors.Is(err, syscall.EXDEV) {
		return err
	}
	temp, err := os.MkdirTemp(filepath.Dir(to), ".doze-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp)
	if err := copyInto(ctx, temp, from); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(temp, filepath.Base(from)), to); err != nil {
		return err
	}
	return os.RemoveAll(from)
}

// copyInto copies a file, link or folder into folder, as an archive.
func copyInto(ctx context.Context, folder, from string) error {
	r, w := io.Pipe()
	go func() { // ended by the end of the copy: closing r fails its writes
		w.CloseWithError(archive.Pack(ctx, w, from, filepath.Base(from), archive.PackOptions{
			Links: true, SameFilesystem: true, Owners: true, ExactTimes: true, Strict: true,
		}))
	}()
	_, err := unpack(ctx, folder, r, archive.UnpackOptions{Trusted: true})
	r.CloseWithError(err)
	return err
}
