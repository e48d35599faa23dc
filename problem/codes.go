package problem

import (
	"net/http"
	"slices"
)

// Definition describes a code. All responses with the code have its status and title.
type Definition struct {
	Name   string // such as "sandbox_not_found"
	Status int
	// RetryAfter is the default value of the header Retry-After in seconds; 0: none.
	RetryAfter int
	Title      string // such as "Sandbox not found"
	Meaning    string // cause and remedy, in Markdown
	From       Source
}

// Code returns the defined code.
func (d Definition) Code() Code { return Code{d.Name} }

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

// retryAfter is the default of the header Retry-After, in seconds.
type retryAfter int

// define registers a code.
func define(from Source, name string, status int, title, meaning string, retry ...retryAfter) Code {
	if _, twice := registry[name]; twice {
		panic("problem: code " + name + " is defined twice")
	}
	d := Definition{Name: name, Status: status, Title: title, Meaning: meaning, From: from}
	if len(retry) > 0 {
		d.RetryAfter = int(retry[0])
	}
	registry[name] = d
	ordered = append(ordered, d)
	return Code{name}
}

// All returns the definitions of all codes, in the order of docs/reference/errors.md.
func All() []Definition { return slices.Clone(ordered) }

// Requests.
var (
	RequestInvalid = define(API, "request_invalid", http.StatusUnprocessableEntity, "Invalid request",
		"A field, parameter or header is invalid or unknown. `errors` lists up to 20 errors with their locations.")
	JSONInvalid = define(API, "json_invalid", http.StatusBadRequest, "Invalid JSON",
		"The body is empty, not valid JSON, or not UTF-8.")
	NameInvalid = define(API, "name_invalid", http.StatusUnprocessableEntity, "Invalid name",
		"A sandbox name has 1 to 63 of `a-z`, `0-9` and hyphens. The name of a secret or policy has 1 to 64 of `a-z`, `0-9`, `-` and `_`. A process name must not look like a process id.")
	MediaTypeUnsupported = define(API, "media_type_unsupported", http.StatusUnsupportedMediaType, "Unsupported media type",
		"The route does not accept the request's Content-Type. Routes with a JSON body accept `application/json`, or no Content-Type.")
	BodyTooLarge = define(API|Preview, "body_too_large", http.StatusRequestEntityTooLarge, "Body too large",
		"In the API, a JSON body has at most 1 MiB, the JSON form of a file 4 MiB, and a policy 16 MiB; other bodies have no limit. For previews, the operator sets the limit with Caddy's `request_body`.")
	BodyIncomplete = define(API|outbound, "body_incomplete", http.StatusBadRequest, "Incomplete body",
		"The body ended early or is not valid HTTP. Nothing has changed, except that entries of an archive that arrived whole stay. Send the request again.")
	BodyTimeout = define(API, "body_timeout", http.StatusRequestTimeout, "Timeout reading the body",
		"No part of the body arrived for 60 s.")
	URITooLong = define(API, "uri_too_long", http.StatusRequestURITooLong, "URI too long",
		"Path and query have at most 16,384 bytes. (For a header larger than its `max_header_size`, Caddy responds with a plain 431.)")
	HeaderTooLarge = define(outbound, "header_too_large", http.StatusRequestHeaderFieldsTooLarge, "Header too large",
		"The header of an outgoing request has at most 64 KiB.")
	Unauthorized = define(API, "unauthorized", http.StatusUnauthorized, "Valid token required",
		"The token is missing or wrong. Send `Authorization: Bearer TOKEN`.")
	SignatureInvalid = define(API, "signature_invalid", http.StatusForbidden, "Invalid signature",
		"The URL was not signed for this request, was changed, or was signed before the node's token changed. Use the URL and the method exactly as the API returned them.")
	SignatureExpired = define(API, "signature_expired", http.StatusForbidden, "Signed URL expired",
		"The signed URL has expired. Get a new one with `POST /sandbox/{id}/files/url` or `POST /sandbox/{id}/terminal/url`.")
	OriginNotAllowed = define(API, "origin_not_allowed", http.StatusForbidden, "Origin not allowed",
		"The signed URL of a terminal is not for web pages of this origin. Send `origin` to `POST /sandbox/{id}/terminal/url`.")
	RouteNotFound = define(API, "route_not_found", http.StatusNotFound, "Route not found",
		"The API has no route with this path. (A missing sandbox is `sandbox_not_found`.)")
	MethodNotAllowed = define(API|Preview|outbound, "method_not_allowed", http.StatusMethodNotAllowed, "Method not allowed",
		"The route does not support the method; the header `Allow` lists those that it supports. On an intercepted connection, `CONNECT` is not supported.")
	RequestMisdirected = define(API|outbound, "request_misdirected", http.StatusMisdirectedRequest, "Misdirected request",
		"The request is for another host than its connection. In the API: the connection was made to a preview; connect to the API's own name. In egress: the name that was looked up, the TLS server name and the host of the request must agree.")
	RangeNotSatisfiable = define(API, "range_not_satisfiable", http.StatusRequestedRangeNotSatisfiable, "Range not satisfiable",
		"The range is outside of the file. The header `Content-Range` has the size of the file.")
	UpgradeRequired = define(API, "upgrade_required", http.StatusUpgradeRequired, "WebSocket required",
		"The route is a WebSocket. Connect with a WebSocket client over HTTP/1.1.")
	ClientDisconnected = define(API|outbound, "client_disconnected", statusClientClosedRequest, "Client disconnected",
		"The client closed the connection before the response. Clients never receive this code; logs have it.")
)

