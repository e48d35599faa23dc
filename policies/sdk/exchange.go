package sdk

import (
	"strings"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

// Request is a request on its way out. It is valid until Policy.Request returns.
type Request struct {
	Header  Header
	Body    Body
	Trailer Header // needs Trailers
	// Context is given to Response of the same exchange.
	Context uint32
}

func newRequest() Request {
	return Request{Header: Header{abi.RequestHeader}, Body: Body{kind: abi.RequestBody}, Trailer: Header{abi.RequestTrailer}}
}

// Method is such as GET.
func (r *Request) Method() string {
	b := fetch(abi.GetMethod)
	for _, m := range [...]string{"GET", "POST", "HEAD", "PUT", "PATCH", "DELETE"} {
		if string(b) == m {
			return m // without a copy
		}
	}
	return string(b)
}

// SetMethod replaces the method.
func (r *Request) SetMethod(method string) { abi.SetMethod(method) }

// URI is the path as it was sent with the query, such as /a%20b?c=d.
func (r *Request) URI() string { return string(fetch(abi.GetURI)) }

// SetURI replaces path and query. The host stays what it is.
func (r *Request) SetURI(uri string) { abi.SetURI(uri) }

// Path is the path as it was sent, without the query.
func (r *Request) Path() string {
	path, _, _ := strings.Cut(r.URI(), "?")
	return path
}

// Query is what follows the ? as it was sent.
func (r *Request) Query() string {
	_, query, _ := strings.Cut(r.URI(), "?")
	return query
}

// Protocol is such as HTTP/1.1 or HTTP/2.0.
func (r *Request) Protocol() string { return string(fetch(abi.GetProtocolVersion)) }

// Upgrades reports whether the connection is to speak another protocol, such as
// WebSocket. Data after that passes no policy.
func (r *Request) Upgrades() bool {
	for _, protocols := range r.Header.Values("Upgrade") {
		if !strings.EqualFold(strings.TrimSpace(protocols), "h2c") { // which the node does not take up
			return true
		}
	}
	return false
}

// Respond responds to the request without sending it anywhere. Policy.Request returns
// its result.
func (r *Request) Respond(status int, contentType string, body []byte) error {
	abi.SetStatusCode(uint32(status))
	if contentType != "" {
		abi.SetHeaderValue(abi.ResponseHeader, "Content-Type", contentType)
	}
	abi.WriteBody(abi.ResponseBody, body)
	return errResponded
}

// Response is what came back. It is valid until Policy.Response returns. Changing
// it needs BufferResponse.
type Response struct {
	Header  Header
	Body    Body   // reading it needs BufferResponse
	Trailer Header // needs Trailers
	// Context is what Request left there.
	Context uint32
	// Failed: no response came.
	Failed bool
}

func newResponse(context uint32, failed bool) Response {
	return Response{
		Header: Header{abi.ResponseHeader}, Body: Body{kind: abi.ResponseBody}, Trailer: Header{abi.ResponseTrailer},
		Context: context, Failed: failed,
	}
}

// Status is such as 200. It needs BufferResponse.
func (r *Response) Status() int { return int(abi.GetStatusCode()) }

// SetStatus replaces the status.
func (r *Response) SetStatus(status int) { abi.SetStatusCode(uint32(status)) }
