package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"syscall"

	"github.com/doze-run/doze/archive"
	"github.com/doze-run/doze/runtime/guest"
)

// handler responds to a request or returns an error before the response has begun. A handler
// that fails later breaks the connection by panic(http.ErrAbortHandler), so that a partial
// response does not look complete.
type handler func(w http.ResponseWriter, r *http.Request) error

func (h handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	err := h(w, r)
	if err == nil {
		return
	}
	e := asError(err)
	b, _ := json.Marshal(e)
	w.Header().Set("Content-Type", "application/json")
	if r.ContentLength != 0 {
		// Respond now, without the rest of the body.
		w.Header().Set("Connection", "close")
	}
	w.WriteHeader(e.Status)
	w.Write(b)
}

// writeJSON sends v as JSON.
func writeJSON(w http.ResponseWriter, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(b) > guest.MaxJSON {
		return refuse(guest.CodeTooLarge, "the response has %d bytes, at most %d are allowed", len(b), guest.MaxJSON)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(b) // a client that is gone needs no response
	return nil
}

// readJSON reads a request's body.
func readJSON(r *http.Request, v any) error {
	b, err := io.ReadAll(io.LimitReader(r.Body, guest.MaxJSON+1))
	if err != nil {
		return refuse(guest.CodeInvalid, "the request ended early: %v", err)
	}
	if len(b) > guest.MaxJSON {
		return refuse(guest.CodeTooLarge, "the request has more than %d bytes", guest.MaxJSON)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return refuse(guest.CodeInvalid, "the request is not usable JSON: %v", err)
	}
	return nil
}

var statuses = map[string]int{
	guest.CodeInvalid:       http.StatusBadRequest,
	guest.CodeNotFound:      http.StatusNotFound,
	guest.CodeNoProcess:     http.StatusNotFound,
	guest.CodeExists:        http.StatusConflict,
	guest.CodeNotEmpty:      http.StatusConflict,
	guest.CodeTooMany:       http.StatusConflict,
	guest.CodeNotDirectory:  http.StatusConflict,
	guest.CodeIsDirectory:   http.StatusConflict,
	guest.CodeNotPermitted:  http.StatusForbidden,
	guest.CodeNoSpace:       http.StatusInsufficientStorage,
	guest.CodeNoCommand:     http.StatusBadRequest,
	guest.CodeNotExecutable: http.StatusBadRequest,
	guest.CodeNoShell:       http.StatusBadRequest,
	guest.CodeUnsafeArchive: http.StatusBadRequest,
	guest.CodeTooLarge:      http.StatusRequestEntityTooLarge,
	guest.CodePortNotReady:  http.StatusConflict,
}

// refuse makes the error that a client gets.
func refuse(code, format string, args ...any) *guest.Error {
	status, ok := statuses[code]
	if !ok {
		status = http.StatusInternalServerError
	}
	return &guest.Error{Status: status, Code: code, Message: fmt.Sprintf(format, args...)}
}

// asError finds the code for an error of the kernel.
func asError(err error) *guest.Error {
	var e *guest.Error
	if errors.As(err, &e) {
		return e
	}
	return refuse(codeOf(err), "%s", err)
}

func codeOf(err error) string {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return guest.CodeNotFound
		case errors.Is(err, archive.ErrInvalid), errors.Is(err, archive.ErrSpecial):
			return guest.CodeInvalid
		case errors.Is(err, archive.ErrUnsafe):
			return guest.CodeUnsafeArchive
		case errors.Is(err, archive.ErrTooLarge):
			return guest.CodeTooLarge
		case errors.Is(err, archive.ErrReserved):
			return guest.CodeNotPermitted
		}
		return guest.CodeInternal
	}
	switch errno {
	case syscall.ENOENT:
		return guest.CodeNotFound
	case syscall.ENOTDIR:
		return guest.CodeNotDirectory
	case syscall.EISDIR:
		return guest.CodeIsDirectory
	case syscall.EEXIST:
		return guest.CodeExists
	case syscall.ENOTEMPTY:
		return guest.CodeNotEmpty
	case syscall.EACCES, syscall.EPERM, syscall.EROFS, syscall.EBUSY, syscall.ETXTBSY:
		return guest.CodeNotPermitted
	case syscall.ENOSPC, syscall.EDQUOT:
		return guest.CodeNoSpace
	case syscall.EINVAL, syscall.ENAMETOOLONG, syscall.ELOOP, syscall.EXDEV, syscall.ENXIO:
		return guest.CodeInvalid
	case syscall.EFBIG, syscall.E2BIG:
		return guest.CodeTooLarge
	}
	return guest.CodeInternal
}
