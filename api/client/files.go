package client

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
)

// Kind of a path.
type Kind int

// Kinds.
const (
	KindNone Kind = iota // the path does not exist
	KindFile
	KindDirectory
)

// Stat returns the kind of a path. It wakes the sandbox.
func (c *Client) Stat(ctx context.Context, idOrName, path string) (Kind, error) {
	resp, err := c.send(ctx, request{
		method: http.MethodGet, path: sandboxPath(idOrName, "files", "read"), query: pathQuery(path),
		header: http.Header{"Range": {"bytes=0-0"}},
	})
	switch {
	case err == nil:
		resp.Body.Close()
		return KindFile, nil
	case problem.Has(err, problem.RangeNotSatisfiable): // an empty file
		return KindFile, nil
	case problem.Has(err, problem.PathIsDirectory):
		return KindDirectory, nil
	case problem.Has(err, problem.PathNotFound):
		return KindNone, nil
	}
	return KindNone, err
}

// WriteFile writes a file of any size. It replaces the file as a whole, or on an error not
// at all. Mode 0 retains the mode of an existing file.
func (c *Client) WriteFile(ctx context.Context, idOrName, path string, mode fs.FileMode, body io.Reader) (types.File, error) {
	query := pathQuery(path)
	if mode != 0 {
		query.Set("mode", fmt.Sprintf("%04o", mode.Perm()))
	}
	return fetch[types.File](ctx, c, request{
		method: http.MethodPut, path: sandboxPath(idOrName, "files", "write"), query: query,
		raw: body, contentType: "application/octet-stream",
	})
}

// PutArchive unpacks a tar stream into a directory, and creates a missing one.
func (c *Client) PutArchive(ctx context.Context, idOrName, path string, tar io.Reader) error {
	_, err := c.call(ctx, request{
		method: http.MethodPut, path: sandboxPath(idOrName, "files", "archive"), query: pathQuery(path),
		raw: tar, contentType: "application/x-tar",
	}, nil)
	return err
}

// GetArchive packs a directory or a file as a tar stream, with paths relative to
// the directory. The caller closes it. A sandbox wrote the content: paths and links are
// not trustworthy.
func (c *Client) GetArchive(ctx context.Context, idOrName, path string) (io.ReadCloser, error) {
	resp, err := c.send(ctx, request{path: sandboxPath(idOrName, "files", "archive"), query: pathQuery(path)})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

func pathQuery(path string) url.Values { return url.Values{"path": {path}} }
