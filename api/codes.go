package api

import "net/http"

// Code tells one refusal from another. Codes are stable: programs may compare
// them. Everything else in a Problem is for people.
type Code string

// The request itself.
const (
	CodeInvalidRequest       Code = "invalid_request"
	CodeInvalidJSON          Code = "invalid_json"
	CodeNameInvalid          Code = "name_invalid"
	CodeUnsupportedMediaType Code = "unsupported_media_type"
	CodeBodyTooLarge         Code = "body_too_large"
	CodeBodyIncomplete       Code = "body_incomplete"
	CodeBodyTimeout          Code = "body_timeout"
	CodeURITooLong           Code = "uri_too_long"
	CodeUnauthorized         Code = "unauthorized"
	CodeNotFound             Code = "not_found"
	CodeMethodNotAllowed     Code = "method_not_allowed"
	CodeRangeNotSatisfiable  Code = "range_not_satisfiable"
	CodeUpgradeRequired      Code = "upgrade_required"
	CodeClientGone           Code = "client_gone"
)

// Sandboxes and the node.
const (
	CodeSandboxNotFound      Code = "sandbox_not_found"
	CodeSandboxDestroyed     Code = "sandbox_destroyed"
	CodeSandboxConflict      Code = "sandbox_conflict"
	CodeQuarantineNotFound   Code = "quarantine_not_found"
	CodeImageNotAllowed      Code = "image_not_allowed"
	CodeImageMissing         Code = "image_missing"
	CodeBusy                 Code = "busy"
	CodeFreezeFailed         Code = "freeze_failed"
	CodeDescriptorsExhausted Code = "descriptors_exhausted"
	CodeWakeFailed           Code = "wake_failed"
	CodePortNotExposed       Code = "port_not_exposed"
	CodePortNotReady         Code = "port_not_ready"
	CodeTooManyWaiters       Code = "too_many_waiters"
	CodeTooManySandboxes     Code = "too_many_sandboxes"
	CodeTooManyStreams       Code = "too_many_streams"
	CodeTooManyCalls         Code = "too_many_calls"
	CodeEngineUnavailable    Code = "engine_unavailable"
	CodeNodeClosing          Code = "node_closing"
	CodeStoreFull            Code = "store_full"
	CodeTimeout              Code = "timeout"
	CodeInternal             Code = "internal"
)

// What sandboxes send out.
const (
	CodeNoEgress         Code = "no_egress"
	CodeRulesInvalid     Code = "rules_invalid"
	CodeRevisionConflict Code = "revision_conflict"
	CodeSecretNotFound   Code = "secret_not_found"
	CodeTooManySecrets   Code = "too_many_secrets"
	CodePolicyNotFound   Code = "policy_not_found"
	CodePolicyInvalid    Code = "policy_invalid"
	CodePolicyInUse      Code = "policy_in_use"
	CodePolicyBuiltIn    Code = "policy_built_in"
	CodeTooManyPolicies  Code = "too_many_policies"
	CodeTooManyPushes    Code = "too_many_pushes"
)

// Inside a sandbox.
const (
	CodeCommandNotFound  Code = "command_not_found"
	CodeNotExecutable    Code = "command_not_executable"
	CodeNoShell          Code = "no_shell"
	CodePathNotFound     Code = "path_not_found"
	CodeAlreadyExists    Code = "already_exists"
	CodeNotDirectory     Code = "not_a_directory"
	CodeIsDirectory      Code = "is_a_directory"
	CodeNotEmpty         Code = "not_empty"
	CodeNotPermitted     Code = "not_permitted"
	CodeNoSpaceLeft      Code = "no_space_left"
	CodeTooLarge         Code = "too_large"
	CodeUnsafeArchive    Code = "unsafe_archive"
	CodeProcessNotFound  Code = "process_not_found"
	CodeTooManyProcesses Code = "too_many_processes"
	CodeGuestLost        Code = "guest_lost"
	CodeGuestError       Code = "guest_error"
)

// meaning of a Code: the status it comes with and its title, which never vary.
type meaning struct {
	status int
	title  string
	// retryAfter is the value of Retry-After in seconds; 0 sends none.
	retryAfter int
}

// statusClientGone is nginx's. Nobody receives it, but what serves us may log it.
const statusClientGone = 499

