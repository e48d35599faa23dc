package client

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"strconv"

	"github.com/doze-run/doze/api/types"
)

// StatOptions of Stat.
type StatOptions struct {
	Follow bool                  // describe what a symbolic link leads to
	Digest types.DigestAlgorithm // of the content of a file; empty: none
}

// Stat describes a file or directory. It wakes the sandbox.
func (c *Client) Stat(ctx context.Context, idOrName, path string, o StatOptions) (types.File, error) {
	query := pathQuery(path)
	if o.Follow {
		query.Set("follow", "true")
	}
	if o.Digest != "" {
		query.Set("digest", string(o.Digest))
	}
	return fetch[types.File](ctx, c, request{path: sandboxPath(idOrName, "files", "stat"), query: query})
}

// WriteFile writes a file of any size. It replaces the file as a whole, or on an error not
// at all. Mode 0 retains the mode of an existing file.
func (c *Client) WriteFile(ctx context.Context, idOrName, path string, mode fs.FileMode, body io.Reader) (types.File, error) {
	return c.WriteFileIf(ctx, idOrName, path, WriteOptions{Mode: mode}, body)
}

// WriteOptions are what a write requires and does. Zero values mean nothing.
type WriteOptions struct {
	Mode      fs.FileMode
	IfMatch   string // the ETag of the file to replace; otherwise problem.FileConflict
	CreateNew bool   // refuse an existing file, with problem.PathExists
	SHA256    []byte // of the body; another one is refused with problem.DigestMismatch
}

// WriteFileIf is WriteFile with options.
func (c *Client) WriteFileIf(ctx context.Context, idOrName, path string, o WriteOptions, body io.Reader) (types.File, error) {
	query, header := pathQuery(path), http.Header{}
	if o.Mode != 0 {
		query.Set("mode", fmt.Sprintf("%04o", o.Mode.Perm()))
	}
	if o.CreateNew {
		query.Set("create_new", "true")
	}
	if o.IfMatch != "" {
		header.Set("If-Match", o.IfMatch)
	}
	if o.SHA256 != nil {
		header.Set("Content-Digest", "sha-256=:"+base64.StdEncoding.EncodeToString(o.SHA256)+":")
	}
	return fetch[types.File](ctx, c, request{
		method: http.MethodPut, path: sandboxPath(idOrName, "files", "write"), query: query,
		raw: body, contentType: "application/octet-stream", header: header, transfer: true,
	})
}

// SignFileURL returns a URL to read or write a file without a token. It wakes nothing.
func (c *Client) SignFileURL(ctx context.Context, idOrName string, req types.SignFileURLRequest) (types.SignedURL, error) {
	return fetch[types.SignedURL](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "files", "url"), body: req})
}

// ReadFile returns the content of a file. The caller closes it. A sandbox wrote the content.
func (c *Client) ReadFile(ctx context.Context, idOrName, path string) (io.ReadCloser, error) {
	return c.download(ctx, sandboxPath(idOrName, "files", "read"), path)
}

// SearchOptions of a search. Zero values mean the defaults of the node.
type SearchOptions struct {
	Name       string   // pattern of names, such as *.go
	Content    string   // regular expression for lines; empty: find files
	Literal    bool     // Content is text
	IgnoreCase bool     // of Content
	Hidden     bool     // include names that begin with a dot
	Exclude    []string // patterns of names to skip
	Limit      int      // of results
}

// SearchFiles finds files below a directory, or with Content lines in them. It wakes the
// sandbox.
func (c *Client) SearchFiles(ctx context.Context, idOrName, path string, o SearchOptions) (types.FileSearch, error) {
	query := pathQuery(path)
	for name, value := range map[string]string{"name": o.Name, "content": o.Content} {
		if value != "" {
			query.Set(name, value)
		}
	}
	for name, set := range map[string]bool{"literal": o.Literal, "ignore_case": o.IgnoreCase, "hidden": o.Hidden} {
		if set {
			query.Set(name, "true")
		}
	}
	if o.Exclude != nil {
		query["exclude"] = o.Exclude
	}
	if o.Limit != 0 {
		query.Set("max_results", strconv.Itoa(o.Limit))
	}
	return fetch[types.FileSearch](ctx, c, request{path: sandboxPath(idOrName, "files", "search"), query: query})
}

// PutArchive unpacks a tar stream into a directory, and creates a missing one.
func (c *Client) PutArchive(ctx context.Context, idOrName, path string, tar io.Reader) error {
	_, err := c.call(ctx, request{
		method: http.MethodPut, path: sandboxPath(idOrName, "files", "archive"), query: pathQuery(path),
		raw: tar, contentType: "application/x-tar", transfer: true,
	}, nil)
	return err
}

// GetArchive packs a directory or a file as a tar stream, with paths relative to
// the directory. The caller closes it. A sandbox wrote the content: paths and links are
// not trustworthy.
func (c *Client) GetArchive(ctx context.Context, idOrName, path string) (io.ReadCloser, error) {
	return c.download(ctx, sandboxPath(idOrName, "files", "archive"), path)
}

// download returns the raw response of a route for a path in a sandbox.
func (c *Client) download(ctx context.Context, route, path string) (io.ReadCloser, error) {
	resp, err := c.send(ctx, request{path: route, query: pathQuery(path), transfer: true})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

func pathQuery(path string) url.Values { return url.Values{"path": {path}} }
