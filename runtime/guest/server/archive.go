package server

import (
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"

	"github.com/doze-run/doze/archive"
	"github.com/doze-run/doze/runtime/guest"
)

func (s *Server) getArchive(w http.ResponseWriter, r *http.Request) error {
	from, err := s.path(r.URL.Query().Get("path"))
	if err != nil {
		return err
	}
	if from, err = filepath.EvalSymlinks(from); err != nil {
		return err
	}
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	name := ""
	switch {
	case info.IsDir():
		if _, err := os.ReadDir(from); err != nil {
			return err
		}
	case info.Mode().IsRegular():
		name = info.Name()
	default:
		return refuse(guest.CodeInvalid, "%s is neither a folder nor a regular file", s.shown(from))
	}
	w.Header().Set("Content-Type", "application/x-tar")
	if err := archive.Pack(r.Context(), w, from, name, archive.PackOptions{Links: true, SameFilesystem: true, Owners: true}); err != nil {
		s.log.Warn("failed to send archive", "path", from, "error", err)
		panic(http.ErrAbortHandler)
	}
	return nil
}

func (s *Server) putArchive(r *http.Request) (any, error) {
	folder, err := s.writable(r.URL.Query().Get("path"), true)
	if err != nil {
		return nil, err
	}
	if err := makeFolder(folder, 0); err != nil {
		return nil, err
	}
	res, err := unpack(r.Context(), folder, r.Body, archive.UnpackOptions{Gzip: true, Reserved: s.own()})
	return guest.ArchiveResult(res), err
}

func unpack(ctx context.Context, folder string, body io.Reader, o archive.UnpackOptions) (archive.Result, error) {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return archive.Result{}, err
	}
	defer root.Close()
	return archive.Unpack(ctx, root, body, o)
}