var meanings = map[Code]meaning{
	CodeInvalidRequest:       {status: http.StatusUnprocessableEntity, title: "The request is not valid"},
	CodeInvalidJSON:          {status: http.StatusBadRequest, title: "The body is not JSON"},
	CodeNameInvalid:          {status: http.StatusUnprocessableEntity, title: "The name is not valid"},
	CodeUnsupportedMediaType: {status: http.StatusUnsupportedMediaType, title: "The body has the wrong type"},
	CodeBodyTooLarge:         {status: http.StatusRequestEntityTooLarge, title: "The body is too large"},
	CodeBodyIncomplete:       {status: http.StatusBadRequest, title: "The body ended early"},
	CodeBodyTimeout:          {status: http.StatusRequestTimeout, title: "The body came too slowly"},
	CodeURITooLong:           {status: http.StatusRequestURITooLong, title: "The address is too long"},
	CodeUnauthorized:         {status: http.StatusUnauthorized, title: "A valid token is needed"},
	CodeNotFound:             {status: http.StatusNotFound, title: "There is no such route"},
	CodeMethodNotAllowed:     {status: http.StatusMethodNotAllowed, title: "The route does not have this method"},
	CodeRangeNotSatisfiable:  {status: http.StatusRequestedRangeNotSatisfiable, title: "The range lies outside the file"},
	CodeUpgradeRequired:      {status: http.StatusUpgradeRequired, title: "The route is a WebSocket"},
	CodeClientGone:           {status: statusClientGone, title: "The client went away"},

	CodeSandboxNotFound:      {status: http.StatusNotFound, title: "There is no such sandbox"},
	CodeSandboxDestroyed:     {status: http.StatusGone, title: "The sandbox is destroyed"},
	CodeSandboxConflict:      {status: http.StatusConflict, title: "The sandbox exists and differs"},
	CodeQuarantineNotFound:   {status: http.StatusNotFound, title: "No such container is in quarantine"},
	CodeImageNotAllowed:      {status: http.StatusUnprocessableEntity, title: "The image is not allowed"},
	CodeImageMissing:         {status: http.StatusUnprocessableEntity, title: "The image could not be had"},
	CodeBusy:                 {status: http.StatusConflict, title: "The sandbox is in use", retryAfter: 1},
	CodeFreezeFailed:         {status: http.StatusBadGateway, title: "The sandbox could not be put to sleep"},
	CodeDescriptorsExhausted: {status: http.StatusServiceUnavailable, title: "The node has no file descriptors left", retryAfter: 5},
	CodeWakeFailed:           {status: http.StatusBadGateway, title: "The sandbox could not be woken"},
	CodePortNotExposed:       {status: http.StatusNotFound, title: "The port is not exposed"},
	CodePortNotReady:         {status: http.StatusGatewayTimeout, title: "Nobody listens on the port"},
	CodeTooManyWaiters:       {status: http.StatusServiceUnavailable, title: "Too many requests wait for a wake", retryAfter: 1},
	CodeTooManySandboxes:     {status: http.StatusServiceUnavailable, title: "The node is full", retryAfter: 60},
	CodeTooManyStreams:       {status: http.StatusServiceUnavailable, title: "Too many streams are open", retryAfter: 5},
	CodeTooManyCalls:         {status: http.StatusServiceUnavailable, title: "Too many calls are under way", retryAfter: 1},
	CodeEngineUnavailable:    {status: http.StatusServiceUnavailable, title: "The container engine does not answer", retryAfter: 5},
	CodeNodeClosing:          {status: http.StatusServiceUnavailable, title: "The node is starting or shutting down", retryAfter: 5},
	CodeStoreFull:            {status: http.StatusInsufficientStorage, title: "The node's disk is full"},
	CodeTimeout:              {status: http.StatusGatewayTimeout, title: "It took too long"},
	CodeInternal:             {status: http.StatusInternalServerError, title: "The node failed"},

	CodeNoEgress:         {status: http.StatusNotImplemented, title: "The node lets nothing out"},
	CodeRulesInvalid:     {status: http.StatusUnprocessableEntity, title: "The rules cannot work"},
	CodeRevisionConflict: {status: http.StatusPreconditionFailed, title: "The rules were changed meanwhile"},
	CodeSecretNotFound:   {status: http.StatusNotFound, title: "There is no such secret"},
	CodeTooManySecrets:   {status: http.StatusConflict, title: "There are too many secrets"},
	CodePolicyNotFound:   {status: http.StatusNotFound, title: "There is no such policy"},
	CodePolicyInvalid:    {status: http.StatusUnprocessableEntity, title: "The module is no policy"},
	CodePolicyInUse:      {status: http.StatusConflict, title: "Rules name the policy"},
	CodePolicyBuiltIn:    {status: http.StatusConflict, title: "The policy is part of doze"},
	CodeTooManyPolicies:  {status: http.StatusConflict, title: "There are too many policies"},
	CodeTooManyPushes:    {status: http.StatusTooManyRequests, title: "Too many policies are pushed at once", retryAfter: 5},

	CodeCommandNotFound:  {status: http.StatusUnprocessableEntity, title: "There is no such command"},
	CodeNotExecutable:    {status: http.StatusUnprocessableEntity, title: "The command cannot be executed"},
	CodeNoShell:          {status: http.StatusUnprocessableEntity, title: "The image has no shell"},
	CodePathNotFound:     {status: http.StatusNotFound, title: "There is no such file"},
	CodeAlreadyExists:    {status: http.StatusConflict, title: "It exists already"},
	CodeNotDirectory:     {status: http.StatusConflict, title: "It is not a directory"},
	CodeIsDirectory:      {status: http.StatusConflict, title: "It is a directory"},
	CodeNotEmpty:         {status: http.StatusConflict, title: "The directory is not empty"},
	CodeNotPermitted:     {status: http.StatusForbidden, title: "The sandbox does not permit it"},
	CodeNoSpaceLeft:      {status: http.StatusInsufficientStorage, title: "The sandbox's disk is full"},
	CodeTooLarge:         {status: http.StatusRequestEntityTooLarge, title: "It is too large"},
	CodeUnsafeArchive:    {status: http.StatusUnprocessableEntity, title: "The archive reaches out of its folder"},
	CodeTooManyProcesses: {status: http.StatusConflict, title: "The sandbox has too many processes"},
	CodeProcessNotFound:  {status: http.StatusNotFound, title: "There is no such process"},
	CodeGuestLost:        {status: http.StatusBadGateway, title: "The sandbox was lost meanwhile"},
	CodeGuestError:       {status: http.StatusBadGateway, title: "The sandbox failed"},
}
