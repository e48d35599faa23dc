package api

import (
	"context"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/archive/ociimage"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

// SnapshotPath is the part of a request's input that names a snapshot.
type SnapshotPath struct {
	Snapshot string `path:"snapshot" maxLength:"63" doc:"Id or name of the snapshot"`
}

// SnapshotPage selects a page of snapshots.
type SnapshotPage struct {
	Cursor string `query:"cursor" maxLength:"12" doc:"next_cursor of the previous page"`
	Limit  int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Maximum number of snapshots"`
}

type sandboxSnapshotsInput struct {
	SandboxPath
	SnapshotPage
}

type exportInput struct {
	SnapshotPath
	Exchange
}

type snapshotOutput struct {
	Location string `header:"Location"`
	Body     types.Snapshot
}

func (a *API) registerSnapshots() {
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/snapshot", id: "create-snapshot", tag: "snapshots", status: http.StatusCreated,
		summary: "Take a snapshot of the disk of a sandbox, or of a part of it",
		description: "Without `paths`, the snapshot contains the whole disk. With `paths`, it contains everything at these paths, including files of the image, and is based on the image. The node refuses a path that does not exist, and then takes no snapshot. Never wakes the sandbox, and works in every state. The programs of a running sandbox stop while the last changes are copied, `frozen_ms`. " +
			"An archived sandbox is stopped then, because its disk is downloaded. " +
			"Responds when the snapshot is on the disk. Continues when the client disconnects.",
		codes: slices.Concat(retrievalCodes, []problem.Code{problem.NameInvalid, problem.SnapshotExists, problem.SnapshotLimitExceeded, problem.SandboxBusy, problem.SandboxDestroyed, problem.SleepFailed,
			problem.EngineUnavailable, problem.NodeDiskFull, problem.SandboxTimeout}),
	}, withSandboxBody(a, a.createSnapshot))
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/snapshots", id: "list-sandbox-snapshots", tag: "snapshots",
		summary: "List the snapshots of a sandbox, newest first", description: "Never wakes the sandbox.",
	}, withSandbox(a, a.sandboxSnapshots))
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/restore", id: "restore-snapshot", tag: "snapshots",
		summary: "Replace the disk of a sandbox, or a part of it, by a snapshot or a backup",
		description: "Ends the programs of the sandbox and discards its files. A snapshot or a backup with `paths` replaces only these paths; the sandbox retains its other files and its image. The sandbox retains its name, ports, environment and rules. " +
			"If it was running, the call wakes it; otherwise its next use does. Continues when the client disconnects. " +
			"With `backup_id`, the sandbox goes on until the whole backup is on the node. After an error before that, its disk is unchanged.",
		codes: slices.Concat(wakeCodes, []problem.Code{problem.SnapshotNotFound, problem.BackupNotFound, problem.SnapshotLimitExceeded, problem.SandboxBusy,
			problem.StreamLimitExceeded}),
		responses: map[int]*huma.Response{http.StatusOK: responseJSON[types.Sandbox](a, "The sandbox; or with stream: events while the backup is restored")},
		events:    map[string]any{"progress": types.BackupProgress{}, "complete": types.Sandbox{}},
	}, withSandboxBody(a, a.restore))
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/fork", id: "fork-sandbox", tag: "snapshots", status: http.StatusCreated,
		summary: "Create sandboxes with the disk of another",
		description: "Never wakes the sandbox, which goes on. The new ones have its files, size, environment, labels and declared processes, and no ports and egress rules of its own. " +
			"They share its files until they change them. An archived sandbox is stopped then, because its disk is downloaded. After an error there is none of them.",
		codes: slices.Concat(retrievalCodes, []problem.Code{problem.NameInvalid, problem.SandboxConflict, problem.SandboxLimitExceeded, problem.SnapshotLimitExceeded, problem.SandboxBusy, problem.SandboxDestroyed, problem.SleepFailed,
			problem.WakeFailed, problem.EngineUnavailable, problem.NodeDiskFull, problem.SandboxTimeout}),
	}, withSandboxBody(a, a.fork))
	register(a, route{
		method: http.MethodGet, path: "/snapshots", id: "list-snapshots", tag: "snapshots",
		summary: "List all snapshots, newest first", description: "Includes snapshots of destroyed sandboxes.",
	}, a.listSnapshots)
	register(a, route{
		method: http.MethodGet, path: "/snapshots/{snapshot}", id: "get-snapshot", tag: "snapshots",
		summary: "Get a snapshot", description: "Reads from memory.",
		codes: []problem.Code{problem.SnapshotNotFound},
	}, a.getSnapshot)
	register(a, route{
		method: http.MethodGet, path: "/snapshots/{snapshot}/export", id: "export-snapshot", tag: "snapshots",
		summary: "Export a snapshot as a container image",
		description: "Responds with a tar archive for `podman load`, `docker load` and skopeo. It is both an OCI image layout and a docker-archive. " +
			"The image has the layers of the sandbox's image and one layer for each snapshot. It has only files, not the environment, declared processes and other settings of the sandbox. " +
			"The response begins when the node has read all files of the snapshot. If the export fails after that, the node closes the connection.",
		codes:     []problem.Code{problem.SnapshotNotFound, problem.SnapshotUnsupported, problem.ExportLimitExceeded, problem.EngineUnavailable},
		responses: map[int]*huma.Response{http.StatusOK: responseBytes("The image", ociimage.MediaType)},
	}, a.exportSnapshot)
	register(a, route{
		method: http.MethodDelete, path: "/snapshots/{snapshot}", id: "delete-snapshot", tag: "snapshots", status: http.StatusNoContent,
		summary:     "Delete a snapshot",
		description: "Sandboxes and snapshots that are based on it retain their files; the space is freed when the last of them is gone.",
		codes:       []problem.Code{problem.SnapshotNotFound, problem.NodeDiskFull},
	}, a.deleteSnapshot)
}

