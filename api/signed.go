package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/doze-run/doze/api/signedurl"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

// SignedQuery is the part of the input of a route that accepts signed URLs. The signature
// is verified before the request is routed.
type SignedQuery struct {
	Expires   int64  `query:"expires" doc:"When a signed URL expires, in seconds since 1970"`
	Signature string `query:"signature" maxLength:"64" doc:"Signature of a signed URL, in place of a token"`
}

// signedRoute is a route that accepts signed URLs.
type signedRoute struct {
	operation string
	unsigned  []string // parameters that the bearer of the URL may choose
}

// signedCodes can come from any route that accepts signed URLs.
var signedCodes = []problem.Code{problem.SignatureInvalid, problem.SignatureExpired}

// isSigned reports whether a request has a signature. Its token, if any, is then ignored.
func isSigned(r *http.Request) bool {
	return strings.Contains(r.URL.RawQuery, signedurl.Signature+"=") && r.URL.Query().Has(signedurl.Signature)
}

// Headers of signed requests that pages of other origins may send and read.
const (
	signedRequestHeaders  = "Content-Type, Content-Range, Content-Digest, Repr-Digest, Range, If-Range, If-Match, If-None-Match, X-Request-Id"
	signedResponseHeaders = "Accept-Ranges, Content-Disposition, Content-Length, Content-Range, ETag, Doze-Error, Retry-After, X-Request-Id"
	// preflightMaxAge is how long browsers may cache a preflight, in seconds: the most that
	// Chromium does.
	preflightMaxAge = "7200"
)

// allowOrigins lets pages of any origin use a signed URL: its signature is all that it
// needs, and a browser adds no cookie or token to a response that allows any origin
// (https://fetch.spec.whatwg.org/#cors-protocol-and-credentials). It responds to a
// preflight, and then returns true. Tokens have no part in this: a page of another origin
// cannot send one.
func allowOrigins(w http.ResponseWriter, r *http.Request) (preflight bool) {
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Expose-Headers", signedResponseHeaders)
	h.Set("Cross-Origin-Resource-Policy", "cross-origin")
	if r.Method != http.MethodOptions || r.Header.Get("Access-Control-Request-Method") == "" {
		return false
	}
	h.Set("Access-Control-Allow-Methods", "GET, HEAD, PUT")
	h.Set("Access-Control-Allow-Headers", signedRequestHeaders)
	h.Set("Access-Control-Max-Age", preflightMaxAge)
	w.WriteHeader(http.StatusNoContent)
	return true
}

// verifySigned returns the owner of the sandbox that a signed URL is for, or the refusal.
func (a *API) verifySigned(r *http.Request) (string, *problem.Problem) {
	_, pattern := a.mux.Handler(r)
	route, ok := a.signed[pattern]
	if !ok {
		return "", problem.Newf(problem.Unauthorized, "%s %s accepts no signed URLs; send the header Authorization: Bearer TOKEN", clip(r.Method), clip(r.URL.Path)).
			WithHeader("WWW-Authenticate", `Bearer realm="doze"`)
	}
	id, _, _ := strings.Cut(strings.TrimPrefix(r.URL.EscapedPath(), Prefix+"/sandbox/"), "/")
	sb, err := a.signedSandbox(id)
	if err != nil {
		return "", problemOf(r.Context(), err)
	}
	method, _, _ := strings.Cut(pattern, " ") // GET for HEAD
	permission := signedurl.Permission{Purpose: route.operation, Method: method, Sandbox: string(sb.ID), Owner: sb.Owner}
	query := r.URL.Query()
	for _, name := range route.unsigned {
		query.Del(name)
	}
	return sb.Owner, a.checkSignature(permission, query)
}

// checkSignature returns the refusal of a query that was not signed for the permission.
func (a *API) checkSignature(p signedurl.Permission, query url.Values) *problem.Problem {
	err := a.cfg.Signer.Verify(p, query)
	switch {
	case errors.Is(err, signedurl.ErrExpired):
		return problem.New(problem.SignatureExpired, "the signed URL has expired; get a new one")
	case err != nil:
		return problem.New(problem.SignatureInvalid, "the URL was not signed for this request, was changed, or was signed before the node's token changed; use it exactly as the node returned it")
	}
	return nil
}

