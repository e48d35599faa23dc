package api

import (
	"bytes"
	"cmp"
	"context"
	"io"
	"mime"
	"net/http"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
)

const octetStream = "application/octet-stream"

// smallerFile is the remedy for a file that exceeds max_bytes.
const smallerFile = "send a smaller file"

type writeFileInput struct {
	SandboxPath
	Exchange
	SignedQuery
	Path string `query:"path" maxLength:"4096" doc:"Absolute path in the sandbox; required unless the body is the JSON form"`
	FileMode
	CreateNew     bool   `query:"create_new" doc:"Refuse to replace a file, with path_exists"`
	MaxBytes      int64  `query:"max_bytes" minimum:"1" doc:"Refuse a larger body, with body_too_large. For signed URLs"`
	IfMatch       string `header:"If-Match" maxLength:"1024" doc:"Write only if the file exists with one of these ETags, or * for any. The ETag sha256-HEX, in quotes, names the content. Otherwise file_conflict"`
	IfNoneMatch   string `header:"If-None-Match" maxLength:"1024" doc:"Write only if the file has none of these ETags, or * for: does not exist. Otherwise file_conflict"`
	ContentRange  string `header:"Content-Range" maxLength:"64" doc:"The body is this range of the file, such as bytes 0-1023/4096. With a size after the slash, the file has that size afterwards; with *, it grows as needed"`
	ContentDigest string `header:"Content-Digest" maxLength:"512" doc:"Write only if the body has this SHA-256, as sha-256=:BASE64: (RFC 9530). Otherwise digest_mismatch"`
	ReprDigest    string `header:"Repr-Digest" maxLength:"512" doc:"Same as Content-Digest, for whole files only"`
}

type readFileInput struct {
	SandboxPath
	Exchange
	SignedQuery
	FilePath
	Disposition types.Disposition `query:"disposition" doc:"Send a Content-Disposition with the name of the file: attachment has browsers save it, inline display it"`
	Range       string            `header:"Range" maxLength:"512" doc:"One or more ranges of bytes, as in HTTP"`
	IfRange     string            `header:"If-Range" maxLength:"512" doc:"Send the range only if the file has this ETag, else the whole file"`
	IfMatch     string            `header:"If-Match" maxLength:"1024" doc:"Send the file only if it has one of these ETags. Otherwise file_conflict"`
	IfNoneMatch string            `header:"If-None-Match" maxLength:"1024" doc:"Respond with 304 if the file has this ETag"`
}

func (a *API) registerTransfers() {
	etag := map[string]*huma.Param{"ETag": {}}
	written := responseJSON[types.File](a, "The file as written")
	written.Headers = etag
	body := &huma.RequestBody{Description: "The file, or its JSON form.", Content: rawContent(octetStream)}
	body.Content["application/json"] = &huma.MediaType{Schema: a.writeFileSchema()}
	addRoute(a, route{
		method: http.MethodPut, path: "/sandbox/{id}/files/write", id: "write-file", tag: "files", signed: true,
		summary: "Write a file",
		description: "Wakes the sandbox. With `path` in the query, the body is the file, of any size and type; without, the " +
			"body is the JSON form, of at most 4 MiB. The file is replaced as a whole: an incomplete upload changes nothing. " +
			"Missing directories are made. Of concurrent writes with the same condition exactly one succeeds. With Content-Range " +
			"the range is written into the file, after all of it has arrived.",
		codes:     slices.Concat(wakeCodes, fileCodes, bodyCodes, []problem.Code{problem.FileConflict, problem.DigestMismatch}),
		responses: map[int]*huma.Response{http.StatusOK: written},
	}, body, a.writeFile)
	content := responseBytes("The file", octetStream)
	partial := responseBytes("The requested ranges", octetStream)
	notModified := &huma.Response{Description: "The file still has the ETag of If-None-Match"}
	for _, response := range []*huma.Response{content, partial, notModified} {
		response.Headers = etag
	}
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/files/read", id: "read-file", tag: "files", signed: true,
		summary: "Read a file",
		description: "Wakes the sandbox. The Content-Type depends on the name of the file. Supports ranges and conditions; each change of a " +
			"file changes its ETag. If the response cannot be completed, the connection is closed.",
		codes: slices.Concat(wakeCodes, fileCodes, []problem.Code{problem.RangeNotSatisfiable, problem.FileConflict}),
		responses: map[int]*huma.Response{
			http.StatusOK:             content,
			http.StatusPartialContent: partial,
			http.StatusNotModified:    notModified,
		},
	}, a.readFile)
}