// Sandboxes.
var (
	SandboxNotFound = define(API, "sandbox_not_found", http.StatusNotFound, "Sandbox not found",
		"You have no sandbox with this id or name. `GET /sandbox` lists yours.")
	SandboxDestroyed = define(API, "sandbox_destroyed", http.StatusGone, "Sandbox destroyed",
		"The sandbox was destroyed during the request.")
	SandboxConflict = define(API, "sandbox_conflict", http.StatusConflict, "Sandbox exists and differs",
		"Another sandbox has the name, or the sandbox of this name has another image or size. Use another name, or destroy the other sandbox first.")
	SandboxBusy = define(API, "sandbox_busy", http.StatusConflict, "Sandbox in use",
		"Requests, commands or transfers keep the sandbox from sleeping or stopping. Try again when they have ended, or use `force=true`.", retryAfter(1))
	SandboxTimeout = define(API, "sandbox_timeout", http.StatusGatewayTimeout, "Sandbox timed out",
		"The sandbox did not respond in time. Try again; if that fails, stop the sandbox and try again.")
	SandboxLimitExceeded = define(API, "sandbox_limit_exceeded", http.StatusServiceUnavailable, "Too many sandboxes",
		"The node has as many sandboxes as its `max_sandboxes` allows. Destroy one first.", retryAfter(60))
	WaiterLimitExceeded = define(API|Preview, "waiter_limit_exceeded", http.StatusServiceUnavailable, "Too many requests waiting for a wake",
		"More requests wait for sandboxes to wake than the node's `max_waiters` and `max_waiters_per_sandbox` allow.", retryAfter(1))
	WakeFailed = define(API|Preview, "wake_failed", http.StatusBadGateway, "Failed to wake the sandbox",
		"The sandbox did not start, or its container ended while it started. The sandbox's events have the cause. If the disk of an archived sandbox is still being downloaded, try again. In previews, `container_output` is the last line that the container wrote, except on public ports.")
	SleepFailed = define(API, "sleep_failed", http.StatusBadGateway, "Failed to put the sandbox to sleep",
		"The processes of the sandbox could not be frozen, such as when one waits for a disk that does not respond. The sandbox is still running. Try again, or stop it.")
	ImageNotAllowed = define(API, "image_not_allowed", http.StatusUnprocessableEntity, "Image not allowed",
		"The node's configuration does not allow the image. `GET /node` lists the images that it allows.")
	ImageUnavailable = define(API, "image_unavailable", http.StatusUnprocessableEntity, "Image not available",
		"The image is not on the node and could not be pulled. `detail` has the error of the image registry, or the command that builds the image.")
	QuarantineNotFound = define(API, "quarantine_not_found", http.StatusNotFound, "Not in quarantine",
		"No container with this id is in quarantine. `GET /node` lists those that are.")
	PortNotExposed = define(API, "port_not_exposed", http.StatusNotFound, "Port not exposed",
		"The sandbox does not expose this port. `GET /sandbox/{id}/ports` lists those that it exposes.")
	PortNotReady = define(API|Preview, "port_not_ready", http.StatusGatewayTimeout, "Port not ready",
		"No process listened on the port in time: within `wait_timeout` of the request in the API, or of the node's configuration in previews. In the API the port is exposed nevertheless; if the declared process has crashed, `detail` has its exit code and last lines.", retryAfter(2))
)

