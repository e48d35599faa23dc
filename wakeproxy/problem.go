package wakeproxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"syscall"

	"github.com/doze-run/doze/requestid"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// problem is a problem document (RFC 9457) with a stable code, in the shape of
// the API's. Toward browsers it becomes a page.
type problem struct {
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"`
	Code   string `json:"code"`
	// LastLog is the last line that the container wrote before a wake failed.
	LastLog string `json:"last_log,omitempty"`
	// Process is the one that would have listened, when it has ended.
	Process *endedProcess `json:"process,omitempty"`
	// RequestID is the response's X-Request-Id, by which the node's log names it.
	RequestID string `json:"request_id,omitempty"`

	retryAfter int // seconds; 0 sends none
}

// mayPass reports whether the same request may succeed later.
func (p problem) mayPass() bool {
	return p.Status >= http.StatusInternalServerError || p.Code == notRunning.Code
}

// withoutOutput is the problem without what a sandbox wrote, which is for its own pages.
func (p problem) withoutOutput() problem {
	p.LastLog = ""
	if p.Process != nil {
		process := *p.Process
		process.Output = ""
		p.Process = &process
	}
	return p
}

// endedProcess is a declared process that ended with an error.
type endedProcess struct {
	Name     string `json:"name"`
	ExitCode *int   `json:"exit_code,omitempty"`
	Signal   string `json:"signal,omitempty"`
	// Output is its last lines. Visitors of a public port do not get it.
	Output string `json:"output,omitempty"`
}

var (
	notFound = problem{
		Status: http.StatusNotFound, Code: "preview_not_found", Title: "There is no such preview",
		Detail: "The address may be mistyped, the port is not exposed any more, or the sandbox was destroyed.",
	}
	notRunning = problem{
		Status: http.StatusGone, Code: "sandbox_not_running", Title: "The sandbox is not running",
		Detail: "Requests to this port do not wake it. Wake it by the API, or expose the port with another wake mode.",
	}
	sandboxStopped = problem{
		Status: http.StatusServiceUnavailable, Code: "sandbox_stopped", Title: "The sandbox is stopped",
		Detail: "What a page loads in the background, prefetches, HEAD requests and crawlers do not start it. " +
			"Open or reload the page, or expose the port with wake mode any.",
		retryAfter: 30,
	}
	sandboxAsleep = problem{
		Status: http.StatusServiceUnavailable, Code: "sandbox_asleep", Title: "The sandbox is asleep",
		Detail: "Prefetches do not wake it.", retryAfter: 30,
	}
	wakeTimeout = problem{
		Status: http.StatusGatewayTimeout, Code: "wake_timeout", Title: "The sandbox is still waking",
		Detail: "The wake goes on. Try again in a moment.", retryAfter: 2,
	}
	portNotReady = problem{
		Status: http.StatusGatewayTimeout, Code: "port_not_ready", Title: "The server is not up yet",
		Detail: "The sandbox was started, but nothing listens on the port yet.", retryAfter: 2,
	}
	portNotListening = problem{
		Status: http.StatusBadGateway, Code: "port_not_listening", Title: "Nothing listens on the port",
		Detail: "The sandbox is running, but no process in it accepts connections on this port.",
	}
	processExited = problem{
		Status: http.StatusBadGateway, Code: "process_exited", Title: "The server has ended",
	}
	connectionLost = problem{
		Status: http.StatusBadGateway, Code: "connection_lost", Title: "The server gave no answer",
		Detail: "The connection to the server in the sandbox ended before its answer was whole.",
	}
	responseInvalid = problem{
		Status: http.StatusBadGateway, Code: "response_invalid", Title: "The server's response is not valid HTTP",
		Detail: "The server in the sandbox sent a status that HTTP does not allow here.",
	}
	protocolMismatch = problem{
		Status: http.StatusBadGateway, Code: "protocol_mismatch", Title: "The server speaks HTTP/2 only",
		Detail: "It was asked in HTTP/1.1. Expose the port with protocol h2c, or try again if it has protocol auto.",
	}
	bodyTooLarge = problem{
		Status: http.StatusRequestEntityTooLarge, Code: "body_too_large", Title: "The body is too large",
		Detail: "This node does not take bodies of that size.",
	}
	tooManyRequests = problem{
		Status: http.StatusServiceUnavailable, Code: "too_many_requests", Title: "Too many requests are in flight",
		Detail: "Try again in a moment.", retryAfter: 1,
	}
	tooManyWaiters = problem{
		Status: http.StatusServiceUnavailable, Code: "too_many_waiters", Title: "Too many requests wait for a wake",
		Detail: "Try again in a moment.", retryAfter: 1,
	}
	nodeClosing = problem{
		Status: http.StatusServiceUnavailable, Code: "node_closing", Title: "The node is starting or shutting down",
		Detail: "Try again in a moment.", retryAfter: 5,
	}
	engineUnavailable = problem{
		Status: http.StatusServiceUnavailable, Code: "engine_unavailable", Title: "The sandbox cannot be started now",
		Detail: "The node's container engine does not answer.", retryAfter: 5,
	}
	wakeFailed = problem{
		Status: http.StatusBadGateway, Code: "wake_failed", Title: "The sandbox could not be woken",
		Detail: "It failed to start.",
	}
	methodNotAllowed = problem{
		Status: http.StatusMethodNotAllowed, Code: "method_not_allowed", Title: "The method is not allowed",
		Detail: "Use GET.",
	}
)

