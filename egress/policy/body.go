package policy

import (
	"bytes"
	"io"
	"net/http"
	"strconv"

	"github.com/doze-run/doze/problem"
)

// body is the request's body as one guest sees it.
type body struct {
	// original is the whole body, once it has been read into memory; otherwise nil.
	original *bytes.Reader
	consumed bool   // the body was read without bufferRequest and is not stored
	written  []byte // the body that is sent instead; nil: the original
}

// readRequest reads the next bytes of the body into b. With bufferRequest, the whole
// body is stored for the next policies and the upstream.
func (c *call) readRequest(b []byte) (int, error) {
	if c.features&bufferRequest == 0 {
		if c.phase != beforeNext {
			fail("it reads the request's body after the request was sent, without having enabled buffer_request")
		}
		if c.r.Body == nil {
			return 0, io.EOF
		}
		c.body.consumed = true
		return c.fill(b, c.r.Body)
	}
	if c.body.original == nil {
		c.loadRequest()
	}
	n, _ := c.body.original.Read(b)
	if c.body.original.Len() == 0 {
		return n, io.EOF
	}
	return n, nil
}

func (c *call) loadRequest() {
	if c.phase != beforeNext || c.r.Body == nil || c.body.consumed {
		c.body.original = bytes.NewReader(nil)
		return
	}
	limit := c.instance.policy.host.config.RequestLimit
	size := limit // unless it is known
	if n := c.r.ContentLength; n >= 0 {
		size = int(min(n, int64(limit)))
	}
	c.chain.hold(size)
	var kept []byte
	var err error
	c.wait(func() { kept, err = io.ReadAll(io.LimitReader(c.r.Body, int64(limit)+1)) })
	switch {
	case err != nil:
		unreadable(err)
	case len(kept) > limit:
		tooLong(limit)
	}
	c.chain.release(int64(size - len(kept)))
	c.body.original = bytes.NewReader(kept)
	c.r.Body = replaced{bytes.NewReader(kept), c.r.Body}
}

func tooLong(limit int) {
	failWith(problem.PolicyBodyTooLarge, "it reads or writes the whole body of the request, which has more than %d bytes", limit)
}

// unreadable ends a guest that reads a body that the client did not send completely.
func unreadable(err error) {
	failWith(problem.BodyIncomplete, "the body of the request could not be read: %.200v", err)
}

// replaced is a body that reads from memory and closes the body that it replaces.
type replaced struct {
	io.Reader
	io.Closer
}

// writeRequest appends to the body that is sent instead of the original.
func (c *call) writeRequest(b []byte) {
	limit := c.instance.policy.host.config.RequestLimit
	if len(c.body.written)+len(b) > limit {
		tooLong(limit)
	}
	c.chain.hold(len(b))
	if c.body.written == nil {
		c.body.written = []byte{}
	}
	c.body.written = append(c.body.written, b...)
}

// sendRequest sets the body that the next policy or the upstream gets.
func (c *call) sendRequest() error {
	switch {
	case c.body.written != nil:
		var closer io.Closer = http.NoBody
		if c.r.Body != nil {
			closer = c.r.Body
		}
		c.r.Body = replaced{bytes.NewReader(c.body.written), closer}
		c.r.ContentLength = int64(len(c.body.written))
		c.chain.WroteBody = true
		c.r.TransferEncoding = nil
		c.r.GetBody = nil
		if _, ok := c.r.Header["Content-Length"]; ok {
			c.r.Header["Content-Length"] = []string{strconv.Itoa(len(c.body.written))}
		}
	case c.body.consumed:
		return &failure{"it read the request's body without buffer_request, and then passed the request on without it", problem.PolicyFailed}
	}
	return nil
}
