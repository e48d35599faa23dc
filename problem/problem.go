// Package problem defines the error responses of a node: problem documents
// (RFC 9457), each with a stable code for programs. The registry of codes is
// the source of docs/reference/errors.md.
package problem

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"strconv"
)

const (
	// TypeBase and a code are the Type of a Problem: the code's entry in docs/reference/errors.md.
	TypeBase = "https://github.com/doze-run/doze/blob/main/docs/reference/errors.md#"
	// ContentType of a problem document.
	ContentType = "application/problem+json"
	// HeaderError is the response header with the code of a Problem. No other
	// response has it, so clients can distinguish the node's errors from a server's.
	HeaderError = "Doze-Error"
	// HeaderFlow is the response header with the Flow of a Problem.
	HeaderFlow = "Doze-Flow"
)

// Code identifies one kind of error. Only this package makes codes, so a code
// without a Definition cannot be sent. Codes are comparable; the zero Code is none.
type Code struct{ name string }

// String returns the code's name, such as "sandbox_not_found".
func (c Code) String() string { return c.name }

// MarshalText implements encoding.TextMarshaler.
func (c Code) MarshalText() ([]byte, error) { return []byte(c.name), nil }

// UnmarshalText implements encoding.TextUnmarshaler. It accepts unknown names: a
// newer node has more codes.
func (c *Code) UnmarshalText(text []byte) error {
	c.name = string(text)
	return nil
}

// Definition returns the code's definition, or the zero Definition if this
// version does not know the code.
func (c Code) Definition() Definition { return registry[c.name] }

// Problem is a problem document, and an error. The fields from Host to
// ContainerOutput depend on the code.
type Problem struct {
	Type   string `json:"type" format:"uri" doc:"Link to the description of the code"`
	Title  string `json:"title" doc:"Short description of the code, always the same"`
	Status int    `json:"status" doc:"HTTP status"`
	Detail string `json:"detail" doc:"What went wrong in this case, and how to fix it. For people: its text may change"`
	Code   Code   `json:"code" doc:"Stable identifier of the kind of error, for programs. New codes may be added"`
	// RequestID is set when the problem is sent.
	RequestID string       `json:"request_id,omitempty" doc:"Value of the response header X-Request-Id, which also identifies the request in the node's log"`
	Errors    []FieldError `json:"errors,omitempty" nullable:"false" doc:"The individual errors of an invalid request, at most 20"`

	Host string `json:"host,omitempty" doc:"Host that a refused outgoing request was for"`
	Rule string `json:"rule,omitempty" doc:"Egress rule that refused the request, as source/name"`
	Flow string `json:"flow,omitempty" doc:"Flow of a refused outgoing request, which identifies it in the list of flows"`

	Process         *FailedProcess `json:"process,omitempty" doc:"Process that was expected to listen on the port, or to be ready, and has ended or is not"`
	ContainerOutput string         `json:"container_output,omitempty" doc:"Last line that the container wrote before the sandbox failed to wake"`

	header http.Header
}

// FieldError is one error of an invalid request.
type FieldError struct {
	Location string `json:"location" doc:"Where the error is, such as body.name or query.limit"`
	Message  string `json:"message" doc:"What is wrong"`
	Hint     string `json:"hint,omitempty" doc:"How to fix it"`
}

// FailedProcess is a background process that has ended, or is not ready in time.
type FailedProcess struct {
	ID       string `json:"id,omitempty" doc:"Id of the process; missing in previews"`
	Name     string `json:"name" doc:"Name of the process"`
	ExitCode *int   `json:"exit_code,omitempty" nullable:"false" doc:"Its exit code; missing if a signal ended it, or if it runs"`
	Signal   string `json:"signal,omitempty" doc:"Signal that ended it, such as SIGKILL"`
	Output   string `json:"output,omitempty" doc:"Its last lines of output; missing on public ports"`
}

// New returns the Problem of a code. The detail describes the error in this case
// and how to fix it. New panics if c is not defined by this package.
func New(c Code, detail string) *Problem {
	d, ok := registry[c.name]
	if !ok {
		panic(fmt.Sprintf("problem: undefined code %q", c.name))
	}
	p := &Problem{Type: TypeBase + d.Name, Title: d.Title, Status: d.Status, Detail: detail, Code: c}
	if d.RetryAfter > 0 {
		p.header = http.Header{"Retry-After": {strconv.Itoa(d.RetryAfter)}}
	}
	return p
}

// Newf is New with a formatted detail.
func Newf(c Code, format string, args ...any) *Problem {
	return New(c, fmt.Sprintf(format, args...))
}

// The With methods and For return changed copies, so a Problem can be a package
// variable.

// WithHeader returns a copy of p with a response header. It replaces the
// Retry-After of the code's definition.
func (p *Problem) WithHeader(name, value string) *Problem {
	changed := *p
	changed.header = p.header.Clone()
	if changed.header == nil {
		changed.header = http.Header{}
	}
	changed.header.Set(name, value)
	return &changed
}

// WithErrors returns a copy of p with the individual errors of a request.
func (p *Problem) WithErrors(errs ...FieldError) *Problem {
	changed := *p
	changed.Errors = errs
	return &changed
}

// WithFlow returns a copy of p for a refused outgoing request. Empty values stay
// out of the document.
func (p *Problem) WithFlow(host, rule, flow string) *Problem {
	changed := *p
	changed.Host, changed.Rule, changed.Flow = host, rule, flow
	return &changed
}

// For returns a copy of p for the request with this id.
func (p *Problem) For(requestID string) *Problem {
	changed := *p
	changed.RequestID = requestID
	return &changed
}

// Error implements error: the code and the detail.
func (p *Problem) Error() string { return p.Code.name + ": " + cmp.Or(p.Detail, p.Title) }

// GetStatus implements huma.StatusError.
func (p *Problem) GetStatus() int { return p.Status }

// GetHeaders implements huma.HeadersError: the headers that every response with
// this problem has, whatever the form of its body. The caller may change them.
func (p *Problem) GetHeaders() http.Header {
	h := p.header.Clone()
	if h == nil {
		h = http.Header{}
	}
	h.Set(HeaderError, p.Code.name)
	if p.Flow != "" {
		h.Set(HeaderFlow, p.Flow)
	}
	return h
}

// ContentType implements huma.ContentTypeFilter.
func (p *Problem) ContentType(string) string { return ContentType }

// Has reports whether err is, or wraps, a *Problem with this code.
func Has(err error, c Code) bool {
	p, ok := errors.AsType[*Problem](err)
	return ok && p.Code == c
}
