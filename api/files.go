package api

import (
	"context"
	"io/fs"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// FilePath is the part of a request's input that names a file.
type FilePath struct {
	Path string `query:"path" required:"true" maxLength:"4096" doc:"Absolute path in the sandbox"`
}

// FileMode is the part of a request's input that sets permissions.
type FileMode struct {
	Mode string `query:"mode" pattern:"^0?([1-7][0-7]{2}|0[1-7][0-7]|00[1-7])$" patternDescription:"octal permissions such as 0644" doc:"Octal permissions such as 0644"`
}

type listFilesInput struct {
	SandboxPath
	FilePath
	Recursive bool `query:"recursive" doc:"Include the content of subdirectories"`
	Hidden    bool `query:"hidden" doc:"Include names that begin with a dot"`
}

type statFileInput struct {
	SandboxPath
	FilePath
	Follow bool                  `query:"follow" doc:"Describe the file that a symbolic link leads to"`
	Digest types.DigestAlgorithm `query:"digest" doc:"Read the file and return its digest, as sha256"`
}

type deleteFileInput struct {
	SandboxPath
	FilePath
	Recursive bool `query:"recursive" doc:"Delete a directory with its content"`
	FileCondition
}

// FileCondition is the part of a request's input with a condition on a file.
type FileCondition struct {
	IfMatch string `header:"If-Match" maxLength:"1024" doc:"Only if the path is a regular file with one of these ETags, or * for any. The ETag sha256-HEX, in quotes, names the content. Otherwise file_conflict"`
}

type moveFileInput struct {
	SandboxPath
	FileCondition
}

// fileCodes are the codes of all routes for files.
var fileCodes = []problem.Code{problem.PathNotFound, problem.PathNotDirectory, problem.PathIsDirectory, problem.PathExists, problem.PathNotPermitted,
	problem.SandboxDiskFull, problem.RequestTooLarge, problem.CallLimitExceeded}

func (a *API) registerFiles() {
	a.registerTransfers()
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/files", id: "list-files", tag: "files",
		summary: "List a directory", description: "Wakes the sandbox.",
		codes: slices.Concat(wakeCodes, fileCodes),
	}, a.listFiles)
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/files/stat", id: "stat-file", tag: "files",
		summary: "Describe a file or directory", description: "Wakes the sandbox. A symbolic link is described itself, with its target, unless `follow` is set.",
		codes: slices.Concat(wakeCodes, fileCodes),
	}, a.statFile)
	register(a, route{
		method: http.MethodDelete, path: "/sandbox/{id}/files", id: "delete-file", tag: "files", status: http.StatusNoContent,
		summary: "Delete a file or directory", description: "Wakes the sandbox.",
		codes: slices.Concat(wakeCodes, fileCodes, []problem.Code{problem.DirectoryNotEmpty, problem.FileConflict}),
	}, a.deleteFile)
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/files/mkdir", id: "make-directory", tag: "files",
		summary: "Make a directory with its parents", description: "Wakes the sandbox. An existing directory is left unchanged.",
		codes: slices.Concat(wakeCodes, fileCodes),
	}, a.mkdir)
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/files/move", id: "move-file", tag: "files",
		summary: "Rename a file or directory", description: "Wakes the sandbox. Makes missing parents of the new path.",
		codes: slices.Concat(wakeCodes, fileCodes, []problem.Code{problem.FileConflict}),
	}, a.moveFile)
}

// withFiles wakes the sandbox and runs do while it is awake.
func withFiles[T any](ctx context.Context, a *API, idOrName string, do func(*guest.Client) (T, error)) (result T, err error) {
	lease, err := a.acquireFiles(ctx, idOrName)
	if err != nil {
		return result, err
	}
	defer lease.Release()
	result, err = do(lease.Guest())
	return result, fromGuest(err)
}

// acquireFiles acquires the slot of a call and wakes the sandbox.
func (a *API) acquireFiles(ctx context.Context, idOrName string) (*sandbox.Lease, error) {
	sb, err := a.lookup(ctx, idOrName)
	if err != nil {
		return nil, err
	}
	if err := a.calls.acquire(ctx, 1); err != nil {
		return nil, err
	}
	return a.cfg.Sandboxes.Acquire(ctx, sb.ID, sandbox.CauseFiles)
}

