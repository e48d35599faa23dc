package bucketfs

import (
	"context"
	"errors"
	"net/http"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/minio/minio-go/v7"
)

// errInterrupted is the cause of a context whose FUSE request was interrupted.
var errInterrupted = errors.New("interrupted")

// errStale is the error of an object that has changed since it was opened.
const errStale = syscall.ESTALE

// isNotFound reports whether an object does not exist. A missing bucket is another error.
func isNotFound(err error) bool {
	response, ok := errors.AsType[minio.ErrorResponse](err)
	return ok && response.StatusCode == http.StatusNotFound && response.Code != minio.NoSuchBucket
}

// status returns the FUSE status of an error.
func status(ctx context.Context, err error) fuse.Status {
	if err == nil {
		return fuse.OK
	}
	if ctx.Err() != nil && errors.Is(context.Cause(ctx), errInterrupted) {
		return fuse.EINTR
	}
	return fuse.Status(errno(err))
}

// errno returns the errno of an error. A missing bucket is EIO, so that programs do not
// treat its files as deleted.
func errno(err error) syscall.Errno {
	if number, ok := errors.AsType[syscall.Errno](err); ok && isLocal(number) {
		return number
	}
	response, ok := errors.AsType[minio.ErrorResponse](err)
	if !ok {
		return syscall.EIO
	}
	switch {
	case response.StatusCode == http.StatusForbidden && response.Code == "QuotaExceeded",
		response.StatusCode == http.StatusInsufficientStorage:
		return syscall.EDQUOT
	case response.StatusCode == http.StatusForbidden, response.StatusCode == http.StatusUnauthorized:
		return syscall.EACCES
	case response.StatusCode == http.StatusPreconditionFailed:
		return syscall.ESTALE
	case response.StatusCode == http.StatusRequestEntityTooLarge, response.Code == "EntityTooLarge":
		return syscall.EFBIG
	case isNotFound(err):
		return syscall.ENOENT
	}
	return syscall.EIO
}

// isLocal reports whether the errno is this package's or the scratch folder's. The network's, such
// as ECONNREFUSED, would confuse programs.
func isLocal(number syscall.Errno) bool {
	switch number {
	case syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG, syscall.ESTALE, syscall.ENOENT, syscall.ENFILE,
		syscall.EROFS, syscall.ENOTEMPTY, syscall.EINVAL, syscall.EEXIST, syscall.EISDIR, syscall.EXDEV:
		return true
	}
	return false
}
