package api

import (
	"context"
	"io"
	"net/http"
	"slices"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
)

const tarType = "application/x-tar"

type archiveInput struct {
	SandboxPath
	Exchange
	FilePath
}

func (a *API) registerArchives() {
	const path = "/sandbox/{id}/files/archive"
	addRoute(a, route{
		method: http.MethodPut, path: path, id: "put-archive", tag: "files",
		summary: "Unpack a tar stream into a directory",
		description: "Wakes the sandbox. The body is a tar of any size, gzipped or not; a missing directory is made. An entry that " +
			"leads out of the directory is refused. Entries before it, or before the end of an incomplete upload, stay.",
		codes:     slices.Concat(wakeCodes, fileCodes, []problem.Code{problem.ArchiveUnsafe, problem.BodyIncomplete, problem.BodyTimeout}),
		responses: map[int]*huma.Response{http.StatusOK: responseJSON[types.ArchiveResult](a, "How much was unpacked")},
	}, &huma.RequestBody{Description: "The tar stream.", Content: rawContent(tarType)}, a.putArchive)
	register(a, route{
		method: http.MethodGet, path: path, id: "get-archive", tag: "files",
		summary: "Pack a directory or file as a tar stream",
		description: "Wakes the sandbox. Paths in the tar are relative to the directory. If the response cannot be " +
			"completed, the connection is closed.",
		codes:     slices.Concat(wakeCodes, fileCodes),
		responses: map[int]*huma.Response{http.StatusOK: responseBytes("The tar", tarType)},
	}, a.getArchive)
}

func (a *API) putArchive(ctx context.Context, in *archiveInput) (*huma.StreamResponse, error) {
	if err := checkPath("query.path", in.Path); err != nil {
		return nil, err
	}
	if err := a.cfg.Sandboxes.CheckUpload(); err != nil {
		return nil, err
	}
	body := newTimedBody(in.w, in.r.Body, a.cfg.Limits.Stall)
	defer body.detach()
	result, err := withFiles(ctx, a, in.ID, func(g *guest.Client) (guest.ArchiveResult, error) {
		result, err := g.PutArchive(ctx, in.Path, body)
		return result, uploadError(body, err)
	})
	return jsonResponse(in.Exchange, types.ArchiveResult(result)), err
}

func (a *API) getArchive(ctx context.Context, in *archiveInput) (*huma.StreamResponse, error) {
	if err := checkPath("query.path", in.Path); err != nil {
		return nil, err
	}
	return a.download(ctx, in.ID, in.Exchange, func(g *guest.Client) (io.ReadCloser, func(http.Header) int, error) {
		tar, err := g.GetArchive(ctx, in.Path)
		return tar, func(h http.Header) int {
			h.Set("Content-Type", tarType)
			return http.StatusOK
		}, err
	})
}
