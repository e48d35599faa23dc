package intercept

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"strings"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zlib"
	"github.com/klauspost/compress/zstd"
)

const (
	identity = "identity"
	// maxCodings is the limit of codings per response: one is usual, two are a
	// mistake, more are an attack.
	maxCodings = 2
	// maxWindow is the limit of the window of zstd: RFC 9659 allows 8 MiB over HTTP. The
	// windows of brotli (16 MiB) and deflate (32 KiB) are bounded by their formats.
	maxWindow = 8 << 20
	// maxTail limits the bytes that are read after the end of the decoded body, to
	// receive the trailers and to reuse the connection. They are not forwarded.
	maxTail = 64 << 10
)

// decoders has the decoders by the names of the content codings. The memory that they
// need does not depend on the size of the decoded body: a body that expands without end
// costs its client, which has to read all of it, more than the node.
var decoders = map[string]func(*bufio.Reader) (io.ReadCloser, error){
	"gzip":    func(r *bufio.Reader) (io.ReadCloser, error) { return gzip.NewReader(r) },
	"x-gzip":  func(r *bufio.Reader) (io.ReadCloser, error) { return gzip.NewReader(r) },
	"deflate": inflate,
	"br":      func(r *bufio.Reader) (io.ReadCloser, error) { return io.NopCloser(brotli.NewReader(r)), nil },
	"zstd": func(r *bufio.Reader) (io.ReadCloser, error) {
		d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, err
		}
		return d.IOReadCloser(), nil
	},
}

// hasLargeWindow reports whether a decoder takes megabytes, which the first bytes of a
// response can request. Route.Windows limits these decoders.
func hasLargeWindow(coding string) bool { return coding == "br" || coding == "zstd" }

// inflate reads zlib's format, which is the meaning of "deflate", and the raw
// format that some servers send instead (RFC 9110, section 8.4.1.2).
func inflate(r *bufio.Reader) (io.ReadCloser, error) {
	start, err := r.Peek(2)
	if err == nil && start[0]&0x0f == 8 && (uint(start[0])<<8|uint(start[1]))%31 == 0 {
		return zlib.NewReader(r)
	}
	return flate.NewReader(r), nil
}

// decode returns the decoded body of a response, and adapts the header. hold
// acquires the large windows that the decoders need, and no more. An unknown coding is an
// error. Closing the result leaves body open.
func decode(res *http.Response, body io.Reader, hold func(windows int) bool) (io.ReadCloser, error) {
	var codings []string
	windows := 0
	for _, field := range res.Header["Content-Encoding"] {
		for name := range strings.SplitSeq(field, ",") {
			name = strings.ToLower(textproto.TrimString(name))
			if name == "" || name == identity {
				continue
			}
			if decoders[name] == nil {
				return nil, errors.New("has an unsupported encoding") // its name may echo the request
			}
			codings = append(codings, name)
			if hasLargeWindow(name) {
				windows++
			}
		}
	}
	switch {
	case len(codings) > maxCodings:
		return nil, fmt.Errorf("is encoded %d times", len(codings))
	case !hold(windows):
		return nil, errors.New("is compressed by br or zstd, and too many such responses are under way")
	case len(codings) == 0:
		return io.NopCloser(body), nil
	}
	for _, name := range []string{"Content-Encoding", "Content-Length", "Content-Digest", "Content-Md5", "Digest", "Accept-Ranges"} {
		delete(res.Header, name)
	}
	d := &decoded{from: body}
	plain := body
	for i := len(codings) - 1; i >= 0; i-- { // the last was applied last
		one := &decoder{open: decoders[codings[i]], from: plain}
		d.all = append(d.all, one)
		plain = one
	}
	d.Reader = plain
	return d, nil
}

// decoded is a body with its codings removed.
type decoded struct {
	io.Reader
	all  []*decoder
	from io.Reader
}

func (d *decoded) Read(b []byte) (int, error) {
	n, err := d.Reader.Read(b)
	if err == io.EOF {
		if _, rest := io.CopyN(io.Discard, d.from, maxTail); rest != io.EOF && rest != nil {
			err = rest
		}
	}
	return n, err
}

func (d *decoded) Close() error {
	for _, one := range d.all {
		if one.plain != nil {
			one.plain.Close() // it holds memory only
		}
	}
	return nil
}

// decoder calls open at the first Read: the format's header may arrive late.
type decoder struct {
	open  func(*bufio.Reader) (io.ReadCloser, error)
	from  io.Reader
	plain io.ReadCloser // nil before the first Read
	err   error         // returned by open
}

func (d *decoder) Read(b []byte) (int, error) {
	if d.err != nil {
		return 0, d.err
	}
	if d.plain == nil {
		r := bufio.NewReader(d.from)
		if _, d.err = r.Peek(1); d.err != nil { // an empty body is not encoded at all
			return 0, d.err
		}
		plain, err := d.open(r)
		if err != nil {
			d.err = err
			return 0, err
		}
		d.plain = plain
	}
	return d.plain.Read(b)
}