// Commands, files and processes.
var (
	CommandNotFound = define(API, "command_not_found", http.StatusUnprocessableEntity, "Command not found",
		"The sandbox has no program with the name in `argv[0]`.")
	CommandNotExecutable = define(API, "command_not_executable", http.StatusUnprocessableEntity, "Command not executable",
		"The file in `argv[0]` cannot be executed: it lacks the permission, is a directory, or needs a binary format or interpreter that the sandbox does not have.")
	ShellNotFound = define(API, "shell_not_found", http.StatusUnprocessableEntity, "Shell not found",
		"`command` needs `/bin/sh`, which the image does not have. Use `argv`.")
	PathNotFound = define(API, "path_not_found", http.StatusNotFound, "Path not found",
		"The sandbox has no file or directory with this path.")
	PathExists = define(API, "path_exists", http.StatusConflict, "Path exists",
		"A directory with this path exists and cannot be replaced, or a file with this path exists and the request has `create_new`.")
	FileConflict = define(API, "file_conflict", http.StatusPreconditionFailed, "File changed meanwhile",
		"The file does not have an ETag of `If-Match`, or has one of `If-None-Match`. The header `ETag` has the present one. Read the file, make the change again, and send its new ETag.")
	DigestMismatch = define(API, "digest_mismatch", http.StatusBadRequest, "Digest mismatch",
		"The body does not have the SHA-256 of `Content-Digest` or `Repr-Digest`. The file is unchanged. Send it again.")
	PathNotDirectory = define(API, "path_not_directory", http.StatusConflict, "Not a directory",
		"The path, or a part of it, is not a directory.")
	PathIsDirectory = define(API, "path_is_directory", http.StatusConflict, "Is a directory",
		"The path is a directory; a file is expected.")
	DirectoryNotEmpty = define(API, "directory_not_empty", http.StatusConflict, "Directory not empty",
		"The directory has entries. Use `recursive=true` to delete them too.")
	PathNotPermitted = define(API, "path_not_permitted", http.StatusForbidden, "Path not permitted",
		"The path is read-only or protected.")
	SandboxDiskFull = define(API, "sandbox_disk_full", http.StatusInsufficientStorage, "Sandbox disk full",
		"The sandbox has no disk space left. A file that was to be replaced is unchanged.")
	RequestTooLarge = define(API, "request_too_large", http.StatusRequestEntityTooLarge, "Request too large for the sandbox",
		"The request exceeds a limit of the sandbox, such as 4 MiB for a command with its environment.")
	ArchiveUnsafe = define(API, "archive_unsafe", http.StatusUnprocessableEntity, "Unsafe archive",
		"An entry of the archive has `..`, an absolute path, or a link that leads out of the directory. Earlier entries are unpacked.")
	SnapshotNotFound = define(API, "snapshot_not_found", http.StatusNotFound, "Snapshot not found",
		"No snapshot of the owner has that id or name. `GET /snapshots` lists them.")
	SnapshotExists = define(API, "snapshot_exists", http.StatusConflict, "Snapshot exists",
		"Another snapshot of the owner has that name. Use another name, or delete it first.")
	SnapshotLimitExceeded = define(API, "snapshot_limit_exceeded", http.StatusConflict, "Too many snapshots",
		"The node has 10,000 snapshots. Delete some first; `keep_last` and `max_age` do so by themselves.")
	SnapshotUnsupported = define(API, "snapshot_unsupported", http.StatusUnprocessableEntity, "Snapshot cannot be exported",
		"A container image cannot represent the snapshot: for example, a file's name begins with `.wh.`, or the files exceed 256 GiB, including holes. `detail` has the reason.")
	ExportLimitExceeded = define(API, "export_limit_exceeded", http.StatusTooManyRequests, "Too many concurrent exports",
		"Two of your snapshots, or eight snapshots of all owners, are already being exported.", retryAfter(5))
	BackupNotFound = define(API, "backup_not_found", http.StatusNotFound, "Backup not found",
		"The object store has no backup of the owner with that id. `GET /backups` lists them.")
	BackupInUse = define(API, "backup_in_use", http.StatusConflict, "Backup in use",
		"An archived sandbox has its disk in this backup only. Wake the sandbox, which deletes the backup, or destroy it.")
	BackupLimitExceeded = define(API, "backup_limit_exceeded", http.StatusConflict, "Too many backups",
		"You have 10,000 backups. Delete some first; `keep_last` does so by itself.")
	BackupUnreadable = define(API, "backup_unreadable", http.StatusBadGateway, "Backup unreadable",
		"An object of the backup or of its repository is missing in the object store, or is not what the node stored. Use another backup; `detail` has the cause.")
	BackupUnsupported = define(API, "backup_unsupported", http.StatusUnprocessableEntity, "Disk cannot be backed up",
		"A backup cannot represent the disk: for example, its folders are nested more than 1,000 levels deep. `detail` has the path and the reason.")
	ImageMismatch = define(API, "image_mismatch", http.StatusConflict, "Image of the backup not on the node",
		"The node does not have the image on which the backup is based, or has another one of that name. Build or import that image, or restore the backup with `allow_other_image`: then the files that only the old image has are missing.")
	MountNotFound = define(API, "mount_not_found", http.StatusNotFound, "Mount not found",
		"No bucket is mounted at that path of the sandbox. `GET …/mounts` lists the mounts.")
	MountExists = define(API, "mount_exists", http.StatusConflict, "Path in use by a mount",
		"Another bucket is mounted at that path, above it or below it, or the same bucket with another prefix or access. Unmount it first, or use another path.")
	MountPointInvalid = define(API, "mount_point_invalid", http.StatusUnprocessableEntity, "Invalid mount point",
		"The path is a file, contains a symbolic link, or cannot be created in the sandbox. `detail` has the cause.")
	SessionNotFound = define(API, "session_not_found", http.StatusNotFound, "Session not found",
		"The sandbox has no session with this id.")
	SessionLost = define(API, "session_lost", http.StatusGone, "Session has ended",
		"The shell of the session has ended, or the sandbox has stopped and its sessions with it: the detail has the reason. Open the session again.")
	SessionBusy = define(API, "session_busy", http.StatusConflict, "Session busy",
		"The command did not run: the session ran others until its `timeout`, or 32 commands are waiting. Wait, interrupt the session, or use another one.")
	SessionExists = define(API, "session_exists", http.StatusConflict, "Session exists",
		"A session with this id is open. Use it, use another id, or close it first.")
	SessionLimitExceeded = define(API, "session_limit_exceeded", http.StatusConflict, "Too many sessions",
		"The sandbox has 128 sessions. Close one.")
	ContextNotFound = define(API, "context_not_found", http.StatusNotFound, "Context not found",
		"The sandbox has no context with this id.")
	ContextLost = define(API, "context_lost", http.StatusGone, "Context has ended",
		"The interpreter of the context has ended, or the sandbox has stopped and its contexts with it: the detail has the reason. Restart the context, without its state.")
	ContextBusy = define(API, "context_busy", http.StatusConflict, "Context busy",
		"The code was not executed: the context executed other code until its `timeout`. Wait, interrupt the context, or use another one.")
	ContextExists = define(API, "context_exists", http.StatusConflict, "Context exists",
		"A context with this id exists. Use it, use another id, or close it first.")
	ContextLimitExceeded = define(API, "context_limit_exceeded", http.StatusConflict, "Too many contexts",
		"The sandbox has 16 contexts. Close one.")
	InterpreterNotInstalled = define(API, "interpreter_not_installed", http.StatusNotImplemented, "Interpreter not installed",
		"The image of the sandbox does not have the interpreter of the language. The detail has the image to use, and what to install.")
	InterpreterFailed = define(API, "interpreter_failed", http.StatusBadGateway, "Interpreter failed",
		"The interpreter ended before it could execute code. The detail has the end of its output.")
	ProcessNotFound = define(API, "process_not_found", http.StatusNotFound, "Process not found",
		"The sandbox has no process with this id or name, or the process has ended and cannot be signaled.")
	ProcessExists = define(API, "process_exists", http.StatusConflict, "Process exists",
		"A process with this name is running. Use another name, or end that process first.")
	ProcessLimitExceeded = define(API, "process_limit_exceeded", http.StatusConflict, "Too many processes",
		"The sandbox runs 256 background processes, or as many processes as its size allows.")
	TerminalNotFound = define(API, "terminal_not_found", http.StatusNotFound, "Terminal not found",
		"The sandbox has no terminal with this id.")
	TerminalLost = define(API, "terminal_lost", http.StatusGone, "Terminal ended with its sandbox",
		"The sandbox has stopped, for the reason in the detail, and its terminals with it. Connect without `since` to open a new one.")
	TerminalLimitExceeded = define(API, "terminal_limit_exceeded", http.StatusConflict, "Too many terminals",
		"The sandbox has 128 terminals, or the terminal has 32 clients.")
	WatchLimitExceeded = define(API, "watch_limit_exceeded", http.StatusConflict, "Too many watches",
		"The sandbox has 16 watches, or they have 32,768 directories or as many as its size allows. Close one, exclude directories, or watch without `recursive`.")
	ProcessNotReady = define(API, "process_not_ready", http.StatusGatewayTimeout, "Process not ready",
		"The condition did not hold within `timeout`. The process runs on. `detail` has what the last check found, and `process` up to 20 lines or 4 KiB of its output.")
	GuestLost = define(API, "guest_lost", http.StatusBadGateway, "Sandbox stopped during the request",
		"The sandbox ended or stopped before the request was complete. The result of a command is unknown. The sandbox's events have the cause.")
	GuestError = define(API, "guest_error", http.StatusBadGateway, "Sandbox failed",
		"The sandbox sent an invalid response. The node's log has the cause.")
)