// checkPath refuses an invalid path before the sandbox is woken for it.
func checkPath(location, path string) error {
	const want = "send an absolute path such as /root/app.js"
	switch {
	case !strings.HasPrefix(path, "/"):
		return invalid(location, clip(path)+" is not absolute", want)
	case strings.ContainsRune(path, 0):
		return invalid(location, "contains a NUL byte", want)
	case len(path) > maxPath:
		return invalid(location, strconv.Itoa(len(path))+" bytes are too long", "send at most "+strconv.Itoa(maxPath))
	}
	return nil
}

// filesPerSlot is how many files of a listing count as a further call: they take about a
// MiB until the client has read them.
const filesPerSlot = 4096

// maxPath is Linux's PATH_MAX.
const maxPath = 4096

// parseMode parses a mode that its pattern accepts; an empty one is 0.
func parseMode(mode string) fs.FileMode {
	bits, _ := strconv.ParseUint(mode, 8, 32)
	return fs.FileMode(bits)
}

func (a *API) listFiles(ctx context.Context, in *listFilesInput) (*output[types.FileList], error) {
	if err := checkPath("query.path", in.Path); err != nil {
		return nil, err
	}
	return withFiles(ctx, a, in.ID, func(g *guest.Client) (*output[types.FileList], error) {
		files, truncated, err := g.List(ctx, in.Path, guest.ListOptions{Recursive: in.Recursive, Hidden: in.Hidden})
		if err == nil {
			err = a.calls.acquire(ctx, int64(len(files)/filesPerSlot))
		}
		return &output[types.FileList]{types.FileList{Files: listOf(files, fileOf), Truncated: truncated}}, err
	})
}

func (a *API) statFile(ctx context.Context, in *statFileInput) (*output[types.File], error) {
	if err := checkPath("query.path", in.Path); err != nil {
		return nil, err
	}
	return withFiles(ctx, a, in.ID, func(g *guest.Client) (*output[types.File], error) {
		return respondFile(g.Stat(ctx, in.Path, guest.StatOptions{Follow: in.Follow, Digest: in.Digest != ""}))
	})
}

func (a *API) deleteFile(ctx context.Context, in *deleteFileInput) (*struct{}, error) {
	if err := checkPath("query.path", in.Path); err != nil {
		return nil, err
	}
	return withFiles(ctx, a, in.ID, func(g *guest.Client) (*struct{}, error) { return nil, g.Remove(ctx, in.Path, in.Recursive, in.IfMatch) })
}

func (a *API) mkdir(ctx context.Context, in *SandboxPath, body *types.MakeDirectoryRequest) (*output[types.File], error) {
	if err := checkPath("body.path", body.Path); err != nil {
		return nil, err
	}
	return withFiles(ctx, a, in.ID, func(g *guest.Client) (*output[types.File], error) {
		return respondFile(g.Mkdir(ctx, body.Path, parseMode(body.Mode)))
	})
}

func (a *API) moveFile(ctx context.Context, in *moveFileInput, body *types.MoveFileRequest) (*output[types.File], error) {
	if err := checkPath("body.from", body.From); err != nil {
		return nil, err
	}
	if err := checkPath("body.to", body.To); err != nil {
		return nil, err
	}
	return withFiles(ctx, a, in.ID, func(g *guest.Client) (*output[types.File], error) {
		return respondFile(g.Move(ctx, body.From, body.To, in.IfMatch))
	})
}

// respondFile responds with the result of a call that returns a file.
func respondFile(info guest.FileInfo, err error) (*output[types.File], error) {
	return &output[types.File]{fileOf(info)}, err
}

func fileOf(f guest.FileInfo) types.File {
	return types.File{
		Name: f.Name, Path: f.Path, Type: fileTypeOf(f.Type), Size: f.Size, Mode: f.Mode, ModifiedAt: f.ModifiedAt, Target: f.Target,
		UID: f.UID, GID: f.GID, ETag: f.ETag, SHA256: f.SHA256,
	}
}

// fileTypeOf returns "other" for a type that the API does not have: the guest is not
// trusted.
func fileTypeOf(name string) types.FileType {
	if t := types.FileType(name); slices.Contains(t.Values(), t) {
		return t
	}
	return types.FileTypeOther
}