// signedSandbox returns the sandbox with an id. A name may look like an id of another
// sandbox.
func (a *API) signedSandbox(id string) (sandbox.Sandbox, error) {
	sb, ok := a.cfg.Sandboxes.ByID(sandbox.ID(id))
	if !ok {
		return sandbox.Sandbox{}, fmt.Errorf("sandbox %q: %w", clip(id), sandbox.ErrNotFound)
	}
	return sb, nil
}

// signURL signs a URL for a request to a route of a sandbox that accepts signed URLs. suffix
// is the route's path after the sandbox's id. The URL has the scheme and host of r. It
// refuses a lifetime that is out of range as the field expires_in of the body.
func (a *API) signURL(r *http.Request, sb sandbox.Sandbox, method, suffix string, query url.Values, lifetime time.Duration) (types.SignedURL, error) {
	route, ok := a.signed[method+" "+Prefix+"/sandbox/{id}"+suffix]
	if !ok {
		return types.SignedURL{}, fmt.Errorf("%s %s accepts no signed URLs", method, suffix)
	}
	signed, expires, err := a.cfg.Signer.Sign(signedurl.Permission{Purpose: route.operation, Method: method, Sandbox: string(sb.ID), Owner: sb.Owner}, query, lifetime)
	if outOfRange, ok := errors.AsType[*signedurl.LifetimeError](err); ok {
		return types.SignedURL{}, invalid("body.expires_in", outOfRange.Lifetime.String()+" is out of range", `use "1s" to "168h"`)
	}
	if err != nil {
		return types.SignedURL{}, err
	}
	address := url.URL{Scheme: "https", Host: r.Host, Path: Prefix + "/sandbox/" + string(sb.ID) + suffix, RawQuery: signed.Encode()}
	if r.TLS == nil {
		address.Scheme = "http"
	}
	return types.SignedURL{URL: address.String(), Method: method, ExpiresAt: expires}, nil
}

func (a *API) registerSignedURLs() {
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/files/url", id: "sign-file-url", tag: "files",
		summary: "Make a URL to read or write one file without a token",
		description: "Wakes nothing; using the URL does. The URL is valid for one path and one operation until it expires, also more " +
			"than once. It ends earlier with the sandbox and with the node's token. Web pages of any origin can use it.",
	}, withSandboxBody(a, a.signFileURL))
}

func (a *API) signFileURL(ctx context.Context, _ *SandboxPath, body *types.SignFileURLRequest, sb sandbox.Sandbox) (*output[types.SignedURL], error) {
	if err := checkPath("body.path", body.Path); err != nil {
		return nil, err
	}
	lifetime := signedurl.DefaultLifetime
	if body.ExpiresIn != nil {
		lifetime = time.Duration(*body.ExpiresIn)
	}
	query := pathQuery(body.Path)
	method, suffix := http.MethodGet, "/files/read"
	switch write := body.Operation == types.FileOperationWrite; {
	case write && body.Disposition != "":
		return nil, invalid("body.disposition", "applies to the operation read only", "omit it")
	case write:
		method, suffix = http.MethodPut, "/files/write"
		setIf(query, "mode", body.Mode)
		if body.CreateNew {
			query.Set("create_new", "true")
		}
		if body.MaxBytes > 0 {
			query.Set("max_bytes", strconv.FormatInt(body.MaxBytes, 10))
		}
	case body.Mode != "":
		return nil, invalid("body.mode", "applies to the operation write only", "omit it")
	case body.CreateNew:
		return nil, invalid("body.create_new", "applies to the operation write only", "omit it")
	case body.MaxBytes != 0:
		return nil, invalid("body.max_bytes", "applies to the operation write only", "omit it")
	default:
		query.Set("disposition", string(body.Disposition))
		if body.Disposition == "" {
			query.Set("disposition", string(types.DispositionAttachment))
		}
	}
	signed, err := a.signURL(callOf(ctx).routed, sb, method, suffix, query, lifetime)
	return &output[types.SignedURL]{signed}, err
}

func pathQuery(path string) url.Values { return url.Values{"path": {path}} }

// setIf sets a parameter that has a value.
func setIf(query url.Values, name, value string) {
	if value != "" {
		query.Set(name, value)
	}
}
