// Package client speaks the HTTP API of a node. It imports nothing of the node
// but the types of the API and its problems.
//
// Responses are limited in size. Calls have no timeout of their own, because a create may
// pull an image and a command may run for hours: end their context.
package client

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"
)

// DefaultURL is the API of a node as `make up` starts it, on this machine. It is an
// address and not a name, because the resolvers of many systems do not know names under
// localhost, and ::1 may come first for localhost itself.
const DefaultURL = "https://127.0.0.1:8443/api/v1"

// maxResponse limits a JSON response. The largest is the output of a command: twice
// 10 MiB, in base64 or escaped.
const maxResponse = 64 << 20

// maxProblem limits a problem document.
const maxProblem = 1 << 20

// Config of a Client.
type Config struct {
	// URL of the API, with its prefix. Default: DefaultURL.
	URL string
	// Token is sent as the bearer token. Empty sends none.
	Token string
	// CAFile contains the certificates that may sign the node's, in PEM, in addition to the
	// system's. Empty means the system's.
	CAFile string
	// UserAgent names the program. Default: doze-client.
	UserAgent string
}

// Client calls one node. It is safe for concurrent use.
type Client struct {
	base      string
	token     string
	userAgent string
	http      *http.Client
	http1     *http.Client // speaks HTTP/1.1 alone
}

// transferBuffer is for bodies that are sent in chunks of 32 KiB.
const transferBuffer = 64 << 10

// New returns a client. It connects with the first call.
func New(cfg Config) (*Client, error) {
	if cfg.URL == "" {
		cfg.URL = DefaultURL
	}
	if cfg.UserAgent == "" {
		cfg.UserAgent = "doze-client"
	}
	base, err := url.Parse(cfg.URL)
	if err != nil || base.Host == "" || base.Scheme != "https" && base.Scheme != "http" {
		return nil, fmt.Errorf("%q is not the URL of an API; write it like %s", cfg.URL, DefaultURL)
	}
	if base.Scheme == "http" && !IsLoopback(base.Hostname()) {
		return nil, fmt.Errorf("%s would send the token unencrypted; use https", cfg.URL)
	}
	if strings.ContainsFunc(cfg.Token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, errors.New("the token has blanks or other characters that tokens cannot have; copy it again")
	}
	roots, err := loadRoots(cfg.CAFile)
	if err != nil {
		return nil, err
	}
	transport := func(http2 bool) *http.Transport {
		return &http.Transport{
			Proxy:               proxy,
			DialContext:         dialContext,
			TLSClientConfig:     &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
			ForceAttemptHTTP2:   http2,
			TLSHandshakeTimeout: 10 * time.Second,
			IdleConnTimeout:     90 * time.Second,
			WriteBufferSize:     transferBuffer,
			// Ends the streams of a node that disappeared without closing its connections.
			HTTP2: &http.HTTP2Config{SendPingTimeout: 20 * time.Second, PingTimeout: 15 * time.Second},
		}
	}
	// The API does not redirect; following would send the token elsewhere.
	noRedirect := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &Client{
		base:      strings.TrimSuffix(base.String(), "/"),
		token:     cfg.Token,
		userAgent: cfg.UserAgent,
		http:      &http.Client{Transport: transport(true), CheckRedirect: noRedirect},
		http1:     &http.Client{Transport: transport(false), CheckRedirect: noRedirect},
	}, nil
}

// Close closes idle connections.
func (c *Client) Close() {
	c.http.CloseIdleConnections()
	c.http1.CloseIdleConnections()
}

func loadRoots(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read the CA: %w", err)
	}
	roots, err := x509.SystemCertPool()
	if err != nil {
		roots = x509.NewCertPool()
	}
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s contains no certificate in PEM", file)
	}
	return roots, nil
}

// request is one call of the API.
type request struct {
	method string // empty means GET
	path   string // after the prefix, escaped
	query  url.Values
	accept string
	// body is sent as JSON, raw as it is with contentType. At most one is set.
	body        any
	raw         io.Reader
	contentType string
	header      http.Header
	// transfer is for requests that move files: over HTTP/1.1, because HTTP/2 needs three times as
	// many system calls for that.
	transfer bool
}

