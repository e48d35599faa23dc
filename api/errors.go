package api

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"syscall"

	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/egress/secret/vault"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// refuse returns the problem for the error of a request or of its streamed response.
// It logs failures of the node; its callers do not.
func (a *API) refuse(ctx context.Context, err error) *problem.Problem {
	p, c := problemOf(ctx, err), callOf(ctx)
	// When the node shuts down, all requests in progress end with NodeUnavailable.
	if p.Status >= http.StatusInternalServerError && p.Code != problem.NodeUnavailable {
		level := slog.LevelWarn
		if p.Code == problem.InternalError {
			level = slog.LevelError
		}
		a.cfg.Log.Log(ctx, level, "request failed", "operation", c.operation, "sandbox", c.sandbox(), "code", p.Code.String(), "request_id", c.id, "error", err)
	}
	return p.For(c.id)
}

// sentinels are compared with errors.Is, in this order.
var sentinels = []struct {
	err  error
	code problem.Code
	hint string // follows the error's text
}{
	{syscall.EMFILE, problem.DescriptorsExhausted, "raise the limit of open files of the node's user (LimitNOFILE of its unit, ulimit -n) and restart the node"},
	{syscall.ENFILE, problem.DescriptorsExhausted, "raise the host's limit of open files (sysctl fs.file-max)"},
	{sandbox.ErrDestroyed, problem.SandboxDestroyed, "create a new one"},
	{sandbox.ErrNotQuarantined, problem.QuarantineNotFound, "GET " + Prefix + "/node lists what is in quarantine"},
	{sandbox.ErrSnapshotNotFound, problem.SnapshotNotFound, "GET " + Prefix + "/snapshots lists yours"},
	{sandbox.ErrTooManySnapshots, problem.SnapshotLimitExceeded, "delete some first; nothing has changed"},
	{sandbox.ErrUnexportable, problem.SnapshotUnsupported, "create a sandbox from the snapshot, remove the cause, and export a new snapshot of that sandbox"},
	{sandbox.ErrNoObjectStore, problem.ObjectStoreRequired, "the operator configures one with the block backups in the Caddyfile"},
	{sandbox.ErrBackupNotFound, problem.BackupNotFound, "GET " + Prefix + "/backups lists yours"},
	{sandbox.ErrBackupInUse, problem.BackupInUse, "wake or destroy the sandbox"},
	{sandbox.ErrTooManyBackups, problem.BackupLimitExceeded, "delete some first, or use keep_last"},
	{sandbox.ErrBackupUnsupported, problem.BackupUnsupported, "remove the cause, and try again"},
	{sandbox.ErrNotFound, problem.SandboxNotFound, "GET " + Prefix + "/sandbox lists yours"},
	{sandbox.ErrImageNotAllowed, problem.ImageNotAllowed, "GET " + Prefix + "/node lists the allowed images"},
	{sandbox.ErrImageMissing, problem.ImageUnavailable, "check the name of the image, and that the node can reach its registry"},
	{sandbox.ErrTooManyWaiters, problem.WaiterLimitExceeded, "try again after the seconds in Retry-After"},
	{sandbox.ErrTooManySandboxes, problem.SandboxLimitExceeded, "delete one first"},
	{sandbox.ErrBusy, problem.SandboxBusy, "try again when its requests, commands and transfers have ended, or with force=true"},
	{sandbox.ErrStoreFull, problem.NodeDiskFull, "free disk space on the node; nothing has changed"},
	{sandbox.ErrEngineDown, problem.EngineUnavailable, "try again; doze doctor on the node finds the cause"},
	{sandbox.ErrClosed, problem.NodeUnavailable, "try again"},
	{vault.ErrUnknown, problem.SecretNotFound, "GET " + Prefix + "/secrets lists yours"},
	{vault.ErrTooMany, problem.SecretLimitExceeded, "nothing has changed"},
	{catalog.ErrUnknown, problem.PolicyNotFound, "GET " + Prefix + "/policies lists yours"},
	{catalog.ErrBuiltIn, problem.PolicyBuiltIn, "only pushed policies can be deleted"},
	{catalog.ErrInUse, problem.PolicyInUse, "change those rules first"},
	{catalog.ErrTooMany, problem.PolicyLimitExceeded, "nothing has changed"},
	{ruleset.ErrRevision, problem.RevisionConflict, "get the rules, make the change again, and send their new revision"},
	{guest.ErrLost, problem.GuestLost, "the sandbox ended or stopped; its events have the cause"},
	{guest.ErrNoResponse, problem.SandboxTimeout, "try again, or stop the sandbox and try again"},
}