// Git.
var (
	GitNotInstalled = define(API, "git_not_installed", http.StatusNotImplemented, "Git not installed",
		"The sandbox has no program `git` in its PATH. Install the package `git` of its distribution, or use the image `base`, which has it.")
	GitAuthenticationFailed = define(API, "git_authentication_failed", http.StatusForbidden, "Git authentication failed",
		"The server wants credentials, or refuses those that a policy added. Many servers respond like this for repositories that do not exist, too. Store the credential as a secret, and add it to requests by a rule with the policy `basic`.")
	GitRepositoryNotFound = define(API, "git_repository_not_found", http.StatusNotFound, "Repository not found",
		"The address or the remote does not lead to a repository, or to one that the credentials may not read.")
	GitRefNotFound = define(API, "git_ref_not_found", http.StatusNotFound, "Branch, tag or commit not found",
		"The repository does not have the branch, tag or commit.")
	GitNetworkFailed = define(API, "git_network_failed", http.StatusBadGateway, "Transfer from or to the git server failed",
		"The server cannot be reached, failed, or closed the connection. Try again; `GET /sandbox/{id}/egress/flows` has the connections.")
	GitTimeout = define(API, "git_timeout", http.StatusGatewayTimeout, "Git timed out",
		"Git was killed because it did not end within `timeout`. Use a longer one, or a smaller `depth`.")
	GitConflict = define(API, "git_conflict", http.StatusConflict, "Conflict in the repository",
		"Local changes, unmerged files, an existing branch or diverged histories prevent the operation; `detail` names them. Nothing was merged. If a push is refused because the remote branch has other commits, pull first, or use `force`.")
	GitPushDenied = define(API, "git_push_denied", http.StatusForbidden, "Push denied by the server",
		"The server refused to update the branch, such as because it is protected. `detail` has the server's message.")
	GitChangesRequired = define(API, "git_changes_required", http.StatusConflict, "Nothing to commit",
		"No change is staged. Use `all` or `files`, or `allow_empty`.")
	GitAuthorRequired = define(API, "git_author_required", http.StatusUnprocessableEntity, "Author missing",
		"Git's configuration in the sandbox has no name and email address. Send `author`.")
	GitBusy = define(API, "git_busy", http.StatusConflict, "Repository locked",
		"Another git process changes the repository, or one was killed and left a lock file, which `detail` names.", retryAfter(1))
	GitFailed = define(API, "git_failed", http.StatusUnprocessableEntity, "Git failed",
		"Git ended with an error that has no code of its own. `detail` has its message.")
	GitPathInvalid = define(API, "git_path_invalid", http.StatusConflict, "Not a working tree",
		"The path is not inside of a git working tree.")
)

