package sdk

import (
	"strings"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

// Request is an outbound request. It is valid until Policy.Request returns.
type Request struct {
	Header  Header
	Body    Body
	Trailer Header // needs Trailers
	// Context is passed to Response of the same exchange.
	Context uint32
}

// Method returns the method, such as GET.
func (r *Request) Method() string {
	b := fetch(abi.Node().GetMethod)
	for _, m := range [...]string{"GET", "POST", "HEAD", "PUT", "PATCH", "DELETE"} {
		if string(b) == m {
			return m // does not allocate
		}
	}
	return string(b)
}

// SetMethod replaces the method.
func (r *Request) SetMethod(method string) { abi.Node().SetMethod(method) }

// URI returns the path and the query as they were sent, such as /a%20b?c=d.
func (r *Request) URI() string { return string(fetch(abi.Node().GetURI)) }

// SetURI replaces the path and the query. The host does not change.
func (r *Request) SetURI(uri string) { abi.Node().SetURI(uri) }

// Path returns the path as it was sent, without the query.
func (r *Request) Path() string {
	path, _, _ := strings.Cut(r.URI(), "?")
	return path
}

// Query returns the query as it was sent, without the question mark.
func (r *Request) Query() string {
	_, query, _ := strings.Cut(r.URI(), "?")
	return query
}

// Protocol returns the protocol, such as HTTP/1.1 or HTTP/2.0.
func (r *Request) Protocol() string { return string(fetch(abi.Node().GetProtocolVersion)) }

// Upgrades reports whether the request asks to switch to another protocol, such as
// WebSocket. Policies do not see data after the switch.
func (r *Request) Upgrades() bool {
	for _, protocols := range r.Header.Values("Upgrade") {
		if !strings.EqualFold(strings.TrimSpace(protocols), "h2c") { // the node ignores h2c
			return true
		}
	}
	return false
}

// Respond responds to the request, which is not sent. Policy.Request must return its
// result.
func (r *Request) Respond(status int, contentType string, body []byte) error {
	abi.Node().SetStatusCode(uint32(status))
	if contentType != "" {
		abi.Node().SetHeaderValue(abi.ResponseHeader, "Content-Type", contentType)
	}
	abi.Node().WriteBody(abi.ResponseBody, body)
	return errResponded
}

// Response is the upstream's response. It is valid until Policy.Response returns.
// Changing it needs BufferResponse.
type Response struct {
	Header  Header
	Body    Body   // reading it needs BufferResponse
	Trailer Header // needs Trailers
	// Context is the Context that Request set.
	Context uint32
	// Failed reports that no response came.
	Failed bool
}

// Status returns the status, such as 200. It needs BufferResponse.
func (r *Response) Status() int { return int(abi.Node().GetStatusCode()) }

// SetStatus replaces the status.
func (r *Response) SetStatus(status int) { abi.Node().SetStatusCode(uint32(status)) }