// send makes the call and returns its response, whose body the caller closes. An error
// response is returned as *problem.Problem, or *UnexpectedResponseError if it does not
// come from a node.
func (c *Client) send(ctx context.Context, r request) (*http.Response, error) {
	r.method = cmp.Or(r.method, http.MethodGet)
	body, contentType := r.raw, r.contentType
	if r.body != nil {
		encoded, err := json.Marshal(r.body)
		if err != nil {
			return nil, err
		}
		body, contentType = bytes.NewReader(encoded), "application/json"
	}
	address := c.base + r.path
	if len(r.query) > 0 {
		address += "?" + r.query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, r.method, address, body)
	if err != nil {
		return nil, err
	}
	for key, values := range r.header {
		req.Header[key] = values
	}
	c.identify(req.Header)
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	if r.accept != "" {
		req.Header.Set("Accept", r.accept)
	}
	web := c.http
	if r.transfer {
		web = c.http1
	}
	resp, err := web.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, c.unreachable(err)
	}
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		defer resp.Body.Close()
		return nil, readError(resp)
	}
	return resp, nil
}

// identify sets the headers of every request.
func (c *Client) identify(h http.Header) {
	h.Set("User-Agent", c.userAgent)
	if c.token != "" {
		h.Set("Authorization", "Bearer "+c.token)
	}
}

// call makes the call and decodes its JSON response into out, unless out is nil.
func (c *Client) call(ctx context.Context, r request, out any) (status int, err error) {
	resp, err := c.send(ctx, r)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if out == nil {
		return resp.StatusCode, nil
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse+1))
	switch {
	case ctx.Err() != nil:
		return 0, ctx.Err()
	case err != nil:
		return 0, fmt.Errorf("read the response to %s %s: %w", resp.Request.Method, r.path, err)
	case len(body) > maxResponse:
		return 0, fmt.Errorf("the response to %s %s has more than %d MiB", resp.Request.Method, r.path, maxResponse>>20)
	}
	if err := json.Unmarshal(body, out); err != nil {
		return 0, fmt.Errorf("unexpected response to %s %s: %w", resp.Request.Method, r.path, err)
	}
	return resp.StatusCode, nil
}

func (c *Client) delete(ctx context.Context, path string) error {
	_, err := c.call(ctx, request{method: http.MethodDelete, path: path}, nil)
	return err
}

// fetch makes the call and returns its JSON response.
func fetch[T any](ctx context.Context, c *Client, r request) (value T, err error) {
	_, err = c.call(ctx, r, &value)
	return value, err
}

// pageLimit is how many entries one call requests of a list, the maximum of a node.
const pageLimit = 1000

// fetchAll returns the entries of all pages of a list. split returns the entries of a page
// and its next_cursor.
func fetchAll[P, T any](ctx context.Context, c *Client, r request, split func(P) ([]T, string)) ([]T, error) {
	all := []T{}
	r.query.Set("limit", strconv.Itoa(pageLimit))
	for {
		page, err := fetch[P](ctx, c, r)
		if err != nil {
			return nil, err
		}
		entries, next := split(page)
		all = append(all, entries...)
		if next == "" || next == r.query.Get("cursor") {
			return all, nil
		}
		r.query.Set("cursor", next)
	}
}

// UnreachableError is the failure to reach a node.
type UnreachableError struct {
	URL string
	Err error
}

func (e *UnreachableError) Error() string {
	return fmt.Sprintf("the node at %s does not respond: %v", e.URL, e.Err)
}

func (e *UnreachableError) Unwrap() error { return e.Err }

func (c *Client) unreachable(err error) error {
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		err = wrapped.Err
	}
	return &UnreachableError{URL: c.base, Err: err}
}

// sandboxPath returns the path of a route of a sandbox. It escapes only idOrName.
func sandboxPath(idOrName string, parts ...string) string {
	path := "/sandbox/" + url.PathEscape(idOrName)
	for _, part := range parts {
		path += "/" + part
	}
	return path
}
