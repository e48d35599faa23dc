package wakeproxy

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"syscall"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/requestid"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

var (
	notFound       = problem.New(problem.PreviewNotFound, "The address may be mistyped, the port is no longer exposed, or the sandbox was destroyed.")
	notRunning     = problem.New(problem.SandboxNotRunning, "Requests to this port do not wake it. Wake it by the API, or expose the port with another wake mode.")
	sandboxStopped = problem.New(problem.SandboxStopped, "Background requests of pages, prefetches, HEAD requests and crawlers do not start it. "+
		"Open or reload the page, or expose the port with wake mode any.")
	sandboxAsleep    = problem.New(problem.SandboxAsleep, "Prefetches do not wake it.")
	wakeTimeout      = problem.New(problem.WakeTimeout, "The wake continues. Try again in a moment.")
	portNotReady     = problem.New(problem.PortNotReady, "The sandbox was started, but its server is not ready yet.")
	portNotListening = problem.New(problem.PortNotListening, "The sandbox is running, but no process in it accepts connections on this port.")
	disconnected     = problem.New(problem.ServerDisconnected, "The connection to the server in the sandbox ended before its response was complete.")
	responseInvalid  = problem.New(problem.ServerResponseInvalid, "The server in the sandbox sent a status that HTTP does not allow here.")
	protocolMismatch = problem.New(problem.ServerProtocolMismatch, "The request was sent as HTTP/1.1. Expose the port with protocol h2c, or try again if it has protocol auto.")
	bodyTooLarge     = problem.New(problem.BodyTooLarge, "This node does not accept bodies of that size.")
	tooManyRequests  = problem.New(problem.RequestLimitExceeded, "Try again in a moment.")
	tooManyWaiters   = problem.New(problem.WaiterLimitExceeded, "Try again in a moment.")
	nodeClosing      = problem.New(problem.NodeUnavailable, "Try again in a moment.")
	engineDown       = problem.New(problem.EngineUnavailable, "The node's container engine does not respond.")
	wakeFailed       = problem.New(problem.WakeFailed, "It failed to start.")
	methodNotAllowed = problem.New(problem.MethodNotAllowed, "Use GET.")
)

// mayPass reports whether the same request may succeed later.
func mayPass(p *problem.Problem) bool {
	return p.Status >= http.StatusInternalServerError || p.Code == problem.SandboxNotRunning
}

// withContainerOutput returns p with the last line that a container wrote.
func withContainerOutput(p *problem.Problem, line string) *problem.Problem {
	changed := *p
	changed.ContainerOutput = line
	return &changed
}

// withoutOutput returns p without the sandbox's output, which is for its own pages.
func withoutOutput(p *problem.Problem) *problem.Problem {
	changed := withContainerOutput(p, "")
	if p.Process != nil {
		process := *p.Process
		process.Output = ""
		changed.Process = &process
	}
	return changed
}

// problemOf returns the problem that a failure is to the visitor. It contains no
// path, address or other text of the node.
func problemOf(err error) *problem.Problem {
	failed, isWake := errors.AsType[*sandbox.WakeError](err)
	_, tooLarge := errors.AsType[*http.MaxBytesError](err)
	switch {
	case errors.Is(err, sandbox.ErrNotFound), errors.Is(err, sandbox.ErrDestroyed):
		return notFound
	case errors.Is(err, sandbox.ErrNotRunning):
		return notRunning
	case errors.Is(err, sandbox.ErrTooManyWaiters):
		return tooManyWaiters
	case errors.Is(err, sandbox.ErrClosed):
		return nodeClosing
	case isWake:
		p := wakeFailed
		if errors.Is(err, sandbox.ErrEngineDown) {
			p = engineDown
		}
		return withContainerOutput(p, failed.LastLog)
	case errors.Is(err, errStillWaking):
		return wakeTimeout
	case errors.Is(err, errNotReady):
		return portNotReady
	case errors.Is(err, syscall.ECONNREFUSED):
		return portNotListening
	case errors.Is(err, errHTTP2):
		return protocolMismatch
	case errors.Is(err, errResponseInvalid):
		return responseInvalid
	case tooLarge:
		return bodyTooLarge
	}
	return disconnected
}

// problemOf refines problemOf by the state of the sandbox.
func (x *exchange) problemOf(ctx context.Context, err error) *problem.Problem {
	sb, _ := x.proxy.sandboxes.ByID(x.id)
	crashed, ended := errors.AsType[*crashError](err)
	switch {
	case ended:
		return x.crashProblem(ctx, crashed.process)
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, errNotReady):
		if process, ok := x.crashed(); ok {
			return x.crashProblem(ctx, process)
		}
	case !errors.Is(err, sandbox.ErrNotRunning), x.port.Wake == sandbox.WakeNever:
	case sb.State == sandbox.StateAsleep:
		return sandboxAsleep
	default:
		return sandboxStopped
	}
	p := problemOf(err)
	if x.port.Access == sandbox.AccessPublic {
		p = withContainerOutput(p, "")
	}
	return p
}

// crashProblem names a process that has ended. Its output is for visitors with the
// preview's token only, as a public port has any visitor.
func (x *exchange) crashProblem(ctx context.Context, process guest.Process) *problem.Problem {
	p := problem.New(problem.ProcessExited, fmt.Sprintf("Nothing listens on the port: process %s %s.", process.Name, process.Ending()))
	p.Process = &problem.FailedProcess{Name: process.Name, ExitCode: process.ExitCode, Signal: process.Signal}
	if lease := x.currentLease(); lease != nil && x.port.Access != sandbox.AccessPublic {
		p.Process.Output = lease.LastOutput(ctx, process.ID)
	}
	return p
}

// writeProblem responds with a problem: a page to browsers, a document to others.
func writeProblem(w http.ResponseWriter, r *http.Request, p *problem.Problem) {
	p = p.For(requestid.Of(r))
	if origin := r.Header.Get("Origin"); origin != "" {
		p = withoutOutput(p)
		allowOrigin(w.Header(), origin)
	}
	if wantsHTML(r) {
		writeProblemPage(w, r, p)
		return
	}
	w.Header().Set("Vary", varies)
	p.Write(w, r)
}

// allowOrigin lets scripts of any origin read an error document, so that a page
// of one preview which calls another sees more than "Failed to fetch". The
// document contains nothing that is not for any client with the preview's URL. A
// preflight request gets the error too, without permission: only the application
// may grant that.
func allowOrigin(h http.Header, origin string) {
	h.Set("Access-Control-Allow-Origin", origin)
	h.Set("Access-Control-Allow-Credentials", "true")
	h.Set("Access-Control-Expose-Headers", "Retry-After, Doze-Wake, Doze-Error, X-Request-Id")
}

// varies lists the request headers that the node's own responses depend on.
const varies = "Accept, Origin"

// writeOwn writes a response of the node, which must not be cached or reinterpreted.
func writeOwn(w http.ResponseWriter, contentType string, status int, body []byte) {
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	w.Write(body) // fails only when the visitor has left
}
