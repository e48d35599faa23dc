package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

// BackupPath is the part of a request's input that names a backup.
type BackupPath struct {
	Backup string `path:"backup" maxLength:"63" doc:"Id of the backup"`
}

// BackupPage selects a page of backups.
type BackupPage struct {
	Cursor string `query:"cursor" maxLength:"12" doc:"next_cursor of the previous page"`
	Limit  int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Maximum number of backups"`
}

type sandboxBackupsInput struct {
	SandboxPath
	BackupPage
}

// objectStoreCodes can come from any route that uses the object store.
var objectStoreCodes = []problem.Code{problem.ObjectStoreRequired, problem.ObjectStoreFailed, problem.BackupUnreadable, problem.EngineUnavailable}

func (a *API) registerBackups() {
	created := responseJSON[types.Backup](a, "The backup")
	created.Headers = map[string]*huma.Param{"Location": {}}
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/backup", id: "create-backup", tag: "backups", status: http.StatusCreated,
		summary: "Back up the disk of a sandbox, or a part of it, to the object store",
		description: "Without `paths`, the backup contains the disk above its image. With `paths`, it contains everything at these paths, including files of the image. Never wakes the sandbox, and works in every state. The programs of a running sandbox stop while the last changes are copied; `frozen_ms` is how long. " +
			"An archived sandbox is stopped then, because its disk is downloaded. " +
			"Responds when the backup is in the object store. Continues when the client disconnects. After an error, the next backup sends only the missing content, and again what this one has sent in its last 5 seconds, or in the last twentieth of its duration up to a minute.",
		codes: slices.Concat(objectStoreCodes, []problem.Code{problem.BackupLimitExceeded, problem.BackupUnsupported, problem.ImageMismatch, problem.SnapshotLimitExceeded, problem.SandboxBusy, problem.SandboxDestroyed,
			problem.SleepFailed, problem.NodeDiskFull, problem.SandboxTimeout, problem.StreamLimitExceeded}),
		responses: map[int]*huma.Response{
			http.StatusCreated: created,
			http.StatusOK:      {Description: "With stream: events while the backup is made", Content: map[string]*huma.MediaType{}},
		},
		events: map[string]any{"progress": types.BackupProgress{}, "complete": types.Backup{}},
	}, withSandboxBody(a, a.createBackup))
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/backups", id: "list-sandbox-backups", tag: "backups",
		summary: "List the backups of a sandbox, newest first", description: "Reads the list from the object store. Never wakes the sandbox.",
		codes: objectStoreCodes,
	}, withSandbox(a, a.sandboxBackups))
	register(a, route{
		method: http.MethodGet, path: "/backups", id: "list-backups", tag: "backups",
		summary:     "List all backups, newest first",
		description: "Reads the list from the object store. Includes backups of destroyed sandboxes, and your backups of other nodes that use the same repository.",
		codes:       objectStoreCodes,
	}, a.listBackups)
	register(a, route{
		method: http.MethodGet, path: "/backups/{backup}", id: "get-backup", tag: "backups",
		summary: "Get a backup", description: "Reads from the object store.",
		codes: slices.Concat(objectStoreCodes, []problem.Code{problem.BackupNotFound}),
	}, a.getBackup)
	register(a, route{
		method: http.MethodDelete, path: "/backups/{backup}", id: "delete-backup", tag: "backups", status: http.StatusNoContent,
		summary:     "Delete a backup",
		description: "Content that no other backup has is removed from the object store later. The backup of an archived sandbox cannot be deleted.",
		codes:       slices.Concat(objectStoreCodes, []problem.Code{problem.BackupNotFound, problem.BackupInUse}),
	}, a.deleteBackup)
}

func (a *API) createBackup(ctx context.Context, in *sandboxExchange, body *types.CreateBackupRequest, sb sandbox.Sandbox) (*huma.StreamResponse, error) {
	backUp := func(ctx context.Context, progress func(sandbox.BackupProgress)) (types.Backup, error) {
		part := sandbox.BackupSelection{Paths: body.Paths, Excludes: body.Excludes, Gitignore: body.Gitignore}
		b, err := a.cfg.Sandboxes.Backup(ctx, sb.ID, sandbox.BackupRequest{BackupSelection: part, RetainLast: body.RetainLast}, progress)
		if errors.Is(err, sandbox.ErrBusy) {
			err = problem.Newf(problem.SandboxBusy, "%v; try again when that operation has ended", err)
		}
		return backupOf(b), err
	}
	if body.Stream {
		return respondProgress(ctx, a, in.Exchange, backUp)
	}
	b, err := backUp(ctx, nil)
	if err != nil {
		return nil, err
	}
	return createdResponse(in.Exchange, Prefix+"/backups/"+b.ID, b), nil
}

func (a *API) restoreBackup(ctx context.Context, in *endingInput, body *types.RestoreRequest, sb sandbox.Sandbox) (*huma.StreamResponse, error) {
	req := sandbox.RestoreBackupRequest{Backup: sandbox.BackupID(body.BackupID), AnyImage: body.AllowOtherImage, Force: in.Force}
	return a.respondTransfer(ctx, in.Exchange, body.Stream, func(ctx context.Context, progress func(sandbox.BackupProgress)) (sandbox.Sandbox, error) {
		return a.cfg.Sandboxes.RestoreBackup(ctx, sb.ID, req, progress)
	})
}

