package guest

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// WriteFile writes body to the file at path, whole or not at all: it is written
// next to the old one and then takes its place. Missing folders are made; a
// symbolic link is followed. Only a file that is itself a mount, such as the
// /etc/hosts that engines make, is overwritten in place. Mode 0 keeps the mode of
// an existing file and is 0644 for a new one. An error of body leaves the old
// file as it was.
func (c *Client) WriteFile(ctx context.Context, path string, mode fs.FileMode, body io.Reader) (FileInfo, error) {
	return c.Write(ctx, path, WriteOptions{Mode: mode}, body)
}

// WriteOptions are what a write requires and does.
type WriteOptions struct {
	Mode fs.FileMode
	// IfMatch and IfNoneMatch are conditions as in HTTP, or empty. An entity tag
	// "sha256-HEX" names the content of a file. A condition that fails is CodeChanged.
	IfMatch, IfNoneMatch string
	// CreateNew refuses an existing file with CodeExists.
	CreateNew bool
	// SHA256 of the body; empty: any. Another body is CodeDigest.
	SHA256 []byte
	// Range is the part of the file to write; nil: the whole file.
	Range *WriteRange
}

// WriteRange is a part of a file. A file that ends before it gets a hole.
type WriteRange struct {
	Offset, Length int64
	Size           int64 // of the file afterwards; -1: as before, or to the end of the part
}

// End returns the largest size that the options require of the file afterwards, or 0.
func (o *WriteOptions) End() int64 {
	if o.Range == nil {
		return 0
	}
	return max(o.Range.Offset+o.Range.Length, o.Range.Size)
}

// Write is WriteFile with options. The conditions hold when the file is replaced, among
// all writes of this guest. A part is written in place, after all of the body has arrived.
func (c *Client) Write(ctx context.Context, path string, o WriteOptions, body io.Reader) (FileInfo, error) {
	q := url.Values{"path": {path}, "mode": {FormatMode(o.Mode)}}
	if o.CreateNew {
		q.Set("create_new", "true")
	}
	if len(o.SHA256) > 0 {
		q.Set("sha256", hex.EncodeToString(o.SHA256))
	}
	if o.Range != nil {
		q.Set("offset", strconv.FormatInt(o.Range.Offset, 10))
		q.Set("length", strconv.FormatInt(o.Range.Length, 10))
		q.Set("size", strconv.FormatInt(o.Range.Size, 10))
	}
	header := conditionHeader("If-Match", o.IfMatch)
	maps.Copy(header, conditionHeader("If-None-Match", o.IfNoneMatch))
	return get[FileInfo](ctx, c, request{method: http.MethodPut, route: RouteFile, query: q, header: header, body: body})
}

// conditionHeader returns a header with a condition, if it is not empty.
func conditionHeader(name, value string) http.Header {
	if value == "" {
		return http.Header{}
	}
	return http.Header{name: {value}}
}

// FileContent is a file, or the part of it that was asked for.
type FileContent struct {
	Body         io.ReadCloser // must be closed
	Status       int           // 200, 206, or with an empty Body 304, 412 or 416
	Size         int64         // of Body; -1 when unknown
	ContentType  string        // application/octet-stream, or multipart/byteranges of several ranges
	ContentRange string        // as in HTTP, of 206 and 416
	ModifiedAt   time.Time     // zero, and ETag empty, for files of the kernel: they change without them
	ETag         string
}

// ReadFile reads a file of any size. The header may have a Range and conditions, as in HTTP.
// A Body that ends early returns ErrLost (wrapped), never io.EOF.
func (c *Client) ReadFile(ctx context.Context, path string, header http.Header) (*FileContent, error) {
	a, err := c.send(ctx, request{
		method: http.MethodGet, route: RouteFile, query: url.Values{"path": {path}}, header: header.Clone(), stream: true, content: true,
	})
	if err != nil {
		return nil, err
	}
	modified, _ := http.ParseTime(a.Header.Get("Last-Modified"))
	f := &FileContent{
		Body: a, Status: a.StatusCode, Size: a.ContentLength,
		ContentType: "application/octet-stream", ContentRange: a.Header.Get("Content-Range"),
		ModifiedAt: modified, ETag: a.Header.Get("ETag"),
	}
	if kind := a.Header.Get("Content-Type"); strings.HasPrefix(kind, "multipart/byteranges;") {
		f.ContentType = kind // whatever else the guest says, a browser shall not see it
	}
	if f.Status != http.StatusOK && f.Status != http.StatusPartialContent {
		a.Close() // holds at most a sentence for people
		f.Body, f.Size = http.NoBody, 0
	}
	return f, nil
}

