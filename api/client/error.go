package client

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"

	"github.com/doze-run/doze/problem"
)

// UnexpectedResponseError is an error response that does not come from a node, but for
// example from a proxy in front of it.
type UnexpectedResponseError struct {
	Host        string
	Status      int
	ContentType string // media type; empty if the response has none
}

func (e *UnexpectedResponseError) Error() string {
	return fmt.Sprintf("%s responded with status %d %s and %s; is this the address of a node's API?",
		e.Host, e.Status, http.StatusText(e.Status), contentName(e.ContentType))
}

// readError returns the *problem.Problem of a response, or an *UnexpectedResponseError.
func readError(resp *http.Response) error {
	mediaType, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if mediaType == problem.ContentType {
		p := &problem.Problem{}
		body, err := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
		if err == nil && json.Unmarshal(body, p) == nil && p.Code != (problem.Code{}) {
			p.Status = resp.StatusCode
			return p
		}
	}
	return &UnexpectedResponseError{Host: resp.Request.URL.Host, Status: resp.StatusCode, ContentType: mediaType}
}

func contentName(mediaType string) string { return cmp.Or(mediaType, "no content type") }