func (a *API) createSnapshot(ctx context.Context, _ *SandboxPath, body *types.CreateSnapshotRequest, sb sandbox.Sandbox) (*snapshotOutput, error) {
	req := sandbox.SnapshotRequest{Name: body.Name, RetainLast: body.RetainLast, Paths: body.Paths}
	if body.MaxAge != nil {
		req.MaxAge = sandbox.Duration(*body.MaxAge)
	}
	s, err := a.cfg.Sandboxes.CreateSnapshot(ctx, sb.ID, req)
	if err != nil {
		return nil, err
	}
	return &snapshotOutput{Location: Prefix + "/snapshots/" + string(s.ID), Body: snapshotOf(s)}, nil
}

func (a *API) sandboxSnapshots(ctx context.Context, in *sandboxSnapshotsInput, sb sandbox.Sandbox) (*output[types.SnapshotList], error) {
	return a.snapshots(ctx, sb.ID, in.SnapshotPage)
}

func (a *API) listSnapshots(ctx context.Context, in *SnapshotPage) (*output[types.SnapshotList], error) {
	return a.snapshots(ctx, "", *in)
}

func (a *API) snapshots(ctx context.Context, of sandbox.ID, page SnapshotPage) (*output[types.SnapshotList], error) {
	list, next := a.cfg.Sandboxes.Snapshots(ownerOf(ctx), of, sandbox.SnapshotID(page.Cursor), page.Limit)
	return respond(types.SnapshotList{Snapshots: listOf(list, snapshotOf), NextCursor: string(next)})
}

func (a *API) getSnapshot(ctx context.Context, in *SnapshotPath) (*output[types.Snapshot], error) {
	s, err := a.cfg.Sandboxes.Snapshot(ownerOf(ctx), in.Snapshot)
	if err != nil {
		return nil, err
	}
	return respond(snapshotOf(s))
}

