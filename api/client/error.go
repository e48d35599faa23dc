package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
)

// Error is an answer that is no success: a problem document (RFC 9457).
type Error struct {
	Status int    `json:"status"`
	Code   string `json:"code"` // stable, for programs
	Title  string `json:"title"`
	Detail string `json:"detail"`
	// Errors are the single faults of an invalid request.
	Errors []FieldError `json:"errors,omitempty"`
	// RequestID names the request in the node's log.
	RequestID string `json:"request_id,omitempty"`
}

// FieldError is one fault of a request.
type FieldError struct {
	Location string `json:"location"`
	Message  string `json:"message"`
	Want     string `json:"want,omitempty"`
}

func (e *Error) Error() string {
	text := e.Detail
	if text == "" {
		text = e.Title
	}
	return fmt.Sprintf("%s (%s)", text, e.Code)
}

// Codes of Error that this package's users tell apart.
const (
	CodeSandboxNotFound    = "sandbox_not_found"
	CodeBusy               = "busy"
	CodePathNotFound       = "path_not_found"
	CodeIsDirectory        = "is_a_directory"
	CodeNotDirectory       = "not_a_directory"
	CodeRange              = "range_not_satisfiable"
	CodeUnauthorized       = "unauthorized"
	CodeQuarantineNotFound = "quarantine_not_found"

	CodeCommandNotFound      = "command_not_found"
	CodeCommandNotExecutable = "command_not_executable"
	CodeNoShell              = "no_shell"

	CodeNoEgress         = "no_egress"
	CodeRevisionConflict = "revision_conflict"
	CodeSecretNotFound   = "secret_not_found"
	CodePolicyNotFound   = "policy_not_found"
)

// HasCode says whether err is an *Error with that code.
func HasCode(err error, code string) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == code
}

// readError makes an Error of any answer, also of a proxy's in between.
func readError(resp *http.Response) error {
	e := &Error{}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
	mediaType, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if err == nil && mediaType == "application/problem+json" && json.Unmarshal(body, e) == nil && e.Code != "" {
		e.Status = resp.StatusCode
		return e
	}
	return &Error{
		Status: resp.StatusCode,
		Code:   "unexpected_answer",
		Title:  "This is not the answer of a node",
		Detail: fmt.Sprintf("%s answered %s with %s; is this the address of a node's API?", resp.Request.URL.Host, resp.Status, contentName(mediaType)),
	}
}

func contentName(mediaType string) string {
	if mediaType == "" {
		return "no content type"
	}
	return mediaType
}
