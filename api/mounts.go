package api

import (
	"context"
	"errors"
	"net/http"
	"slices"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

type mountInput struct {
	SandboxPath
	Path string `query:"path" required:"true" maxLength:"4095" doc:"Folder in the sandbox at which the bucket is mounted"`
}

func (a *API) registerMounts() {
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/mounts", id: "create-mount", tag: "mounts", status: http.StatusCreated,
		summary: "Mount a bucket as a folder of a sandbox",
		description: "The node has the credentials; the sandbox does not. Wakes the sandbox. The folder's existing files are hidden until the bucket is unmounted. " +
			"The mount remains when the sandbox sleeps, stops or is archived, and when the node starts again; forks have it, too. Repeating the request changes nothing.",
		codes: slices.Concat(wakeCodes, []problem.Code{problem.MountExists, problem.MountPointInvalid, problem.ObjectStoreFailed, problem.FUSERequired, problem.NodeDiskFull}),
	}, withSandboxBody(a, a.createMount))
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/mounts", id: "list-mounts", tag: "mounts",
		summary: "List the mounts of a sandbox, sorted by path", description: "Never wakes the sandbox.",
	}, withSandbox(a, a.listMounts))
	register(a, route{
		method: http.MethodDelete, path: "/sandbox/{id}/mounts", id: "delete-mount", tag: "mounts", status: http.StatusNoContent,
		summary:     "Unmount a bucket",
		description: "Open files remain usable until they are closed. The bucket keeps its objects. Never wakes the sandbox.",
		codes:       []problem.Code{problem.MountNotFound, problem.EngineUnavailable, problem.NodeDiskFull},
	}, withSandbox(a, a.deleteMount))
}

func (a *API) createMount(ctx context.Context, _ *SandboxPath, body *types.MountRequest, sb sandbox.Sandbox) (*output[types.Mount], error) {
	m, err := a.cfg.Sandboxes.Mount(ctx, sb.ID, sandbox.Mount{Bucket: body.Bucket, Prefix: body.Prefix, Path: body.Path, ReadOnly: body.ReadOnly})
	if err != nil {
		return nil, problemOfMount(err)
	}
	return respond(mountOf(m))
}

// problemOfMount returns the problem for an error of a mount, but not of the wake before it.
func problemOfMount(err error) error {
	if _, ok := errors.AsType[*sandbox.WakeError](err); ok {
		return err
	}
	switch {
	case errors.Is(err, sandbox.ErrMountExists):
		return problem.Newf(problem.MountExists, "%v; unmount it first, or use another path", err)
	case errors.Is(err, sandbox.ErrNoMountPoint):
		return problem.Newf(problem.MountPointInvalid, "%v; use the path of a folder, or of a new one, without symbolic links", err)
	case errors.Is(err, sandbox.ErrNoFUSE):
		return problem.Newf(problem.FUSERequired, "%v; doze doctor on the node has the remedy", err)
	}
	return err
}

func (a *API) listMounts(_ context.Context, _ *SandboxPath, sb sandbox.Sandbox) (*output[types.MountList], error) {
	return respond(types.MountList{Mounts: listOf(sb.Mounts, mountOf)})
}

func (a *API) deleteMount(ctx context.Context, in *mountInput, sb sandbox.Sandbox) (*struct{}, error) {
	err := a.cfg.Sandboxes.Unmount(ctx, sb.ID, in.Path)
	if errors.Is(err, sandbox.ErrMountNotFound) {
		err = problem.Newf(problem.MountNotFound, "%v; GET %s/sandbox/%s/mounts lists the mounts", err, Prefix, sb.ID)
	}
	return nil, err
}

func mountOf(m sandbox.Mount) types.Mount {
	return types.Mount{Bucket: m.Bucket, Prefix: m.Prefix, Path: m.Path, ReadOnly: m.ReadOnly, CreatedAt: m.CreatedAt}
}
