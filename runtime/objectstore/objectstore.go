// Package objectstore classifies the failures of requests to an S3-compatible object store.
package objectstore

import (
	"crypto/x509"
	"errors"
	"net/http"

	"github.com/minio/minio-go/v7"
)

// Code distinguishes failures for the caller.
type Code string

const (
	Unreachable Code = "unreachable" // also: a response that is not S3's, or a server error
	Denied      Code = "denied"
	NoBucket    Code = "no_bucket"
)

// Error is a failure of the object store.
type Error struct {
	Code    Code
	Message string
	Err     error // the cause
}

func (e *Error) Error() string { return e.Message }

func (e *Error) Unwrap() error { return e.Err }

// Classify returns the failure that err, an error of minio-go, represents. err must not be nil.
func Classify(err error) *Error {
	failure := &Error{Code: Unreachable, Message: err.Error(), Err: err}
	response, ok := errors.AsType[minio.ErrorResponse](err)
	switch {
	case ok && (response.StatusCode == http.StatusForbidden || response.StatusCode == http.StatusUnauthorized):
		failure.Code = Denied
	case ok && response.Code == minio.NoSuchBucket:
		failure.Code = NoBucket
	}
	if unknown, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		failure.Message = unknown.Error()
	}
	return failure
}
