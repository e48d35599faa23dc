package bucketfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

const (
	// maxRequests limits the concurrent requests of a mount that transfer or copy content, and as many that do neither.
	// Further ones queue.
	maxRequests = 16
	// maxAttempts limits the attempts of one request.
	maxAttempts = 4
	// requestTimeout bounds a request without content, with its retries, from when it has a slot.
	requestTimeout = 30 * time.Second
	// stallLimit bounds the time in which no byte of an object is transferred. An upload that has filled
	// the kernel's buffers makes no visible progress until they drain: 4 MiB take 42 s at 100 KB/s.
	stallLimit = 45 * time.Second
	// copyRate in bytes per second is the slowest copy in the object store that is not a failure.
	copyRate = 10 << 20
	// maxCopy is the size of the largest object that S3 copies in one request.
	maxCopy = 5 << 30
)

// object is what the object store reports about an object.
type object struct {
	size  int64
	etag  string
	mtime time.Time // in seconds: HEAD has no more
}

// store is a client of the bucket. It is safe for concurrent use.
type store struct {
	bucket    string
	core      minio.Core
	transport *http.Transport
	http      *http.Client
	transfers slots // of requests that transfer or copy content
	requests  slots // of requests that do neither, so that slow transfers delay no stat
}

func newStore(b Bucket) (*store, error) {
	endpoint, secure := b.Endpoint, true
	if host, ok := strings.CutPrefix(endpoint, "http://"); ok {
		endpoint, secure = host, false
	} else {
		endpoint = strings.TrimPrefix(endpoint, "https://")
	}
	transport := newTransport()
	limited := limitedTransport{transport}
	client, err := minio.New(strings.TrimSuffix(endpoint, "/"), &minio.Options{
		Creds:      credentials.NewStaticV4(b.AccessKey, b.SecretKey, ""),
		Secure:     secure,
		Transport:  limited,
		Region:     b.Region,
		MaxRetries: maxAttempts,
	})
	if err != nil {
		return nil, fmt.Errorf("bucket %s at %s: %w", b.Bucket, b.Endpoint, err)
	}
	if b.Prefix != "" && (!strings.HasSuffix(b.Prefix, "/") || strings.HasPrefix(b.Prefix, "/")) {
		return nil, fmt.Errorf("prefix %q: must end in a slash and not begin with one", b.Prefix)
	}
	return &store{
		bucket:    b.Bucket,
		core:      minio.Core{Client: client},
		transport: transport,
		http: &http.Client{
			Transport:     limited,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		transfers: make(slots, maxRequests),
		requests:  make(slots, maxRequests),
	}, nil
}

func newTransport() *http.Transport {
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second}
	return &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		DialContext:            dialer.DialContext,
		TLSHandshakeTimeout:    10 * time.Second,
		MaxIdleConns:           2 * maxRequests,
		MaxIdleConnsPerHost:    2 * maxRequests,
		IdleConnTimeout:        30 * time.Second,
		MaxResponseHeaderBytes: 64 << 10,
		ReadBufferSize:         64 << 10,
		WriteBufferSize:        64 << 10,
		DisableCompression:     true, // an object's bytes are its content, also with Content-Encoding
	}
}

// close closes idle connections.
func (s *store) close() { s.transport.CloseIdleConnections() }

// slots limit concurrent requests.
type slots chan struct{}