func (a *API) writeFile(ctx context.Context, in *writeFileInput) (*huma.StreamResponse, error) {
	if in.Path == "" {
		return a.writeFileJSON(ctx, in)
	}
	if err := checkPath("query.path", in.Path); err != nil {
		return nil, err
	}
	o, err := in.options(in.r.ContentLength)
	if err != nil {
		return nil, err
	}
	if in.MaxBytes > 0 && max(in.r.ContentLength, o.End()) > in.MaxBytes {
		return nil, tooLarge(in.MaxBytes, smallerFile)
	}
	body := newTimedBody(in.w, in.r.Body, a.cfg.Limits.Stall)
	body.limit = in.MaxBytes
	defer body.detach()
	return a.storeFile(ctx, in, in.Path, o, body)
}

// options returns what the write of a body of length bytes, or -1, requires and does.
func (in *writeFileInput) options(length int64) (o guest.WriteOptions, err error) {
	o = guest.WriteOptions{Mode: parseMode(in.Mode), IfMatch: in.IfMatch, IfNoneMatch: in.IfNoneMatch, CreateNew: in.CreateNew}
	if o.Range, err = parseContentRange(in.ContentRange, length); err != nil {
		return o, err
	}
	o.SHA256, err = digestOf(in.r.Header, o.Range != nil)
	return o, err
}

func (a *API) writeFileJSON(ctx context.Context, in *writeFileInput) (*huma.StreamResponse, error) {
	if !isJSON(in.r.Header.Get("Content-Type")) {
		return nil, invalid("query.path", "missing", "send path=/absolute/path with the file as the body, or application/json with path and content in it")
	}
	var body types.WriteFileRequest
	if err := a.decodeBody(in.w, in.r, maxFileJSON, a.writeFileSchema(), &body); err != nil {
		return nil, err
	}
	if err := checkPath("body.path", body.Path); err != nil {
		return nil, err
	}
	content, err := decode(body.Content, body.Encoding, "body.content")
	if err != nil {
		return nil, err
	}
	if in.MaxBytes > 0 && int64(len(content)) > in.MaxBytes {
		return nil, tooLarge(in.MaxBytes, smallerFile)
	}
	for _, name := range []string{contentRange, contentDigest, reprDigest} {
		if in.r.Header.Get(name) != "" {
			return nil, invalid("header."+name, "does not apply to the JSON form", "send the file as raw bytes, with path in the query")
		}
	}
	o, err := in.options(int64(len(content)))
	if err != nil {
		return nil, err
	}
	o.Mode, o.CreateNew = parseMode(cmp.Or(body.Mode, in.Mode)), o.CreateNew || body.CreateNew
	return a.storeFile(ctx, in, body.Path, o, bytes.NewReader(content))
}

// writeFileSchema returns the schema of the JSON form of a small file.
func (a *API) writeFileSchema() *huma.Schema {
	return a.schema(reflect.TypeFor[types.WriteFileRequest]())
}

func (a *API) storeFile(ctx context.Context, in *writeFileInput, path string, o guest.WriteOptions, body io.Reader) (*huma.StreamResponse, error) {
	if err := a.cfg.Sandboxes.CheckUpload(); err != nil {
		return nil, err
	}
	info, err := withFiles(ctx, a, in.ID, func(g *guest.Client) (guest.FileInfo, error) {
		info, err := g.Write(ctx, path, o, body)
		return info, uploadError(body, err)
	})
	if isETag(info.ETag) {
		in.w.Header().Set("ETag", info.ETag)
	}
	return jsonResponse(in.Exchange, fileOf(info)), err
}

// uploadError returns the problem of an upload whose sender failed, or else err.
func uploadError(body io.Reader, err error) error {
	if err == nil {
		return nil
	}
	if timed, ok := body.(*timedBody); ok && timed.failure() != nil {
		return bodyProblem(timed.failure())
	}
	return err
}

