package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"slices"
	"syscall"

	"github.com/doze-run/doze/archive"
	"github.com/doze-run/doze/runtime/guest"
)

// handler responds to a request or returns an error before the response has begun. A handler
// that fails later breaks the connection by panic(http.ErrAbortHandler), so that a partial
// response does not look complete.
type handler func(w http.ResponseWriter, r *http.Request) error

// jsonHandler responds with a value as JSON, or with an error.
type jsonHandler func(r *http.Request) (any, error)

func (h jsonHandler) respond(w http.ResponseWriter, r *http.Request) error {
	v, err := h(r)
	if err != nil {
		return err
	}
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

// handle returns the handler for net/http.
func (s *Server) handle(h handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := h(w, r)
		if err == nil {
			return
		}
		e := s.refusalOf(err)
		b, _ := json.Marshal(e)
		w.Header().Set("Content-Type", "application/json")
		if r.ContentLength != 0 {
			// Respond now, without the rest of the body.
			w.Header().Set("Connection", "close")
		}
		w.WriteHeader(e.Status)
		w.Write(b)
	})
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

// codes are the codes of refusals, each with its status and the errors that have it. All
// other errors have CodeInternal.
var codes = []struct {
	code   string
	status int
	errors []error
}{
	{guest.CodeInvalid, http.StatusBadRequest, []error{
		syscall.EINVAL, syscall.ENAMETOOLONG, syscall.ELOOP, syscall.EXDEV, syscall.ENXIO, archive.ErrInvalid, archive.ErrSpecial,
	}},
	{guest.CodeNotFound, http.StatusNotFound, []error{fs.ErrNotExist}},
	{guest.CodeNoProcess, http.StatusNotFound, nil},
	{guest.CodeNoTerminal, http.StatusNotFound, nil},
	{guest.CodeNoSession, http.StatusNotFound, nil},
	{guest.CodeSessionLost, http.StatusGone, nil},
	{guest.CodeSessionBusy, http.StatusConflict, nil},
	{guest.CodeChanged, http.StatusPreconditionFailed, nil},
	{guest.CodeDigest, http.StatusBadRequest, nil},
	{guest.CodeExists, http.StatusConflict, []error{syscall.EEXIST}},
	{guest.CodeNotEmpty, http.StatusConflict, []error{syscall.ENOTEMPTY}},
	{guest.CodeTooMany, http.StatusConflict, nil},
	{guest.CodeNotDirectory, http.StatusConflict, []error{syscall.ENOTDIR}},
	{guest.CodeIsDirectory, http.StatusConflict, []error{syscall.EISDIR}},
	{guest.CodeNotPermitted, http.StatusForbidden, []error{
		syscall.EACCES, syscall.EPERM, syscall.EROFS, syscall.EBUSY, syscall.ETXTBSY, archive.ErrReserved,
	}},
	{guest.CodeNoSpace, http.StatusInsufficientStorage, []error{syscall.ENOSPC, syscall.EDQUOT}},
	{guest.CodeNoCommand, http.StatusBadRequest, nil},
	{guest.CodeNotExecutable, http.StatusBadRequest, nil},
	{guest.CodeNoShell, http.StatusBadRequest, nil},
	{guest.CodeUnsafeArchive, http.StatusBadRequest, []error{archive.ErrUnsafe}},
	{guest.CodeTooLarge, http.StatusRequestEntityTooLarge, []error{syscall.EFBIG, syscall.E2BIG, archive.ErrTooLarge}},
	{guest.CodePortNotReady, http.StatusConflict, nil},
	{guest.CodeWatchLimit, http.StatusConflict, nil},
}

// refuse returns the error that a client gets.
func refuse(code, format string, args ...any) *guest.Error {
	e := &guest.Error{Status: http.StatusInternalServerError, Code: code, Message: fmt.Sprintf(format, args...)}
	for _, c := range codes {
		if c.code == code {
			e.Status = c.status
		}
	}
	return e
}

// refusalOf returns the refusal for the error of a handler. Of a failed operation on a file
// it has the path that the client knows.
func (s *Server) refusalOf(err error) *guest.Error {
	code := codeOf(err)
	switch e := err.(type) {
	case *guest.Error:
		return e
	case *fs.PathError:
		return refuse(code, "%s: %v", s.shown(e.Path), e.Err)
	case *os.LinkError:
		return refuse(code, "%s to %s: %v", s.shown(e.Old), s.shown(e.New), e.Err)
	}
	return refuse(code, "%v", err)
}

func codeOf(err error) string {
	for _, c := range codes {
		if slices.ContainsFunc(c.errors, func(target error) bool { return errors.Is(err, target) }) {
			return c.code
		}
	}
	return guest.CodeInternal
}