// The node.
var (
	NodeUnavailable = define(API|Preview|outbound, "node_unavailable", http.StatusServiceUnavailable, "Node starting or shutting down",
		"Try again when the node is up.", retryAfter(5))
	EngineUnavailable = define(API|Preview, "engine_unavailable", http.StatusServiceUnavailable, "Container engine not available",
		"Podman does not respond. `doze doctor` on the node finds the cause.", retryAfter(5))
	DescriptorsExhausted = define(API, "descriptors_exhausted", http.StatusServiceUnavailable, "File descriptors exhausted",
		"The node or its host has no file descriptors left. `detail` names the limit to raise.", retryAfter(5))
	NodeDiskFull = define(API, "node_disk_full", http.StatusInsufficientStorage, "Node disk full",
		"The node has less free disk space than its reserve, or none left for its data. Nothing has changed.")
	FUSERequired = define(API, "fuse_required", http.StatusNotImplemented, "FUSE not available",
		"The node cannot open /dev/fuse, which mounts of buckets require. `doze doctor` on the node has the remedy.")
	ObjectStoreRequired = define(API, "object_store_required", http.StatusNotImplemented, "No object store",
		"The node has no object store for backups. The operator configures one with `backups` in the Caddyfile.")
	ObjectStoreFailed = define(API, "object_store_failed", http.StatusBadGateway, "Object store failed",
		"The object store cannot be reached, refuses the node's credentials, does not have the bucket, or has a repository with another password. `detail` names which of these, and the option of `backups` or `bucket` in the Caddyfile to check. Nothing has changed.")
	StreamLimitExceeded = define(API, "stream_limit_exceeded", http.StatusServiceUnavailable, "Too many streams",
		"1,024 streams are open on the node.", retryAfter(5))
	CallLimitExceeded = define(API, "call_limit_exceeded", http.StatusServiceUnavailable, "Too many calls",
		"512 commands and transfers are in progress on the node. A command counts once for each MiB of `max_output_bytes`, a listing of files once for each 4,096 entries or part of them, a request with a body of more than 64 KiB one additional time, the logs of a process 4 times, and a pushed policy 16 times.", retryAfter(1))
	InternalError = define(API, "internal_error", http.StatusInternalServerError, "Internal error",
		"The node failed. Its log has the cause, with the `request_id`.")
)

