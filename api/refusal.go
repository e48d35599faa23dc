package api

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"syscall"

	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/egress/secret/vault"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// refuse turns the error of a request, or of what streams its answer, into the
// Problem that the client gets. What failed on the node's side is logged here and
// nowhere else.
func (a *API) refuse(ctx context.Context, operation, id string, err error) *problem.Problem {
	p := problemOf(ctx, err)
	switch {
	case p.Code == problem.NodeUnavailable: // whatever is under way then ends so
	case p.Code == problem.InternalError:
		a.log.Error("a request failed", "operation", operation, "sandbox", id, "request_id", requestIDOf(ctx), "error", err)
	case p.Status >= http.StatusInternalServerError:
		a.log.Warn("a request was not served", "operation", operation, "sandbox", id, "code", p.Code.String(), "request_id", requestIDOf(ctx), "error", err)
	}
	return p.For(requestIDOf(ctx))
}

// sentinels are told apart by errors.Is, first match first.
var sentinels = []struct {
	err  error
	code problem.Code
	want string // what would be right, after the error's own text
}{
	{syscall.EMFILE, problem.DescriptorsExhausted, "raise the limit of open files of the node's user (LimitNOFILE of its unit, ulimit -n) and restart the node"},
	{syscall.ENFILE, problem.DescriptorsExhausted, "raise the host's limit of open files (sysctl fs.file-max)"},
	{sandbox.ErrDestroyed, problem.SandboxDestroyed, "create another"},
	{sandbox.ErrNotQuarantined, problem.QuarantineNotFound, "GET " + Prefix + "/node lists what is in quarantine"},
	{sandbox.ErrNotFound, problem.SandboxNotFound, "GET " + Prefix + "/sandbox lists those that exist"},
	{sandbox.ErrImageNotAllowed, problem.ImageNotAllowed, "GET " + Prefix + "/node lists the images"},
	{sandbox.ErrImageMissing, problem.ImageUnavailable, "check the image's name and that its registry can be reached from the node"},
	{sandbox.ErrTooManyWaiters, problem.WaiterLimitExceeded, "try again after Retry-After seconds"},
	{sandbox.ErrTooManySandboxes, problem.SandboxLimitExceeded, "delete one first"},
	{sandbox.ErrBusy, problem.SandboxBusy, "try again when its requests, commands and transfers have ended, or with force=true"},
	{sandbox.ErrStoreFull, problem.NodeDiskFull, "free disk space on the node; nothing has changed"},
	{sandbox.ErrEngineDown, problem.EngineUnavailable, "try again; doze doctor on the node says what is wrong"},
	{sandbox.ErrClosed, problem.NodeUnavailable, "try again"},
	{vault.ErrUnknown, problem.SecretNotFound, "GET " + Prefix + "/secrets lists those that exist"},
	{vault.ErrTooMany, problem.SecretLimitExceeded, "nothing has changed"},
	{catalog.ErrUnknown, problem.PolicyNotFound, "GET " + Prefix + "/policies lists those that exist"},
	{catalog.ErrBuiltIn, problem.PolicyBuiltIn, "only policies that were pushed can be deleted"},
	{catalog.ErrInUse, problem.PolicyInUse, "change those rules first"},
	{catalog.ErrTooMany, problem.PolicyLimitExceeded, "nothing has changed"},
	{ruleset.ErrRevision, problem.RevisionConflict, "get them, make the change again and send the new revision"},
	{guest.ErrLost, problem.GuestLost, "the sandbox ended or stopped meanwhile; GET its events to see why"},
	{guest.ErrNoAnswer, problem.SandboxTimeout, "try again, or stop the sandbox and try again"},
}

// problemOf finds the Problem for any error that the runtime returns.
func problemOf(ctx context.Context, err error) *problem.Problem {
	var p *problem.Problem
	if errors.As(err, &p) {
		return p
	}
	switch {
	case clientGone(ctx):
		return problem.New(problem.ClientDisconnected, "the client closed the connection")
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	}
	var invalid *sandbox.InvalidError
	if errors.As(err, &invalid) {
		return problemOfInvalid(invalid)
	}
	if p := problemOfEgress(err); p != nil {
		return p
	}
	var conflict *sandbox.ConflictError
	if errors.As(err, &conflict) {
		return problem.New(problem.SandboxConflict, conflict.Error())
	}
	var refused *guest.Error
	if errors.As(err, &refused) {
		return problemOfGuest(refused)
	}
	for _, s := range sentinels {
		if errors.Is(err, s.err) {
			return problem.Newf(s.code, "%v; %s", err, s.want)
		}
	}
	var freeze *sandbox.FreezeError
	if errors.As(err, &freeze) {
		return problem.Newf(problem.SleepFailed, "%v; it runs on; try again, or stop it", err)
	}
	var wake *sandbox.WakeError
	if errors.As(err, &wake) {
		return problem.Newf(problem.WakeFailed, "%v; GET its events to see what happened", err)
	}
	network := networkError(err)
	switch {
	case errors.Is(err, context.DeadlineExceeded), network != nil && network.Timeout():
		return problem.New(problem.SandboxTimeout, "the sandbox did not answer in time; try again, or stop it and try again")
	case network != nil, errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return problem.New(problem.GuestLost, "the connection to the sandbox broke; GET its events to see why")
	}
	var failure guestFailure
	if errors.As(err, &failure) {
		return problem.New(problem.GuestError, "the sandbox gave no usable answer; the node's log says more")
	}
	return problem.New(problem.InternalError, "the node failed; its log says more")
}

// networkError returns the failure of a connection that err wraps, or nil. An errno
// has the methods of a net.Error, too, but is of a file or a cgroup of the node's.
func networkError(err error) net.Error {
	var network net.Error
	if !errors.As(err, &network) {
		return nil
	}
	if _, ok := network.(syscall.Errno); ok {
		return nil
	}
	return network
}

// clientGone says whether ctx, which is a request's, has ended because nobody
// waits for the answer any more: not because the node closes.
func clientGone(ctx context.Context) bool {
	return errors.Is(ctx.Err(), context.Canceled) && !errors.Is(context.Cause(ctx), sandbox.ErrClosed)
}

// guestFailure marks an error that came from a guest: what nobody can make
// sense of is then the sandbox's failure, not the node's.
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
	p := problem.New(code, e.Error())
	p.Errors = []problem.FieldError{{Location: location, Message: e.Reason, Hint: e.Want}}
	return p
}

// guestCodes are the codes of a guest that mean the same here. The guest runs
// beside hostile code: whatever else it says is a guest_error.
var guestCodes = map[string]problem.Code{
	guest.CodeInvalid:       problem.RequestInvalid,
	guest.CodeNotFound:      problem.PathNotFound,
	guest.CodeNoProcess:     problem.ProcessNotFound,
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
}

// maxGuestMessage bounds what is repeated of a guest's words.
const maxGuestMessage = 1000

func problemOfGuest(e *guest.Error) *problem.Problem {
	code, ok := guestCodes[e.Code]
	if !ok {
		code = problem.GuestError
	}
	return problem.New(code, validText(e.Message, maxGuestMessage))
}