// problemOf returns the problem for an error of the runtime or of egress.
func problemOf(ctx context.Context, err error) *problem.Problem {
	if p, ok := errors.AsType[*problem.Problem](err); ok {
		return p
	}
	switch {
	case clientGone(ctx):
		return problem.New(problem.ClientDisconnected, "the client closed the connection")
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	}
	if invalid, ok := errors.AsType[*sandbox.InvalidError](err); ok {
		return problemOfInvalid(invalid)
	}
	if invalid, ok := errors.AsType[*problem.InvalidError](err); ok {
		return problemOfEgressConfig(invalid)
	}
	if _, ok := errors.AsType[*rule.Error](err); ok {
		return problemOfRules(err)
	}
	if conflict, ok := errors.AsType[*sandbox.ConflictError](err); ok {
		return problem.New(problem.SandboxConflict, conflict.Error())
	}
	if exists, ok := errors.AsType[*sandbox.SnapshotExistsError](err); ok {
		return problem.New(problem.SnapshotExists, exists.Error())
	}
	if mismatch, ok := errors.AsType[*sandbox.ImageMismatchError](err); ok {
		return problem.Newf(problem.ImageMismatch, "%v; build or import that image, or restore the backup with allow_other_image to use the node's image of that name", mismatch)
	}
	if refused, ok := errors.AsType[*guest.Error](err); ok {
		return problemOfGuest(refused)
	}
	if missing, ok := errors.AsType[*sandbox.ImageNotBuiltError](err); ok {
		return problem.New(problem.ImageUnavailable, missing.Error())
	}
	for _, s := range sentinels {
		if errors.Is(err, s.err) {
			return problem.Newf(s.code, "%v; %s", err, s.hint)
		}
	}
	if failed, ok := errors.AsType[*sandbox.ObjectStoreError](err); ok {
		return problemOfObjectStore(failed)
	}
	if _, ok := errors.AsType[*sandbox.FreezeError](err); ok {
		return problem.Newf(problem.SleepFailed, "%v; the sandbox is still running; try again, or stop it", err)
	}
	if _, ok := errors.AsType[*sandbox.WakeError](err); ok {
		remedy := "the events of the sandbox have the cause"
		if errors.Is(err, context.DeadlineExceeded) {
			remedy = "try again; " + remedy
		}
		return problem.Newf(problem.WakeFailed, "%v; %s", err, remedy)
	}
	network := networkError(err)
	switch {
	case errors.Is(err, context.DeadlineExceeded), network != nil && network.Timeout():
		return problem.New(problem.SandboxTimeout, "the sandbox did not respond in time; try again; if that fails, stop it and try again")
	case network != nil, errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return problem.New(problem.GuestLost, "lost the connection to the sandbox; its events have the cause")
	}
	if _, ok := errors.AsType[guestFailure](err); ok {
		return problem.New(problem.GuestError, "the sandbox sent an invalid response; the node's log has the cause")
	}
	return problem.New(problem.InternalError, "the node failed; its log has the cause")
}

// objectStoreProblems are the codes of the failures of an object store, each with what failed and
// the remedy.
var objectStoreProblems = map[sandbox.ObjectStoreFailure]struct {
	code         problem.Code
	what, remedy string
}{
	sandbox.ObjectStoreUnreachable: {problem.ObjectStoreFailed, "the object store is unreachable or fails", "try again; if that fails, the operator checks endpoint in the Caddyfile"},
	sandbox.ObjectStoreDenied:      {problem.ObjectStoreFailed, "the object store refuses the node's credentials", "the operator checks access_key and secret_key in the Caddyfile, and the permissions of that key"},
	sandbox.ObjectStoreNoBucket:    {problem.ObjectStoreFailed, "the object store does not have the bucket", "the operator creates the bucket, or checks bucket and region in the Caddyfile"},
	sandbox.ObjectStorePassword:    {problem.ObjectStoreFailed, "the repository in the object store has another password", "the operator sets password of backups in the Caddyfile to the one of the first backup, or uses another prefix"},
	sandbox.ObjectStoreDamaged:     {problem.BackupUnreadable, "an object in the object store is missing or damaged", "use another backup"},
}

