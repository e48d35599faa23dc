package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"github.com/doze-run/doze/requestid"
)

const problemType = "application/problem+json"

// problemBase is where the codes are explained: one anchor each.
const problemBase = "https://github.com/doze-run/doze/blob/main/docs/api.md#"

// Problem is the answer to every request that is refused or fails: a problem
// document (RFC 9457) with a stable code.
type Problem struct {
	Type   string       `json:"type" format:"uri" doc:"Where the code is explained"`
	Title  string       `json:"title" doc:"What the code means, always the same"`
	Status int          `json:"status" doc:"The HTTP status"`
	Detail string       `json:"detail" doc:"What was wrong this time, and what would be right"`
	Code   Code         `json:"code" doc:"Stable, for programs"`
	Errors []FieldError `json:"errors,omitempty" nullable:"false" doc:"The single faults of an invalid request"`
	// RequestID is set when the problem is sent.
	RequestID string `json:"request_id,omitempty" doc:"The response's X-Request-Id, by which the node's log names the request"`

	header http.Header
}

// FieldError is one fault of a request.
type FieldError struct {
	Location string `json:"location" doc:"Where it is, such as body.name or query.limit"`
	Message  string `json:"message" doc:"What is wrong"`
	Want     string `json:"want,omitempty" doc:"What would be right"`
}

// newProblem makes a Problem of a code; detail says what was wrong and what
// would be right.
func newProblem(code Code, detail string) *Problem {
	m, ok := meanings[code]
	if !ok {
		panic("api: no meaning for code " + string(code)) // a mistake of ours that any test meets
	}
	p := &Problem{Type: problemBase + string(code), Title: m.title, Status: m.status, Detail: detail, Code: code}
	if m.retryAfter > 0 {
		p.setHeader("Retry-After", strconv.Itoa(m.retryAfter))
	}
	return p
}

func problemf(code Code, format string, args ...any) *Problem {
	return newProblem(code, fmt.Sprintf(format, args...))
}

func (p *Problem) setHeader(key, value string) *Problem {
	if p.header == nil {
		p.header = http.Header{}
	}
	p.header.Set(key, value)
	return p
}

// of returns the problem as it is sent to a request. Problems are shared, and stay as
// they are.
func (p *Problem) of(requestID string) *Problem {
	sent := *p
	sent.RequestID = requestID
	return &sent
}

// Error makes a Problem an error, so that handlers can return one.
func (p *Problem) Error() string { return string(p.Code) + ": " + p.Detail }

// GetStatus implements huma.StatusError.
func (p *Problem) GetStatus() int { return p.Status }

// GetHeaders implements huma.HeadersError.
func (p *Problem) GetHeaders() http.Header { return p.header }

// ContentType implements huma.ContentTypeFilter.
func (p *Problem) ContentType(string) string { return problemType }

// write answers with the problem, outside of huma.
func (p *Problem) write(w http.ResponseWriter) {
	body, err := json.Marshal(p.of(w.Header().Get(requestid.Header)))
	if err != nil {
		panic(err) // strings and numbers only
	}
	h := w.Header()
	for key, values := range p.header {
		h[key] = values
	}
	h.Set("Content-Type", problemType)
	w.WriteHeader(p.Status)
	w.Write(body)
}