// respondTransfer responds with the sandbox that do returns or, with stream, with its progress and then the sandbox.
func (a *API) respondTransfer(ctx context.Context, x Exchange, stream bool, do func(context.Context, func(sandbox.BackupProgress)) (sandbox.Sandbox, error)) (*huma.StreamResponse, error) {
	transfer := func(ctx context.Context, progress func(sandbox.BackupProgress)) (types.Sandbox, error) {
		sb, err := do(ctx, progress)
		if err != nil {
			return types.Sandbox{}, err
		}
		return a.sandboxOf(sb), nil
	}
	if stream {
		return respondProgress(ctx, a, x, transfer)
	}
	sb, err := transfer(ctx, nil)
	if err != nil {
		return nil, err
	}
	return jsonResponse(x, sb), nil
}

// respondProgress responds with the progress of do as events, and then with its result. A client
// that reads slowly gets fewer events, and does not delay do.
func respondProgress[T any](ctx context.Context, a *API, x Exchange, do func(context.Context, func(sandbox.BackupProgress)) (T, error)) (*huma.StreamResponse, error) {
	return a.respondEvents(ctx, x, func(s *eventStream) {
		latest := make(chan sandbox.BackupProgress, 1)
		var result T
		var err error
		done := make(chan struct{})
		go func() { // ends with do, which returns when the stream ends
			defer close(done)
			result, err = do(s.ctx, func(p sandbox.BackupProgress) {
				select {
				case <-latest:
				default:
				}
				latest <- p // never blocks: progress is not called concurrently
			})
		}()
		for running := true; running; {
			select {
			case p := <-latest:
				s.send("progress", "", backupProgressOf(p))
			case <-done:
				running = false
			}
		}
		if err != nil {
			s.fail(err)
			return
		}
		select {
		case p := <-latest:
			s.send("progress", "", backupProgressOf(p))
		default:
		}
		s.send("complete", "", result)
	})
}

func (a *API) sandboxBackups(ctx context.Context, in *sandboxBackupsInput, sb sandbox.Sandbox) (*output[types.BackupList], error) {
	return a.backups(ctx, sb.ID, in.BackupPage)
}

func (a *API) listBackups(ctx context.Context, in *BackupPage) (*output[types.BackupList], error) {
	return a.backups(ctx, "", *in)
}

func (a *API) backups(ctx context.Context, of sandbox.ID, page BackupPage) (*output[types.BackupList], error) {
	list, err := a.cfg.Sandboxes.Backups(ctx, ownerOf(ctx), of)
	if err != nil {
		return nil, err
	}
	if page.Cursor != "" {
		i := indexOfBackup(list, page.Cursor)
		if i < 0 {
			return nil, invalid("query.cursor", "unknown or deleted backup", "begin with the first page")
		}
		list = list[i+1:]
	}
	next := ""
	if len(list) > page.Limit {
		list = list[:page.Limit]
		next = string(list[page.Limit-1].ID)
	}
	return respond(types.BackupList{Backups: listOf(list, backupOf), NextCursor: next})
}

func indexOfBackup(list []sandbox.Backup, id string) int {
	return slices.IndexFunc(list, func(b sandbox.Backup) bool { return string(b.ID) == id })
}

func (a *API) getBackup(ctx context.Context, in *BackupPath) (*output[types.Backup], error) {
	list, err := a.cfg.Sandboxes.Backups(ctx, ownerOf(ctx), "")
	if err != nil {
		return nil, err
	}
	i := indexOfBackup(list, in.Backup)
	if i < 0 {
		return nil, fmt.Errorf("backup %q: %w", in.Backup, sandbox.ErrBackupNotFound)
	}
	return respond(backupOf(list[i]))
}

func (a *API) deleteBackup(ctx context.Context, in *BackupPath) (*struct{}, error) {
	return nil, a.cfg.Sandboxes.DeleteBackup(ctx, ownerOf(ctx), sandbox.BackupID(in.Backup))
}

func backupOf(b sandbox.Backup) types.Backup {
	return types.Backup{
		ID:          string(b.ID),
		Sandbox:     string(b.Sandbox),
		SandboxName: b.Origin.Name,
		Image:       b.Origin.Image,
		CreatedAt:   b.CreatedAt,
		SizeBytes:   b.Usage.Bytes,
		Entries:     b.Usage.Entries,
		StoredBytes: b.Stored,
		DurationMS:  milliseconds(time.Duration(b.Duration)),
		FrozenMS:    milliseconds(time.Duration(b.Frozen)),
		Paths:       b.Paths,
		Excludes:    b.Excludes,
		Gitignore:   b.Gitignore,
	}
}

func backupProgressOf(p sandbox.BackupProgress) types.BackupProgress {
	return types.BackupProgress{
		Phase:        types.BackupPhase(p.Phase),
		Bytes:        p.Done.Bytes,
		TotalBytes:   p.Total.Bytes,
		Entries:      p.Done.Entries,
		TotalEntries: p.Total.Entries,
	}
}