// acquire waits for a slot. releaseSlot frees it.
func (s slots) acquire(ctx context.Context) error {
	select {
	case s <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (s slots) releaseSlot() { <-s }

// reacquire waits for a slot. All holders release theirs in bounded time.
func (s slots) reacquire() { s <- struct{}{} }

// do calls f with a slot, and with a context that ends when f has had timeout.
func (s slots) do(ctx context.Context, timeout time.Duration, f func(context.Context) error) error {
	if err := s.acquire(ctx); err != nil {
		return err
	}
	defer s.releaseSlot()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return f(ctx)
}

// stat returns the object of a key, or an error for which isNotFound holds.
func (s *store) stat(ctx context.Context, key string) (o object, err error) {
	err = s.requests.do(ctx, requestTimeout, func(ctx context.Context) error {
		info, err := s.core.StatObject(ctx, s.bucket, key, minio.StatObjectOptions{})
		if err == nil && info.Size < 0 {
			err = fmt.Errorf("object %s has no size", key)
		}
		o = newObject(info)
		return err
	})
	return o, err
}

func newObject(info minio.ObjectInfo) object {
	return object{size: info.Size, etag: strings.Trim(info.ETag, `"`), mtime: info.LastModified.Truncate(time.Second)}
}

// get returns n bytes of an object from an offset, which must exist. It fails with ESTALE if the object
// has changed. The caller holds a slot of transfers until it closes the body. ctx bounds the reading, too.
func (s *store) get(ctx context.Context, key string, o object, off, n int64) (io.ReadCloser, error) {
	ctx, w := newWatchdog(ctx)
	var opts minio.GetObjectOptions
	if o.etag != "" {
		if err := opts.SetMatchETag(o.etag); err != nil {
			w.stop()
			return nil, err
		}
	}
	if err := opts.SetRange(off, off+n-1); err != nil {
		w.stop()
		return nil, err
	}
	body, _, header, err := s.core.GetObject(ctx, s.bucket, key, opts)
	if err == nil {
		if err = checkRange(header, o, off, n); err != nil {
			body.Close()
		}
	} else if isNotFound(err) {
		err = errStale
	}
	if err != nil {
		w.stop()
		return nil, err
	}
	return &content{body: body, left: n, watchdog: w}, nil
}

// checkRange returns an error if a response does not contain the requested bytes.
func checkRange(header http.Header, o object, off, n int64) error {
	want := fmt.Sprintf("bytes %d-%d/%d", off, off+n-1, o.size)
	switch got := header.Get("Content-Range"); {
	case o.etag != "" && strings.Trim(header.Get("ETag"), `"`) != o.etag:
		return errStale
	case got == "" && off == 0 && n == o.size && header.Get("Content-Length") == fmt.Sprint(n):
		return nil // the server does not support ranges
	case got != want:
		return fmt.Errorf("response has range %q, want %q", got, want)
	}
	return nil
}

// content is the body of an object. It ends after the requested bytes.
type content struct {
	body     io.ReadCloser
	left     int64
	watchdog *watchdog
}

func (c *content) Read(p []byte) (int, error) {
	if c.left == 0 {
		return 0, io.EOF
	}
	n, err := c.body.Read(p[:min(int64(len(p)), c.left)])
	c.watchdog.progress()
	c.left -= int64(n)
	if c.left == 0 {
		return n, nil
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

func (c *content) Close() error {
	c.watchdog.stop()
	return c.body.Close()
}

// delete deletes an object. It succeeds if the object does not exist.
func (s *store) delete(ctx context.Context, key string) error {
	err := s.requests.do(ctx, requestTimeout, func(ctx context.Context) error {
		return s.core.RemoveObject(ctx, s.bucket, key, minio.RemoveObjectOptions{})
	})
	if isNotFound(err) {
		return nil
	}
	return err
}

// copy copies an object in the object store. It fails with ESTALE if the object has changed.
func (s *store) copy(ctx context.Context, from string, o object, to string) (copied object, err error) {
	src := minio.CopySrcOptions{Bucket: s.bucket, Object: from, MatchETag: o.etag}
	dst := minio.CopyDestOptions{Bucket: s.bucket, Object: to, Size: o.size}
	timeout := requestTimeout + time.Duration(o.size/copyRate)*time.Second
	err = s.transfers.do(ctx, timeout, func(ctx context.Context) error {
		copyObject := s.core.Client.CopyObject
		if o.size > maxCopy {
			copyObject = func(ctx context.Context, dst minio.CopyDestOptions, src minio.CopySrcOptions) (minio.UploadInfo, error) {
				return s.core.ComposeObject(ctx, dst, src)
			}
		}
		info, err := copyObject(ctx, dst, src)
		copied = object{size: o.size, etag: strings.Trim(info.ETag, `"`), mtime: o.mtime}
		return err
	})
	if isNotFound(err) {
		err = errStale
	}
	return copied, err
}

// limitedTransport limits the size of responses that minio-go reads into memory.
type limitedTransport struct{ http.RoundTripper }

// maxResponse is the maximum size of a response other than an object. A list of 1000 keys with
// escapes has up to 4 MiB.
const maxResponse = 8 << 20

var errTooLarge = errors.New("response too large")

func (t limitedTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	res, err := t.RoundTripper.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	isObject := r.Method == http.MethodGet && r.URL.RawQuery == "" && res.StatusCode < 300
	if !isObject {
		res.Body = &limitedBody{res.Body, maxResponse}
	}
	return res, nil
}

type limitedBody struct {
	io.ReadCloser
	left int
}

func (b *limitedBody) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, errTooLarge
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}