// Rules, secrets and policies.
var (
	RulesInvalid = define(API, "rules_invalid", http.StatusUnprocessableEntity, "Invalid rules",
		"`errors` lists up to 20 errors with their locations. Nothing has changed.")
	RevisionConflict = define(API, "revision_conflict", http.StatusPreconditionFailed, "Rules changed",
		"The rules do not have the revision in `If-Match`. Get them, make the change again, and send their new ETag.")
	SecretNotFound = define(API, "secret_not_found", http.StatusNotFound, "Secret not found",
		"You have no secret with this name. `GET /secrets` lists yours.")
	SecretLimitExceeded = define(API, "secret_limit_exceeded", http.StatusConflict, "Too many secrets",
		"You have 1,000 secrets, or 100 secrets or 256 KiB for one host; `detail` names the limit. Delete one first.")
	PolicyNotFound = define(API, "policy_not_found", http.StatusNotFound, "Policy not found",
		"You have no policy with this name. `GET /policies` lists yours and the built-in ones.")
	PolicyInvalid = define(API, "policy_invalid", http.StatusUnprocessableEntity, "Invalid policy",
		"The body is not a WebAssembly module, or the module lacks something that a policy needs; `detail` names it.")
	PolicyInUse = define(API, "policy_in_use", http.StatusConflict, "Policy in use",
		"Rules use the policy; `detail` lists them. Change them first.")
	PolicyBuiltIn = define(API, "policy_built_in", http.StatusConflict, "Built-in policy",
		"Built-in policies cannot be deleted; only pushed ones can.")
	PolicyLimitExceeded = define(API, "policy_limit_exceeded", http.StatusConflict, "Too many policies",
		"You have 100 policies, or policies of 256 MiB in total. Delete one first.")
	PushLimitExceeded = define(API, "push_limit_exceeded", http.StatusTooManyRequests, "Too many concurrent pushes",
		"Two of your policies, or eight of all owners, are being pushed.", retryAfter(5))
)