// problemOf says what a failure means to the visitor. Paths, addresses and
// other words of the node stay out of it.
func problemOf(err error) problem {
	var failed *sandbox.WakeError
	var tooLarge *http.MaxBytesError
	switch {
	case errors.Is(err, sandbox.ErrNotFound), errors.Is(err, sandbox.ErrDestroyed):
		return notFound
	case errors.Is(err, sandbox.ErrNotRunning):
		return notRunning
	case errors.Is(err, sandbox.ErrTooManyWaiters):
		return tooManyWaiters
	case errors.Is(err, sandbox.ErrClosed):
		return nodeClosing
	case errors.As(err, &failed):
		p := wakeFailed
		if errors.Is(err, sandbox.ErrEngineDown) {
			p = engineUnavailable
		}
		p.LastLog = failed.LastLog
		return p
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
	case errors.As(err, &tooLarge):
		return bodyTooLarge
	}
	return connectionLost
}

// problemOf is problemOf with what is known of the sandbox.
func (x *exchange) problemOf(ctx context.Context, err error) problem {
	sb, _ := x.proxy.sandboxes.ByID(x.id)
	var crashed *crashError
	switch {
	case errors.As(err, &crashed):
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
		p.LastLog = ""
	}
	return p
}

// crashProblem names a process that has ended. Its words are for those who have
// the preview's token: they work on it, and everybody else may read a public port.
func (x *exchange) crashProblem(ctx context.Context, process guest.Process) problem {
	p := processExited
	p.Process = &endedProcess{Name: process.Name, ExitCode: process.ExitCode, Signal: process.Signal}
	p.Detail = fmt.Sprintf("Nothing listens on the port: process %s %s.", process.Name, process.Ending())
	x.mu.Lock()
	lease := x.lease
	x.mu.Unlock()
	if x.port.Access != sandbox.AccessPublic && lease != nil {
		p.Process.Output = lease.LastOutput(ctx, process.ID)
	}
	return p
}

// writeProblem answers with a problem: a page for browsers, a document for others.
func writeProblem(w http.ResponseWriter, r *http.Request, p problem) {
	p.RequestID = requestid.Of(r)
	w.Header().Set(requestid.Header, p.RequestID)
	if origin := r.Header.Get("Origin"); origin != "" {
		p = p.withoutOutput()
		allowOrigin(w.Header(), origin)
	}
	if p.retryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(p.retryAfter))
	}
	if wantsHTML(r) {
		writeProblemPage(w, r, p)
		return
	}
	body, err := json.Marshal(p)
	if err != nil {
		panic(err) // strings and numbers only
	}
	writeOwn(w, "application/problem+json", p.Status, body)
}

// allowOrigin lets scripts of any origin read an error document, so that a page
// of one preview which calls another sees more than "Failed to fetch". The
// document says only what any client gets that has the preview's URL. A
// preflight request gets the error all the same, without permission: only the
// application may give that.
func allowOrigin(h http.Header, origin string) {
	h.Set("Access-Control-Allow-Origin", origin)
	h.Set("Access-Control-Allow-Credentials", "true")
	h.Set("Access-Control-Expose-Headers", "Retry-After, X-Doze-Wake, X-Request-Id")
}

// writeOwn writes an answer of our own, which nobody may keep or reinterpret.
func writeOwn(w http.ResponseWriter, contentType string, status int, body []byte) {
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Vary", "Accept, Origin")
	w.WriteHeader(status)
	w.Write(body) // fails when the visitor has left: nobody to tell
}