func (a *API) readFile(ctx context.Context, in *readFileInput) (*huma.StreamResponse, error) {
	if err := checkPath("query.path", in.Path); err != nil {
		return nil, err
	}
	header := http.Header{}
	for name, value := range map[string]string{"Range": in.Range, "If-Range": in.IfRange, "If-Match": in.IfMatch, "If-None-Match": in.IfNoneMatch} {
		if value != "" {
			header.Set(name, value)
		}
	}
	return a.download(ctx, in.ID, in.Exchange, func(g *guest.Client) (io.ReadCloser, func(http.Header) int, error) {
		content, err := g.ReadFile(ctx, in.Path, header)
		if err != nil {
			return nil, nil, err
		}
		switch content.Status {
		case http.StatusRequestedRangeNotSatisfiable:
			return nil, nil, problem.Newf(problem.RangeNotSatisfiable, "%s lies outside the file; its size is in Content-Range", clip(in.Range)).
				WithHeader("Content-Range", clip(content.ContentRange))
		case http.StatusPreconditionFailed:
			return nil, nil, withETag(problem.New(problem.FileConflict, clip(in.Path)+" does not have an ETag of If-Match"), content.ETag)
		}
		return content.Body, func(h http.Header) int { return fileHeader(h, in, content) }, nil
	})
}

// fileHeader sets the header of a response with the content of a file. The content is
// not trusted: it must not run as a page of the API's origin.
func fileHeader(h http.Header, in *readFileInput, content *guest.FileContent) (status int) {
	h.Set("Content-Type", contentType(in.Path, content))
	h.Set("Content-Security-Policy", "default-src 'none'; sandbox")
	h.Set("Cache-Control", "private, no-cache")
	h.Set("Referrer-Policy", "no-referrer") // the address may be a signed URL
	if in.Disposition != "" {
		h.Set("Content-Disposition", mime.FormatMediaType(string(in.Disposition), map[string]string{"filename": path.Base(in.Path)}))
	}
	h.Set("Accept-Ranges", "bytes")
	if !content.ModifiedAt.IsZero() {
		h.Set("Last-Modified", content.ModifiedAt.UTC().Format(http.TimeFormat))
	}
	if isETag(content.ETag) {
		h.Set("ETag", content.ETag)
	}
	if content.Status == http.StatusNotModified {
		return http.StatusNotModified
	}
	if content.Size >= 0 {
		h.Set("Content-Length", strconv.FormatInt(content.Size, 10))
	}
	if content.Status == http.StatusPartialContent {
		if content.ContentRange != "" {
			h.Set("Content-Range", content.ContentRange)
		}
		return http.StatusPartialContent
	}
	return http.StatusOK
}

// contentType returns the type for the file's name. The guest's type is used only for a
// response with several ranges, whose boundary the guest chose.
func contentType(name string, content *guest.FileContent) string {
	if hasType(content.ContentType, "multipart/byteranges") {
		return content.ContentType
	}
	return cmp.Or(mime.TypeByExtension(path.Ext(name)), octetStream)
}

// isETag reports whether s has the form of an entity tag.
func isETag(s string) bool {
	opaque := strings.TrimPrefix(s, "W/")
	return len(s) <= 256 && len(opaque) >= 2 && opaque[0] == '"' && opaque[len(opaque)-1] == '"' &&
		!strings.ContainsAny(opaque[1:len(opaque)-1], "\" \t\r\n")
}

// withETag adds the ETag that a guest has sent to a problem.
func withETag(p *problem.Problem, etag string) *problem.Problem {
	if isETag(etag) {
		p = p.WithHeader("ETag", etag)
	}
	return p
}

// download wakes the sandbox, opens a source in it and responds with its bytes. Open
// returns the source, and a function that sets the header and returns the status.
func (a *API) download(ctx context.Context, idOrName string, x Exchange, open func(*guest.Client) (io.ReadCloser, func(http.Header) int, error)) (*huma.StreamResponse, error) {
	lease, err := a.acquireFiles(ctx, idOrName)
	if err != nil {
		return nil, err
	}
	source, header, err := open(lease.Guest())
	if err != nil {
		lease.Release()
		return nil, fromGuest(err)
	}
	return &huma.StreamResponse{Body: func(huma.Context) {
		defer lease.Release()
		defer source.Close()
		status := header(x.w.Header())
		x.w.WriteHeader(status)
		if status == http.StatusNotModified || x.r.Method == http.MethodHead {
			return
		}
		if _, err := io.Copy(x.w, source); err != nil {
			a.abort(ctx, fromGuest(err))
		}
	}}, nil
}

// abort ends a response whose header has been sent: only closing the connection shows that
// it is incomplete.
func (a *API) abort(ctx context.Context, err error) {
	a.refuse(ctx, err)
	panic(http.ErrAbortHandler)
}