func problemOfObjectStore(e *sandbox.ObjectStoreError) *problem.Problem {
	p, ok := objectStoreProblems[e.Failure]
	if !ok {
		p = objectStoreProblems[sandbox.ObjectStoreUnreachable]
	}
	return problem.Newf(p.code, "%s: %s; %s", p.what, validText(e.Err.Error(), maxObjectStoreMessage), p.remedy)
}

// maxObjectStoreMessage is the maximum number of bytes of an object store's message in a problem.
const maxObjectStoreMessage = 1000

// networkError returns the failure of a connection that err wraps, or nil. A
// syscall.Errno also has the methods of a net.Error, but comes from a file or a cgroup.
func networkError(err error) net.Error {
	network, _ := errors.AsType[net.Error](err)
	if _, ok := network.(syscall.Errno); ok {
		return nil
	}
	return network
}

// clientGone reports whether ctx, a request's, has ended because the client
// disconnected, and not because the node is shutting down.
func clientGone(ctx context.Context) bool {
	return errors.Is(ctx.Err(), context.Canceled) && !errors.Is(context.Cause(ctx), sandbox.ErrClosed)
}

// guestFailure marks an error of a guest. If it is unknown, the sandbox has failed and
// not the node.
type guestFailure struct{ error }

func (f guestFailure) Unwrap() error { return f.error }

func fromGuest(err error) error {
	if err == nil {
		return nil
	}
	return guestFailure{err}
}

func problemOfInvalid(e *sandbox.InvalidError) *problem.Problem {
	code := problem.RequestInvalid
	switch {
	case errors.Is(e, sandbox.ErrImageNotAllowed):
		code = problem.ImageNotAllowed
	case e.Field == "name":
		code = problem.NameInvalid
	}
	location := "body." + e.Field
	if e.Field == "id" {
		location = "path.id"
	}
	return problem.New(code, e.Error()).WithErrors(problem.FieldError{Location: location, Message: e.Reason, Hint: e.Want})
}

// problemOfEgressConfig returns the problem of an invalid secret or policy.
func problemOfEgressConfig(e *problem.InvalidError) *problem.Problem {
	code, location := problem.RequestInvalid, "body."+e.Field
	switch e.Field {
	case "name":
		code, location = problem.NameInvalid, "path.name"
	case "module":
		code, location = problem.PolicyInvalid, "body"
	}
	return problem.New(code, e.Error()).WithErrors(problem.FieldError{Location: location, Message: e.Reason, Hint: e.Want})
}

// guestCodes are the codes of guests. Other codes become guest_error: a guest is not
// trusted.
var guestCodes = map[string]problem.Code{
	guest.CodeInvalid:       problem.RequestInvalid,
	guest.CodeNotFound:      problem.PathNotFound,
	guest.CodeNoProcess:     problem.ProcessNotFound,
	guest.CodeNoTerminal:    problem.TerminalNotFound,
	guest.CodeNoSession:     problem.SessionNotFound,
	guest.CodeSessionLost:   problem.SessionLost,
	guest.CodeSessionBusy:   problem.SessionBusy,
	guest.CodeTooMany:       problem.ProcessLimitExceeded,
	guest.CodeExists:        problem.PathExists,
	guest.CodeNotDirectory:  problem.PathNotDirectory,
	guest.CodeIsDirectory:   problem.PathIsDirectory,
	guest.CodeNotEmpty:      problem.DirectoryNotEmpty,
	guest.CodeNotPermitted:  problem.PathNotPermitted,
	guest.CodeNoSpace:       problem.SandboxDiskFull,
	guest.CodeNoCommand:     problem.CommandNotFound,
	guest.CodeNotExecutable: problem.CommandNotExecutable,
	guest.CodeNoShell:       problem.ShellNotFound,
	guest.CodeUnsafeArchive: problem.ArchiveUnsafe,
	guest.CodeTooLarge:      problem.RequestTooLarge,
	guest.CodePortNotReady:  problem.PortNotReady,
	guest.CodeWatchLimit:    problem.WatchLimitExceeded,
	guest.CodeChanged:       problem.FileConflict,
	guest.CodeDigest:        problem.DigestMismatch,
}

// maxGuestMessage is the maximum number of bytes of a guest's message in a problem.
const maxGuestMessage = 1000

func problemOfGuest(e *guest.Error) *problem.Problem {
	code, ok := guestCodes[e.Code]
	if !ok {
		code = problem.GuestError
	}
	return withETag(problem.New(code, validText(e.Message, maxGuestMessage)), e.ETag)
}
