package api

import (
	"bytes"
	"cmp"
	"context"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
)

const octetStream = "application/octet-stream"

type writeFileInput struct {
	SandboxPath
	Exchange
	Path string `query:"path" maxLength:"4096" doc:"Absolute path in the sandbox; required unless the body is the JSON form"`
	FileMode
}

type readFileInput struct {
	SandboxPath
	Exchange
	FilePath
	Range       string `header:"Range" maxLength:"512" doc:"One or more ranges of bytes, as in HTTP"`
	IfNoneMatch string `header:"If-None-Match" maxLength:"512" doc:"Respond with 304 if the file has this ETag"`
}

func (a *API) registerTransfers() {
	body := &huma.RequestBody{Description: "The file, or its JSON form.", Content: rawContent(octetStream)}
	body.Content["application/json"] = &huma.MediaType{Schema: a.writeFileSchema()}
	addRoute(a, route{
		method: http.MethodPut, path: "/sandbox/{id}/files/write", id: "write-file", tag: "files",
		summary: "Write a file",
		description: "Wakes the sandbox. With `path` in the query, the body is the file, of any size and type; without, the " +
			"body is the JSON form, of at most 4 MiB. The file is replaced as a whole: an incomplete upload changes nothing. " +
			"Missing directories are made.",
		codes:     slices.Concat(wakeCodes, fileCodes, bodyCodes),
		responses: map[int]*huma.Response{http.StatusOK: responseJSON[types.File](a, "The file as written")},
	}, body, a.writeFile)
	content := responseBytes("The file", octetStream)
	partial := responseBytes("The requested ranges", octetStream)
	notModified := &huma.Response{Description: "The file still has the ETag of If-None-Match"}
	for _, response := range []*huma.Response{content, partial, notModified} {
		response.Headers = map[string]*huma.Param{"ETag": {}}
	}
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/files/read", id: "read-file", tag: "files",
		summary: "Read a file",
		description: "Wakes the sandbox. The Content-Type depends on the name of the file. Supports Range and If-None-Match. " +
			"If the response cannot be completed, the connection is closed.",
		codes: slices.Concat(wakeCodes, fileCodes, []problem.Code{problem.RangeNotSatisfiable}),
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
	body := newTimedBody(in.w, in.r.Body, a.cfg.Limits.Stall)
	defer body.detach()
	return a.storeFile(ctx, in, in.Path, parseMode(in.Mode), body)
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
	return a.storeFile(ctx, in, body.Path, parseMode(cmp.Or(body.Mode, in.Mode)), bytes.NewReader(content))
}

func (a *API) storeFile(ctx context.Context, in *writeFileInput, path string, mode fs.FileMode, body io.Reader) (*huma.StreamResponse, error) {
	info, err := withFiles(ctx, a, in.ID, func(g *guest.Client) (guest.FileInfo, error) {
		info, err := g.WriteFile(ctx, path, mode, body)
		return info, uploadError(body, err)
	})
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
	ranges := in.Range
	if in.r.Header.Get("If-Range") != "" {
		ranges = "" // responding with the whole file is always correct (RFC 9110, 14.2)
	}
	return a.download(ctx, in.ID, in.Exchange, func(g *guest.Client) (io.ReadCloser, func(http.Header) int, error) {
		content, err := g.ReadFile(ctx, in.Path, ranges)
		if err != nil {
			return nil, nil, err
		}
		if content.Status == http.StatusRequestedRangeNotSatisfiable {
			content.Body.Close()
			return nil, nil, problem.Newf(problem.RangeNotSatisfiable, "%s lies outside the file; its size is in Content-Range", clip(ranges)).
				WithHeader("Content-Range", clip(content.ContentRange))
		}
		return content.Body, func(h http.Header) int { return fileHeader(h, in, content) }, nil
	})
}

// fileHeader sets the header of a response with the content of a file. The content is
// not trusted: it must not run as a page of the API's origin.
func fileHeader(h http.Header, in *readFileInput, content *guest.FileContent) (status int) {
	h.Set("Content-Type", contentType(in.Path, content))
	h.Set("Content-Security-Policy", "default-src 'none'; sandbox")
	h.Set("Cache-Control", "no-cache")
	h.Set("Accept-Ranges", "bytes")
	if !content.ModifiedAt.IsZero() {
		h.Set("Last-Modified", content.ModifiedAt.UTC().Format(http.TimeFormat))
	}
	if isETag(content.ETag) {
		h.Set("ETag", content.ETag)
		if matchesETag(in.IfNoneMatch, content.ETag) {
			return http.StatusNotModified
		}
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

// matchesETag compares weakly, as If-None-Match does (RFC 9110, 13.1.2).
func matchesETag(header, etag string) bool {
	if strings.TrimSpace(header) == "*" {
		return true
	}
	for candidate := range strings.SplitSeq(header, ",") {
		if strings.TrimPrefix(strings.TrimSpace(candidate), "W/") == strings.TrimPrefix(etag, "W/") {
			return true
		}
	}
	return false
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
			a.refuse(ctx, fromGuest(err))
			// The header has been sent: only closing the connection shows that the
			// response is incomplete.
			panic(http.ErrAbortHandler)
		}
	}}, nil
}