// Previews.
var (
	PreviewNotFound = define(Preview, "preview_not_found", http.StatusNotFound, "Preview not found",
		"The address is mistyped, the port is no longer exposed, or the sandbox was destroyed.")
	SandboxNotRunning = define(Preview, "sandbox_not_running", http.StatusGone, "Sandbox not running",
		"The port has wake mode `never`, so requests do not wake the sandbox. Wake it with the API, or expose the port with another wake mode.")
	SandboxStopped = define(API|Preview, "sandbox_stopped", http.StatusServiceUnavailable, "Sandbox stopped",
		"The sandbox is stopped. In previews, background requests of a page, prefetches, HEAD requests and crawlers do not start it: open or reload the page, or expose the port with wake mode `any`. In the API, requests with `wake=false` do not.", retryAfter(30))
	SandboxAsleep = define(API|Preview, "sandbox_asleep", http.StatusServiceUnavailable, "Sandbox asleep",
		"The sandbox is asleep, and neither prefetches of previews nor requests with `wake=false` to the API wake it.", retryAfter(30))
	WakeTimeout = define(Preview, "wake_timeout", http.StatusGatewayTimeout, "Sandbox still waking",
		"The sandbox did not wake within `wait_timeout`. The wake continues; try again.", retryAfter(2))
	PortNotListening = define(Preview, "port_not_listening", http.StatusBadGateway, "Port not listening",
		"The sandbox is running, but no process in it listens on the port.")
	ProcessExited = define(API|Preview, "process_exited", http.StatusBadGateway, "Process exited",
		"In the API: the process ended before it was ready; one that is restarted has then ended several times in a row. In previews: no process listens on the port, because every declared process has ended with an error since the sandbox started, and no other process runs. `process` describes it, or the last one, with up to 20 lines or 4 KiB of its output except on public ports.")
	ServerDisconnected = define(Preview, "server_disconnected", http.StatusBadGateway, "Server disconnected",
		"The server in the sandbox closed the connection before its response was complete.")
	ServerResponseInvalid = define(Preview, "server_response_invalid", http.StatusBadGateway, "Invalid response from the server",
		"The server in the sandbox sent a status below 100, or switched to a protocol that was not requested.")
	ServerProtocolMismatch = define(Preview, "server_protocol_mismatch", http.StatusBadGateway, "Server requires HTTP/2",
		"The server in the sandbox supports HTTP/2 only, and the port has protocol `http1`, or the request could not be sent again. Expose the port with protocol `h2c`; with `auto`, try again.")
	RequestLimitExceeded = define(Preview, "request_limit_exceeded", http.StatusServiceUnavailable, "Too many requests in progress",
		"More requests are in progress than `max_requests` and `max_requests_per_sandbox` allow.", retryAfter(1))
)