// List lists a folder, in order of names, folders before what is in them.
// truncated: the folder has more than MaxEntries or MaxListing allow.
func (c *Client) List(ctx context.Context, path string, opts ListOptions) (entries []FileInfo, truncated bool, err error) {
	a, err := c.send(ctx, request{method: http.MethodGet, stream: true, route: RouteList, query: url.Values{
		"path":      {path},
		"recursive": {strconv.FormatBool(opts.Recursive)},
		"hidden":    {strconv.FormatBool(opts.Hidden)},
	}})
	if err != nil {
		return nil, false, err
	}
	defer a.Close()
	lines := newLines(io.LimitReader(a, MaxListing+MaxFrame))
	entries = []FileInfo{}
	for lines.Scan() {
		var line ListLine
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return nil, false, fmt.Errorf("guest sent an unusable listing: %w", err)
		}
		switch {
		case line.End != nil:
			return entries, line.End.Truncated, nil
		case line.Entry == nil || len(entries) == MaxEntries:
			return nil, false, fmt.Errorf("guest sent an unusable listing")
		}
		entries = append(entries, *line.Entry)
	}
	if err := lines.Err(); err != nil {
		return nil, false, err
	}
	return nil, false, ErrLost
}

// StatOptions of Stat.
type StatOptions struct {
	Follow bool // a symbolic link at the path
	Digest bool // of the content of a regular file
}

// Stat describes the file at path.
func (c *Client) Stat(ctx context.Context, path string, o StatOptions) (FileInfo, error) {
	r := request{method: http.MethodGet, route: RouteStat, query: url.Values{
		"path": {path}, "follow": {strconv.FormatBool(o.Follow)}, "digest": {strconv.FormatBool(o.Digest)},
	}}
	if o.Digest {
		r.wait = longTimeout
	}
	return get[FileInfo](ctx, c, r)
}

// Remove removes a file, a symbolic link or a folder; one that is not empty only
// with recursive. ifMatch is a condition as in HTTP on a regular file, or empty.
// Errors: CodeNotFound, CodeNotEmpty, CodeNotPermitted, CodeChanged.
func (c *Client) Remove(ctx context.Context, path string, recursive bool, ifMatch string) error {
	q := url.Values{"path": {path}, "recursive": {strconv.FormatBool(recursive)}}
	header := conditionHeader("If-Match", ifMatch)
	return c.call(ctx, request{method: http.MethodDelete, route: RouteFile, query: q, header: header, wait: longTimeout}, nil)
}

// Mkdir makes a folder and those above it. One that exists is left as it is.
// Mode 0 is 0755.
func (c *Client) Mkdir(ctx context.Context, path string, mode fs.FileMode) (FileInfo, error) {
	q := url.Values{"path": {path}, "mode": {FormatMode(mode)}}
	return get[FileInfo](ctx, c, request{method: http.MethodPost, route: RouteMkdir, query: q})
}

// Move renames a file or a folder, making the folders above its new path. It
// replaces a file, and never a folder. ifMatch is a condition on the file at from, or empty.
// Errors: CodeNotFound, CodeExists, CodeChanged.
func (c *Client) Move(ctx context.Context, from, to, ifMatch string) (FileInfo, error) {
	q := url.Values{"from": {from}, "to": {to}}
	header := conditionHeader("If-Match", ifMatch)
	return get[FileInfo](ctx, c, request{method: http.MethodPost, route: RouteMove, query: q, header: header, wait: longTimeout})
}

// PutArchive unpacks a tar stream, gzipped or not, into the folder at path,
// which is made if it is missing. Regular files, folders, and links that stay
// in the folder are allowed; whatever would reach out of it is refused with
// CodeUnsafeArchive, other kinds with CodeInvalid. Entries before the refused
// one stay. Owners in the archive are ignored.
func (c *Client) PutArchive(ctx context.Context, path string, body io.Reader) (ArchiveResult, error) {
	r := request{method: http.MethodPut, route: RouteArchive, query: url.Values{"path": {path}}, body: body}
	return get[ArchiveResult](ctx, c, r)
}

// GetArchive packs the folder or file at path as a tar stream, with paths
// relative to the folder. Devices, sockets, pipes and what is mounted inside
// are left out. A stream that is cut off returns ErrLost (wrapped), never io.EOF.
func (c *Client) GetArchive(ctx context.Context, path string) (io.ReadCloser, error) {
	a, err := c.send(ctx, request{method: http.MethodGet, stream: true, route: RouteArchive, query: url.Values{"path": {path}}})
	if err != nil {
		return nil, err
	}
	return a, nil
}

// FormatMode returns permission bits as FileInfo.Mode has them.
func FormatMode(mode fs.FileMode) string {
	text := strconv.FormatUint(uint64(mode.Perm()), 8)
	return strings.Repeat("0", max(0, 4-len(text))) + text
}