func (a *API) deleteSnapshot(ctx context.Context, in *SnapshotPath) (*struct{}, error) {
	s, err := a.cfg.Sandboxes.Snapshot(ownerOf(ctx), in.Snapshot)
	if err != nil {
		return nil, err
	}
	return nil, a.cfg.Sandboxes.DeleteSnapshot(ctx, s.Owner, s.ID)
}

func (a *API) exportSnapshot(ctx context.Context, in *exportInput) (*huma.StreamResponse, error) {
	if err := a.exports.acquire(ctx); err != nil {
		return nil, err
	}
	archive, err := a.cfg.Sandboxes.ExportSnapshot(ctx, ownerOf(ctx), in.Snapshot)
	if err != nil {
		return nil, err
	}
	return &huma.StreamResponse{Body: func(huma.Context) {
		defer archive.Close()
		in.w.Header().Set("Content-Type", ociimage.MediaType)
		in.w.WriteHeader(http.StatusOK)
		if in.r.Method == http.MethodHead {
			return
		}
		if _, err := io.Copy(in.w, archive); err != nil {
			a.abort(ctx, err)
		}
	}}, nil
}

func (a *API) restore(ctx context.Context, in *endingInput, body *types.RestoreRequest, sb sandbox.Sandbox) (*huma.StreamResponse, error) {
	if err := checkRestore(body); err != nil {
		return nil, err
	}
	if body.BackupID != "" {
		return a.restoreBackup(ctx, in, body, sb)
	}
	s, err := a.cfg.Sandboxes.Snapshot(sb.Owner, body.SnapshotID)
	if err != nil {
		return nil, err
	}
	restored, err := a.cfg.Sandboxes.Restore(ctx, sb.ID, s.ID, in.Force)
	if err != nil {
		return nil, err
	}
	return jsonResponse(in.Exchange, a.sandboxOf(restored)), nil
}

// checkRestore refuses what does not belong together.
func checkRestore(body *types.RestoreRequest) error {
	const want = "send either snapshot_id or backup_id"
	switch {
	case body.SnapshotID == "" && body.BackupID == "":
		return invalid("body.snapshot_id", "missing, as is backup_id", want)
	case body.SnapshotID != "" && body.BackupID != "":
		return invalid("body.backup_id", "both snapshot_id and backup_id are given", want)
	case body.SnapshotID != "" && body.AllowOtherImage:
		return invalid("body.allow_other_image", "does not apply to a snapshot, whose image is on the node", "omit it, or send backup_id in place of snapshot_id")
	case body.SnapshotID != "" && body.Stream:
		return invalid("body.stream", "the restore of a snapshot has no progress", "omit it, or send backup_id in place of snapshot_id")
	}
	return nil
}

func (a *API) fork(ctx context.Context, _ *SandboxPath, body *types.ForkRequest, sb sandbox.Sandbox) (*output[types.ForkList], error) {
	forks, err := a.cfg.Sandboxes.Fork(ctx, sb.ID, sandbox.ForkRequest{Count: body.Count, Names: body.Names})
	if err != nil {
		return nil, err
	}
	return respond(types.ForkList{Sandboxes: listOf(forks, a.sandboxOf)})
}

func snapshotOf(s sandbox.Snapshot) types.Snapshot {
	return types.Snapshot{
		ID:          string(s.ID),
		Name:        s.Name,
		Sandbox:     string(s.Sandbox),
		SandboxName: s.Origin.Name,
		Image:       s.Origin.Image,
		Parent:      string(s.Parent),
		CreatedAt:   s.CreatedAt,
		ExpiresAt:   s.ExpiresAt,
		SizeBytes:   s.Usage.Bytes,
		Entries:     s.Usage.Entries,
		DurationMS:  milliseconds(time.Duration(s.Duration)),
		FrozenMS:    milliseconds(time.Duration(s.Frozen)),
		Paths:       s.Paths,
	}
}