// Egress.
var (
	EgressDenied = define(API|outbound, "egress_denied", http.StatusForbidden, "Denied by egress rules",
		"A rule denies the request, or no rule allows it. `rule` names the rule. The API sends it when rules deny what git requests from a server.")
	PolicyDenied = define(outbound, "policy_denied", http.StatusForbidden, "Denied by a policy",
		"A policy denied the request. `detail` has the policy's reason.")
	PolicyFailed = define(outbound, "policy_failed", http.StatusForbidden, "Policy failed",
		"A policy crashed, exceeded a limit or cannot run, so the request is denied. `detail` has the cause.")
	PolicyBodyTooLarge = define(outbound, "policy_body_too_large", http.StatusRequestEntityTooLarge, "Body too large for a policy",
		"A policy reads or writes the whole body of the request, which is larger than policies may hold in memory.")
	PolicyResponseTooLarge = define(outbound, "policy_response_too_large", http.StatusBadGateway, "Response too large for a policy",
		"A policy reads or writes the whole body of the response, which is larger than policies may hold in memory.")
	PolicyUnavailable = define(outbound, "policy_unavailable", http.StatusServiceUnavailable, "Policy not available",
		"All instances of a policy are in use, the policy fails to start, or it was removed.", retryAfter(1))
	SecretNotAllowed = define(outbound, "secret_not_allowed", http.StatusForbidden, "Secret not allowed",
		"The request would send a secret to a host that the secret is not for, or without TLS.")
	PlaceholderNotAllowed = define(outbound, "placeholder_not_allowed", http.StatusForbidden, "Placeholder not allowed",
		"The request has the placeholder of a secret, and no rule allows exchanging it for this host.")
	TargetInvalid = define(outbound, "target_invalid", http.StatusBadRequest, "Invalid request target",
		"On an intercepted connection, the request target must be a path. To the proxy, send `CONNECT host:port` or an absolute URI; over HTTP/2 only `CONNECT`.")
	UpgradeNotAllowed = define(outbound, "upgrade_not_allowed", http.StatusForbidden, "Upgrade not allowed",
		"On an intercepted connection, requests can upgrade to WebSocket only.")
	UpgradeFailed = define(outbound, "upgrade_failed", http.StatusBadGateway, "Upgrade failed",
		"The connection cannot become a WebSocket.")
	RequestAmbiguous = define(outbound, "request_ambiguous", http.StatusBadRequest, "Ambiguous request",
		"The length of the request is ambiguous: it has both `Transfer-Encoding` and `Content-Length`, or `Transfer-Encoding` in HTTP/1.0. The connection is closed.")
	RequestMalformed = define(outbound, "request_malformed", http.StatusBadRequest, "Malformed request",
		"The request is not valid HTTP/1.1. The connection is closed.")
	ExpectationUnsupported = define(outbound, "expectation_unsupported", http.StatusExpectationFailed, "Unsupported expectation",
		"The header `Expect` has a value other than `100-continue`. The connection is closed.")
	TransferEncodingUnsupported = define(outbound, "transfer_encoding_unsupported", http.StatusNotImplemented, "Unsupported transfer encoding",
		"The header `Transfer-Encoding` has a value other than `chunked`. The connection is closed.")
	HTTPVersionUnsupported = define(outbound, "http_version_unsupported", http.StatusHTTPVersionNotSupported, "Unsupported HTTP version",
		"The request has an HTTP version other than 1.0 and 1.1. The connection is closed.")
	EgressLimitExceeded = define(outbound, "egress_limit_exceeded", http.StatusServiceUnavailable, "Too many connections or requests",
		"The sandbox, the owner or the node has as many connections, requests in progress, or bytes of their bodies in memory, as it may. `detail` names the limit.", retryAfter(1))
	UpstreamUnreachable = define(outbound, "upstream_unreachable", http.StatusBadGateway, "Upstream unreachable",
		"The name cannot be resolved, or the connection to the host failed.")
	UpstreamTimeout = define(outbound, "upstream_timeout", http.StatusGatewayTimeout, "Upstream timed out",
		"The host did not respond in time.")
	UpstreamCertificateInvalid = define(outbound, "upstream_certificate_invalid", http.StatusBadGateway, "Invalid upstream certificate",
		"The host's certificate cannot be verified. The operator adds authorities with the option `upstream_ca`.")
	UpstreamTLSFailed = define(outbound, "upstream_tls_failed", http.StatusBadGateway, "Upstream TLS handshake failed",
		"The TLS handshake with the host failed. `detail` has its alert.")
	UpstreamDisconnected = define(outbound, "upstream_disconnected", http.StatusBadGateway, "Upstream disconnected",
		"The host closed the connection before its response was complete.")
	UpstreamResponseInvalid = define(outbound, "upstream_response_invalid", http.StatusBadGateway, "Invalid upstream response",
		"The host's response is not valid HTTP.")
	UpstreamResponseUnreadable = define(outbound, "upstream_response_unreadable", http.StatusBadGateway, "Unreadable upstream response",
		"The host's response cannot be searched for secrets, such as because of its content coding. `detail` has the cause.")
)

// The proxy.
var (
	ProxyAuthenticationRequired = define(Proxy, "proxy_authentication_required", http.StatusProxyAuthRequired, "Proxy authentication required",
		"The API key is missing or wrong. Use it as the password in the proxy's URL.")
	ProxyTLSRequired = define(Proxy, "proxy_tls_required", http.StatusForbidden, "TLS to the proxy required",
		"From other machines, the proxy accepts API keys over TLS only. Use `https://` in the proxy's URL.")
)
