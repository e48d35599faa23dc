package problem

import (
	"net/http"
	"slices"
	"strings"
)

// Definition describes a code. All responses with the code have its status and title.
type Definition struct {
	Name   string // such as "sandbox_not_found"
	Status int
	// RetryAfter is the default value of the header Retry-After in seconds; 0: none.
	RetryAfter int
	Title      string // such as "Sandbox not found"
	Meaning    string // cause and remedy, in Markdown
	Group      Group
	From       Source
}

// Code returns the defined code.
func (d Definition) Code() Code { return Code{d.Name} }

// sourceNames of Source, from the lowest bit.
var sourceNames = []string{"API", "previews", "egress", "proxy"}

// String lists the parts, such as "API, previews".
func (s Source) String() string {
	var names []string
	for i, name := range sourceNames {
		if s&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// Group is a section of docs/reference/errors.md.
type Group string

const (
	groupRequests     Group = "Requests"
	groupSandboxes    Group = "Sandboxes"
	groupCommands     Group = "Commands, files and processes"
	groupNode         Group = "The node"
	groupEgressConfig Group = "Rules, secrets and policies"
	groupPreviews     Group = "Previews"
	groupEgress       Group = "Egress"
	groupProxy        Group = "The proxy"
)

// Source is a set of the parts of a node that send a code.
type Source uint8

const (
	API     Source = 1 << iota // the HTTP API
	Preview                    // previews, to visitors
	Egress                     // egress, to programs in sandboxes
	Proxy                      // the proxy, to programs outside of sandboxes
)

// outbound are the sources of codes for outgoing requests: what the proxy accepts
// takes the same path as requests of sandboxes.
const outbound = Egress | Proxy

// statusClientClosedRequest is nginx's: no client receives it, but access logs have it.
const statusClientClosedRequest = 499

var (
	registry = map[string]Definition{}
	ordered  []Definition
)

// define registers a code.
func define(d Definition) Code {
	if _, twice := registry[d.Name]; twice {
		panic("problem: code " + d.Name + " is defined twice")
	}
	registry[d.Name] = d
	ordered = append(ordered, d)
	return Code{d.Name}
}

// All returns the definitions of all codes, in the order of docs/reference/errors.md.
func All() []Definition { return slices.Clone(ordered) }

// Requests.
var (
	RequestInvalid = define(Definition{
		Name: "request_invalid", Status: http.StatusUnprocessableEntity, Title: "Invalid request", Group: groupRequests, From: API,
		Meaning: "A field, parameter or header is invalid or unknown. `errors` lists up to 20 errors with their locations.",
	})
	JSONInvalid = define(Definition{
		Name: "json_invalid", Status: http.StatusBadRequest, Title: "Invalid JSON", Group: groupRequests, From: API,
		Meaning: "The body is empty, not valid JSON, or not UTF-8.",
	})
	NameInvalid = define(Definition{
		Name: "name_invalid", Status: http.StatusUnprocessableEntity, Title: "Invalid name", Group: groupRequests, From: API,
		Meaning: "A sandbox name has 1 to 63 of `a-z`, `0-9` and hyphens. The name of a secret or policy has 1 to 64 of `a-z`, `0-9`, `-` and `_`. A process name must not look like a process id.",
	})
	MediaTypeUnsupported = define(Definition{
		Name: "media_type_unsupported", Status: http.StatusUnsupportedMediaType, Title: "Unsupported media type", Group: groupRequests, From: API,
		Meaning: "The route does not accept the request's Content-Type. Routes with a JSON body accept `application/json`, or no Content-Type.",
	})
	BodyTooLarge = define(Definition{
		Name: "body_too_large", Status: http.StatusRequestEntityTooLarge, Title: "Body too large", Group: groupRequests, From: API | Preview,
		Meaning: "In the API, a JSON body has at most 1 MiB, the JSON form of a file 4 MiB, and a policy 16 MiB; other bodies have no limit. For previews, the operator sets the limit with Caddy's `request_body`.",
	})
	BodyIncomplete = define(Definition{
		Name: "body_incomplete", Status: http.StatusBadRequest, Title: "Incomplete body", Group: groupRequests, From: API | outbound,
		Meaning: "The body ended early or is not valid HTTP. Nothing has changed, except that entries of an archive that arrived whole stay. Send the request again.",
	})
	BodyTimeout = define(Definition{
		Name: "body_timeout", Status: http.StatusRequestTimeout, Title: "Timeout reading the body", Group: groupRequests, From: API,
		Meaning: "No part of the body arrived for 60 s.",
	})
	URITooLong = define(Definition{
		Name: "uri_too_long", Status: http.StatusRequestURITooLong, Title: "URI too long", Group: groupRequests, From: API,
		Meaning: "Path and query have at most 16,384 bytes. (For a header larger than its `max_header_size`, Caddy responds with a plain 431.)",
	})
	HeaderTooLarge = define(Definition{
		Name: "header_too_large", Status: http.StatusRequestHeaderFieldsTooLarge, Title: "Header too large", Group: groupRequests, From: outbound,
		Meaning: "The header of an outgoing request has at most 64 KiB.",
	})
	Unauthorized = define(Definition{
		Name: "unauthorized", Status: http.StatusUnauthorized, Title: "Valid token required", Group: groupRequests, From: API,
		Meaning: "The token is missing or wrong. Send `Authorization: Bearer TOKEN`.",
	})
	RouteNotFound = define(Definition{
		Name: "route_not_found", Status: http.StatusNotFound, Title: "Route not found", Group: groupRequests, From: API,
		Meaning: "The API has no route with this path. (A missing sandbox is `sandbox_not_found`.)",
	})
	MethodNotAllowed = define(Definition{
		Name: "method_not_allowed", Status: http.StatusMethodNotAllowed, Title: "Method not allowed", Group: groupRequests, From: API | Preview | outbound,
		Meaning: "The route does not support the method; the header `Allow` lists those that it supports. On an intercepted connection, `CONNECT` is not supported.",
	})
	RequestMisdirected = define(Definition{
		Name: "request_misdirected", Status: http.StatusMisdirectedRequest, Title: "Misdirected request", Group: groupRequests, From: API | outbound,
		Meaning: "The request is for another host than its connection. In the API: the connection was made to a preview; connect to the API's own name. In egress: the name that was looked up, the TLS server name and the host of the request must agree.",
	})
	RangeNotSatisfiable = define(Definition{
		Name: "range_not_satisfiable", Status: http.StatusRequestedRangeNotSatisfiable, Title: "Range not satisfiable", Group: groupRequests, From: API,
		Meaning: "The range is outside of the file. The header `Content-Range` has the size of the file.",
	})
	UpgradeRequired = define(Definition{
		Name: "upgrade_required", Status: http.StatusUpgradeRequired, Title: "WebSocket required", Group: groupRequests, From: API,
		Meaning: "The route is a WebSocket. Connect with a WebSocket client over HTTP/1.1.",
	})
	ClientDisconnected = define(Definition{
		Name: "client_disconnected", Status: statusClientClosedRequest, Title: "Client disconnected", Group: groupRequests, From: API | outbound,
		Meaning: "The client closed the connection before the response. Clients never receive this code; logs have it.",
	})
)

// Sandboxes.
var (
	SandboxNotFound = define(Definition{
		Name: "sandbox_not_found", Status: http.StatusNotFound, Title: "Sandbox not found", Group: groupSandboxes, From: API,
		Meaning: "You have no sandbox with this id or name. `GET /sandbox` lists yours.",
	})
	SandboxDestroyed = define(Definition{
		Name: "sandbox_destroyed", Status: http.StatusGone, Title: "Sandbox destroyed", Group: groupSandboxes, From: API,
		Meaning: "The sandbox was destroyed during the request.",
	})
	SandboxConflict = define(Definition{
		Name: "sandbox_conflict", Status: http.StatusConflict, Title: "Sandbox exists and differs", Group: groupSandboxes, From: API,
		Meaning: "Another sandbox has the name, or the sandbox of this name has another image or size. Use another name, or destroy the other sandbox first.",
	})
	SandboxBusy = define(Definition{
		Name: "sandbox_busy", Status: http.StatusConflict, RetryAfter: 1, Title: "Sandbox in use", Group: groupSandboxes, From: API,
		Meaning: "Requests, commands or transfers keep the sandbox from sleeping or stopping. Try again when they have ended, or use `force=true`.",
	})
	SandboxTimeout = define(Definition{
		Name: "sandbox_timeout", Status: http.StatusGatewayTimeout, Title: "Sandbox timed out", Group: groupSandboxes, From: API,
		Meaning: "The sandbox did not respond in time. Try again; if that fails, stop the sandbox and try again.",
	})
	SandboxLimitExceeded = define(Definition{
		Name: "sandbox_limit_exceeded", Status: http.StatusServiceUnavailable, RetryAfter: 60, Title: "Too many sandboxes", Group: groupSandboxes, From: API,
		Meaning: "The node has as many sandboxes as its `max_sandboxes` allows. Destroy one first.",
	})
	WaiterLimitExceeded = define(Definition{
		Name: "waiter_limit_exceeded", Status: http.StatusServiceUnavailable, RetryAfter: 1, Title: "Too many requests waiting for a wake", Group: groupSandboxes, From: API | Preview,
		Meaning: "More requests wait for sandboxes to wake than the node's `max_waiters` and `max_waiters_per_sandbox` allow.",
	})
	WakeFailed = define(Definition{
		Name: "wake_failed", Status: http.StatusBadGateway, Title: "Failed to wake the sandbox", Group: groupSandboxes, From: API | Preview,
		Meaning: "The sandbox did not start, or its container ended while it started. The sandbox's events have the cause. In previews, `container_output` is the last line that the container wrote, except on public ports.",
	})
	SleepFailed = define(Definition{
		Name: "sleep_failed", Status: http.StatusBadGateway, Title: "Failed to put the sandbox to sleep", Group: groupSandboxes, From: API,
		Meaning: "The processes of the sandbox could not be frozen, such as when one waits for a disk that does not respond. The sandbox is still running. Try again, or stop it.",
	})
	ImageNotAllowed = define(Definition{
		Name: "image_not_allowed", Status: http.StatusUnprocessableEntity, Title: "Image not allowed", Group: groupSandboxes, From: API,
		Meaning: "The node's configuration does not allow the image. `GET /node` lists the images that it allows.",
	})
	ImageUnavailable = define(Definition{
		Name: "image_unavailable", Status: http.StatusUnprocessableEntity, Title: "Image not available", Group: groupSandboxes, From: API,
		Meaning: "The image is not on the node and could not be pulled. `detail` has the error of the image registry.",
	})
	QuarantineNotFound = define(Definition{
		Name: "quarantine_not_found", Status: http.StatusNotFound, Title: "Not in quarantine", Group: groupSandboxes, From: API,
		Meaning: "No container with this id is in quarantine. `GET /node` lists those that are.",
	})
	PortNotExposed = define(Definition{
		Name: "port_not_exposed", Status: http.StatusNotFound, Title: "Port not exposed", Group: groupSandboxes, From: API,
		Meaning: "The sandbox does not expose this port. `GET /sandbox/{id}/ports` lists those that it exposes.",
	})
	PortNotReady = define(Definition{
		Name: "port_not_ready", Status: http.StatusGatewayTimeout, RetryAfter: 2, Title: "Port not ready", Group: groupSandboxes, From: API | Preview,
		Meaning: "No process listened on the port in time: within `wait_timeout` of the request in the API, or of the node's configuration in previews. In the API the port is exposed nevertheless; if the declared process has crashed, `detail` has its exit code and last lines.",
	})
)

// Inside a sandbox.
var (
	CommandNotFound = define(Definition{
		Name: "command_not_found", Status: http.StatusUnprocessableEntity, Title: "Command not found", Group: groupCommands, From: API,
		Meaning: "The sandbox has no program with the name in `argv[0]`.",
	})
	CommandNotExecutable = define(Definition{
		Name: "command_not_executable", Status: http.StatusUnprocessableEntity, Title: "Command not executable", Group: groupCommands, From: API,
		Meaning: "The file in `argv[0]` cannot be executed: it lacks the permission, is a directory, or needs a binary format or interpreter that the sandbox does not have.",
	})
	ShellNotFound = define(Definition{
		Name: "shell_not_found", Status: http.StatusUnprocessableEntity, Title: "Shell not found", Group: groupCommands, From: API,
		Meaning: "`command` needs `/bin/sh`, which the image does not have. Use `argv`.",
	})
	PathNotFound = define(Definition{
		Name: "path_not_found", Status: http.StatusNotFound, Title: "Path not found", Group: groupCommands, From: API,
		Meaning: "The sandbox has no file or directory with this path.",
	})
	PathExists = define(Definition{
		Name: "path_exists", Status: http.StatusConflict, Title: "Path exists", Group: groupCommands, From: API,
		Meaning: "A directory with this path exists and cannot be replaced.",
	})
	PathNotDirectory = define(Definition{
		Name: "path_not_directory", Status: http.StatusConflict, Title: "Not a directory", Group: groupCommands, From: API,
		Meaning: "The path, or a part of it, is not a directory.",
	})
	PathIsDirectory = define(Definition{
		Name: "path_is_directory", Status: http.StatusConflict, Title: "Is a directory", Group: groupCommands, From: API,
		Meaning: "The path is a directory; a file is expected.",
	})
	DirectoryNotEmpty = define(Definition{
		Name: "directory_not_empty", Status: http.StatusConflict, Title: "Directory not empty", Group: groupCommands, From: API,
		Meaning: "The directory has entries. Use `recursive=true` to delete them too.",
	})
	PathNotPermitted = define(Definition{
		Name: "path_not_permitted", Status: http.StatusForbidden, Title: "Path not permitted", Group: groupCommands, From: API,
		Meaning: "The path is read-only or protected.",
	})
	SandboxDiskFull = define(Definition{
		Name: "sandbox_disk_full", Status: http.StatusInsufficientStorage, Title: "Sandbox disk full", Group: groupCommands, From: API,
		Meaning: "The sandbox has no disk space left. A file that was to be replaced is unchanged.",
	})
	RequestTooLarge = define(Definition{
		Name: "request_too_large", Status: http.StatusRequestEntityTooLarge, Title: "Request too large for the sandbox", Group: groupCommands, From: API,
		Meaning: "The request exceeds a limit of the sandbox, such as 4 MiB for a command with its environment.",
	})
	ArchiveUnsafe = define(Definition{
		Name: "archive_unsafe", Status: http.StatusUnprocessableEntity, Title: "Unsafe archive", Group: groupCommands, From: API,
		Meaning: "An entry of the archive has `..`, an absolute path, or a link that leads out of the directory. Earlier entries are unpacked.",
	})
	ProcessNotFound = define(Definition{
		Name: "process_not_found", Status: http.StatusNotFound, Title: "Process not found", Group: groupCommands, From: API,
		Meaning: "The sandbox has no process with this id or name, or the process has ended and cannot be signaled.",
	})
	ProcessExists = define(Definition{
		Name: "process_exists", Status: http.StatusConflict, Title: "Process exists", Group: groupCommands, From: API,
		Meaning: "A process with this name is running. Use another name, or end that process first.",
	})
	ProcessLimitExceeded = define(Definition{
		Name: "process_limit_exceeded", Status: http.StatusConflict, Title: "Too many processes", Group: groupCommands, From: API,
		Meaning: "The sandbox runs 256 background processes, or as many processes as its size allows.",
	})
	GuestLost = define(Definition{
		Name: "guest_lost", Status: http.StatusBadGateway, Title: "Sandbox stopped during the request", Group: groupCommands, From: API,
		Meaning: "The sandbox ended or stopped before the request was complete. The result of a command is unknown. The sandbox's events have the cause.",
	})
	GuestError = define(Definition{
		Name: "guest_error", Status: http.StatusBadGateway, Title: "Sandbox failed", Group: groupCommands, From: API,
		Meaning: "The sandbox sent an invalid response. The node's log has the cause.",
	})
)

// The node.
var (
	NodeUnavailable = define(Definition{
		Name: "node_unavailable", Status: http.StatusServiceUnavailable, RetryAfter: 5, Title: "Node starting or shutting down", Group: groupNode, From: API | Preview | outbound,
		Meaning: "Try again when the node is up.",
	})
	EngineUnavailable = define(Definition{
		Name: "engine_unavailable", Status: http.StatusServiceUnavailable, RetryAfter: 5, Title: "Container engine not available", Group: groupNode, From: API | Preview,
		Meaning: "Podman does not respond. `doze doctor` on the node finds the cause.",
	})
	DescriptorsExhausted = define(Definition{
		Name: "descriptors_exhausted", Status: http.StatusServiceUnavailable, RetryAfter: 5, Title: "File descriptors exhausted", Group: groupNode, From: API,
		Meaning: "The node or its host has no file descriptors left. `detail` names the limit to raise.",
	})
	NodeDiskFull = define(Definition{
		Name: "node_disk_full", Status: http.StatusInsufficientStorage, Title: "Node disk full", Group: groupNode, From: API,
		Meaning: "The node has no disk space left for its data. Nothing has changed.",
	})
	StreamLimitExceeded = define(Definition{
		Name: "stream_limit_exceeded", Status: http.StatusServiceUnavailable, RetryAfter: 5, Title: "Too many streams", Group: groupNode, From: API,
		Meaning: "1,024 streams are open on the node.",
	})
	CallLimitExceeded = define(Definition{
		Name: "call_limit_exceeded", Status: http.StatusServiceUnavailable, RetryAfter: 1, Title: "Too many calls", Group: groupNode, From: API,
		Meaning: "512 commands and transfers are in progress on the node. A command counts once for each MiB of `max_output_bytes`, a pushed policy 16 times.",
	})
	InternalError = define(Definition{
		Name: "internal_error", Status: http.StatusInternalServerError, Title: "Internal error", Group: groupNode, From: API,
		Meaning: "The node failed. Its log has the cause, with the `request_id`.",
	})
)

// Rules, secrets and policies.
var (
	RulesInvalid = define(Definition{
		Name: "rules_invalid", Status: http.StatusUnprocessableEntity, Title: "Invalid rules", Group: groupEgressConfig, From: API,
		Meaning: "`errors` lists up to 20 errors with their locations. Nothing has changed.",
	})
	RevisionConflict = define(Definition{
		Name: "revision_conflict", Status: http.StatusPreconditionFailed, Title: "Rules changed", Group: groupEgressConfig, From: API,
		Meaning: "The rules do not have the revision in `If-Match`. Get them, make the change again, and send their new ETag.",
	})
	SecretNotFound = define(Definition{
		Name: "secret_not_found", Status: http.StatusNotFound, Title: "Secret not found", Group: groupEgressConfig, From: API,
		Meaning: "You have no secret with this name. `GET /secrets` lists yours.",
	})
	SecretLimitExceeded = define(Definition{
		Name: "secret_limit_exceeded", Status: http.StatusConflict, Title: "Too many secrets", Group: groupEgressConfig, From: API,
		Meaning: "You have 1,000 secrets, or 100 secrets or 256 KiB for one host; `detail` names the limit. Delete one first.",
	})
	PolicyNotFound = define(Definition{
		Name: "policy_not_found", Status: http.StatusNotFound, Title: "Policy not found", Group: groupEgressConfig, From: API,
		Meaning: "You have no policy with this name. `GET /policies` lists yours and the built-in ones.",
	})
	PolicyInvalid = define(Definition{
		Name: "policy_invalid", Status: http.StatusUnprocessableEntity, Title: "Invalid policy", Group: groupEgressConfig, From: API,
		Meaning: "The body is not a WebAssembly module, or the module lacks something that a policy needs; `detail` names it.",
	})
	PolicyInUse = define(Definition{
		Name: "policy_in_use", Status: http.StatusConflict, Title: "Policy in use", Group: groupEgressConfig, From: API,
		Meaning: "Rules use the policy; `detail` lists them. Change them first.",
	})
	PolicyBuiltIn = define(Definition{
		Name: "policy_built_in", Status: http.StatusConflict, Title: "Built-in policy", Group: groupEgressConfig, From: API,
		Meaning: "Built-in policies cannot be deleted; only pushed ones can.",
	})
	PolicyLimitExceeded = define(Definition{
		Name: "policy_limit_exceeded", Status: http.StatusConflict, Title: "Too many policies", Group: groupEgressConfig, From: API,
		Meaning: "You have 100 policies, or policies of 256 MiB in total. Delete one first.",
	})
	PushLimitExceeded = define(Definition{
		Name: "push_limit_exceeded", Status: http.StatusTooManyRequests, RetryAfter: 5, Title: "Too many concurrent pushes", Group: groupEgressConfig, From: API,
		Meaning: "Two of your policies, or eight of all owners, are being pushed.",
	})
)

// Previews.
var (
	PreviewNotFound = define(Definition{
		Name: "preview_not_found", Status: http.StatusNotFound, Title: "Preview not found", Group: groupPreviews, From: Preview,
		Meaning: "The address is mistyped, the port is no longer exposed, or the sandbox was destroyed.",
	})
	SandboxNotRunning = define(Definition{
		Name: "sandbox_not_running", Status: http.StatusGone, Title: "Sandbox not running", Group: groupPreviews, From: Preview,
		Meaning: "The port has wake mode `never`, so requests do not wake the sandbox. Wake it with the API, or expose the port with another wake mode.",
	})
	SandboxStopped = define(Definition{
		Name: "sandbox_stopped", Status: http.StatusServiceUnavailable, RetryAfter: 30, Title: "Sandbox stopped", Group: groupPreviews, From: Preview,
		Meaning: "The sandbox is stopped, and background requests of a page, prefetches, HEAD requests and crawlers do not start it. Open or reload the page, or expose the port with wake mode `any`.",
	})
	SandboxAsleep = define(Definition{
		Name: "sandbox_asleep", Status: http.StatusServiceUnavailable, RetryAfter: 30, Title: "Sandbox asleep", Group: groupPreviews, From: Preview,
		Meaning: "The sandbox is asleep, and prefetches do not wake it.",
	})
	WakeTimeout = define(Definition{
		Name: "wake_timeout", Status: http.StatusGatewayTimeout, RetryAfter: 2, Title: "Sandbox still waking", Group: groupPreviews, From: Preview,
		Meaning: "The sandbox did not wake within `wait_timeout`. The wake continues; try again.",
	})
	PortNotListening = define(Definition{
		Name: "port_not_listening", Status: http.StatusBadGateway, Title: "Port not listening", Group: groupPreviews, From: Preview,
		Meaning: "The sandbox is running, but no process in it listens on the port.",
	})
	ProcessExited = define(Definition{
		Name: "process_exited", Status: http.StatusBadGateway, Title: "Process exited", Group: groupPreviews, From: Preview,
		Meaning: "No process listens on the port: every declared process has ended with an error since the sandbox started, and no other process runs. `process` describes the last one, with up to 20 lines or 4 KiB of its output except on public ports.",
	})
	ServerDisconnected = define(Definition{
		Name: "server_disconnected", Status: http.StatusBadGateway, Title: "Server disconnected", Group: groupPreviews, From: Preview,
		Meaning: "The server in the sandbox closed the connection before its response was complete.",
	})
	ServerResponseInvalid = define(Definition{
		Name: "server_response_invalid", Status: http.StatusBadGateway, Title: "Invalid response from the server", Group: groupPreviews, From: Preview,
		Meaning: "The server in the sandbox sent a status below 100, or switched to a protocol that the request did not ask for.",
	})
	ServerProtocolMismatch = define(Definition{
		Name: "server_protocol_mismatch", Status: http.StatusBadGateway, Title: "Server requires HTTP/2", Group: groupPreviews, From: Preview,
		Meaning: "The server in the sandbox supports HTTP/2 only, and the port has protocol `http1`, or the request could not be sent again. Expose the port with protocol `h2c`; with `auto`, try again.",
	})
	RequestLimitExceeded = define(Definition{
		Name: "request_limit_exceeded", Status: http.StatusServiceUnavailable, RetryAfter: 1, Title: "Too many requests in progress", Group: groupPreviews, From: Preview,
		Meaning: "More requests are in progress than `max_requests` and `max_requests_per_sandbox` allow.",
	})
)

// Egress.
var (
	EgressDenied = define(Definition{
		Name: "egress_denied", Status: http.StatusForbidden, Title: "Denied by egress rules", Group: groupEgress, From: outbound,
		Meaning: "A rule denies the request, or no rule allows it. `rule` names the rule.",
	})
	PolicyDenied = define(Definition{
		Name: "policy_denied", Status: http.StatusForbidden, Title: "Denied by a policy", Group: groupEgress, From: outbound,
		Meaning: "A policy denied the request. `detail` has the policy's reason.",
	})
	PolicyFailed = define(Definition{
		Name: "policy_failed", Status: http.StatusForbidden, Title: "Policy failed", Group: groupEgress, From: outbound,
		Meaning: "A policy crashed, exceeded a limit or cannot run, so the request is denied. `detail` has the cause.",
	})
	PolicyBodyTooLarge = define(Definition{
		Name: "policy_body_too_large", Status: http.StatusRequestEntityTooLarge, Title: "Body too large for a policy", Group: groupEgress, From: outbound,
		Meaning: "A policy reads or writes the whole body of the request, which is larger than policies may hold in memory.",
	})
	PolicyResponseTooLarge = define(Definition{
		Name: "policy_response_too_large", Status: http.StatusBadGateway, Title: "Response too large for a policy", Group: groupEgress, From: outbound,
		Meaning: "A policy reads or writes the whole body of the response, which is larger than policies may hold in memory.",
	})
	PolicyUnavailable = define(Definition{
		Name: "policy_unavailable", Status: http.StatusServiceUnavailable, RetryAfter: 1, Title: "Policy not available", Group: groupEgress, From: outbound,
		Meaning: "All instances of a policy are in use, the policy fails to start, or it was removed.",
	})
	SecretNotAllowed = define(Definition{
		Name: "secret_not_allowed", Status: http.StatusForbidden, Title: "Secret not allowed", Group: groupEgress, From: outbound,
		Meaning: "The request would send a secret to a host that the secret is not for, or without TLS.",
	})
	PlaceholderNotAllowed = define(Definition{
		Name: "placeholder_not_allowed", Status: http.StatusForbidden, Title: "Placeholder not allowed", Group: groupEgress, From: outbound,
		Meaning: "The request has the placeholder of a secret, and no rule allows exchanging it for this host.",
	})
	TargetInvalid = define(Definition{
		Name: "target_invalid", Status: http.StatusBadRequest, Title: "Invalid request target", Group: groupEgress, From: outbound,
		Meaning: "On an intercepted connection, the request target must be a path. To the proxy, send `CONNECT host:port` or an absolute URI; over HTTP/2 only `CONNECT`.",
	})
	UpgradeNotAllowed = define(Definition{
		Name: "upgrade_not_allowed", Status: http.StatusForbidden, Title: "Upgrade not allowed", Group: groupEgress, From: outbound,
		Meaning: "On an intercepted connection, requests can upgrade to WebSocket only.",
	})
	UpgradeFailed = define(Definition{
		Name: "upgrade_failed", Status: http.StatusBadGateway, Title: "Upgrade failed", Group: groupEgress, From: outbound,
		Meaning: "The connection cannot become a WebSocket.",
	})
	RequestAmbiguous = define(Definition{
		Name: "request_ambiguous", Status: http.StatusBadRequest, Title: "Ambiguous request", Group: groupEgress, From: outbound,
		Meaning: "The length of the request is ambiguous: it has both `Transfer-Encoding` and `Content-Length`, or `Transfer-Encoding` in HTTP/1.0. The connection is closed.",
	})
	RequestMalformed = define(Definition{
		Name: "request_malformed", Status: http.StatusBadRequest, Title: "Malformed request", Group: groupEgress, From: outbound,
		Meaning: "The request is not valid HTTP/1.1. The connection is closed.",
	})
	ExpectationUnsupported = define(Definition{
		Name: "expectation_unsupported", Status: http.StatusExpectationFailed, Title: "Unsupported expectation", Group: groupEgress, From: outbound,
		Meaning: "The header `Expect` has a value other than `100-continue`. The connection is closed.",
	})
	TransferEncodingUnsupported = define(Definition{
		Name: "transfer_encoding_unsupported", Status: http.StatusNotImplemented, Title: "Unsupported transfer encoding", Group: groupEgress, From: outbound,
		Meaning: "The header `Transfer-Encoding` has a value other than `chunked`. The connection is closed.",
	})
	HTTPVersionUnsupported = define(Definition{
		Name: "http_version_unsupported", Status: http.StatusHTTPVersionNotSupported, Title: "Unsupported HTTP version", Group: groupEgress, From: outbound,
		Meaning: "The request has an HTTP version other than 1.0 and 1.1. The connection is closed.",
	})
	EgressLimitExceeded = define(Definition{
		Name: "egress_limit_exceeded", Status: http.StatusServiceUnavailable, RetryAfter: 1, Title: "Too many connections or requests", Group: groupEgress, From: outbound,
		Meaning: "The sandbox, the owner or the node has as many connections, or requests in progress, as it may. `detail` names the limit.",
	})
	UpstreamUnreachable = define(Definition{
		Name: "upstream_unreachable", Status: http.StatusBadGateway, Title: "Upstream unreachable", Group: groupEgress, From: outbound,
		Meaning: "The name cannot be resolved, or the connection to the host failed.",
	})
	UpstreamTimeout = define(Definition{
		Name: "upstream_timeout", Status: http.StatusGatewayTimeout, Title: "Upstream timed out", Group: groupEgress, From: outbound,
		Meaning: "The host did not respond in time.",
	})
	UpstreamCertificateInvalid = define(Definition{
		Name: "upstream_certificate_invalid", Status: http.StatusBadGateway, Title: "Invalid upstream certificate", Group: groupEgress, From: outbound,
		Meaning: "The host's certificate cannot be verified. The operator adds authorities with the option `upstream_ca`.",
	})
	UpstreamTLSFailed = define(Definition{
		Name: "upstream_tls_failed", Status: http.StatusBadGateway, Title: "Upstream TLS handshake failed", Group: groupEgress, From: outbound,
		Meaning: "The TLS handshake with the host failed. `detail` has its alert.",
	})
	UpstreamDisconnected = define(Definition{
		Name: "upstream_disconnected", Status: http.StatusBadGateway, Title: "Upstream disconnected", Group: groupEgress, From: outbound,
		Meaning: "The host closed the connection before its response was complete.",
	})
	UpstreamResponseInvalid = define(Definition{
		Name: "upstream_response_invalid", Status: http.StatusBadGateway, Title: "Invalid upstream response", Group: groupEgress, From: outbound,
		Meaning: "The host's response is not valid HTTP.",
	})
	UpstreamResponseUnreadable = define(Definition{
		Name: "upstream_response_unreadable", Status: http.StatusBadGateway, Title: "Unreadable upstream response", Group: groupEgress, From: outbound,
		Meaning: "The host's response cannot be searched for secrets, such as because of its content coding. `detail` has the cause.",
	})
)

// The proxy.
var (
	ProxyAuthenticationRequired = define(Definition{
		Name: "proxy_authentication_required", Status: http.StatusProxyAuthRequired, Title: "Proxy authentication required", Group: groupProxy, From: Proxy,
		Meaning: "The API key is missing or wrong. Use it as the password in the proxy's URL.",
	})
	ProxyTLSRequired = define(Definition{
		Name: "proxy_tls_required", Status: http.StatusForbidden, Title: "TLS to the proxy required", Group: groupProxy, From: Proxy,
		Meaning: "From other machines, the proxy accepts API keys over TLS only. Use `https://` in the proxy's URL.",
	})
)
