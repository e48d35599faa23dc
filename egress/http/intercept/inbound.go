package intercept

import (
	"io"
	"net/http"
	"sync/atomic"
)

// inbound is what a client sent, whatever policies make of it.
type inbound struct {
	request *http.Request // of the library's server, which fills in the trailers of this one, not of copies
	whole   atomic.Bool   // its body was read to its end
}

// inboundKey is for the inbound of a request's context.
type inboundKey struct{}

// inboundBody notes that a client's body was read to its end.
type inboundBody struct {
	io.ReadCloser
	of *inbound
}

func (b *inboundBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		b.of.whole.Store(true)
	}
	return n, err
}
