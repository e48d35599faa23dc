package api

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/api/signedurl"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

// terminalParameters are what the bearer of the signed URL of a terminal may choose.
var terminalParameters = []string{"id", "cols", "rows", "since", "wake", "command", "cwd", "session"}

func (a *API) registerTerminalURL() {
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/terminal/url", id: "sign-terminal-url", tag: "terminals",
		summary: "Make a URL to use terminals of a sandbox without a token",
		description: "For browsers, which cannot send a token with a WebSocket. Wakes nothing; using the URL does. The URL is valid for all terminals of the sandbox; " +
			"append `id`, `cols`, `rows`, `since`, `wake`, `command`, `cwd` and `session` to its query. When it expires, its connections end. It ends earlier with the sandbox and with the node's token.",
	}, withSandboxBody(a, a.signTerminalURL))
}

func (a *API) signTerminalURL(ctx context.Context, _ *SandboxPath, body *types.SignTerminalURLRequest, sb sandbox.Sandbox) (*output[types.SignedURL], error) {
	lifetime := signedurl.DefaultLifetime
	if body.ExpiresIn != nil {
		lifetime = time.Duration(*body.ExpiresIn)
	}
	query := url.Values{}
	if body.Origin != "" {
		if !isOrigin(body.Origin) {
			return nil, invalid("body.origin", "not an origin", "use the scheme, host and port of the page, such as https://shop.example.com")
		}
		query.Set("origin", body.Origin)
	}
	signed, err := a.signURL(callOf(ctx).routed, sb, http.MethodGet, "/terminal", query, lifetime)
	signed.URL = "ws" + strings.TrimPrefix(signed.URL, "http")
	return &output[types.SignedURL]{signed}, err
}

// isOrigin reports whether s is an origin as browsers send it (RFC 6454, section 6.2).
func isOrigin(s string) bool {
	u, err := url.Parse(s)
	return err == nil && slices.Contains([]string{"http", "https"}, u.Scheme) && u.Host != "" && u.Host == strings.ToLower(u.Host) && s == u.Scheme+"://"+u.Host
}

// checkOrigin refuses a WebSocket of a page that the signed URL is not for: by default, one
// of another origin than the API's. A client without an origin is not a browser.
func checkOrigin(r *http.Request, permitted string) *problem.Problem {
	sent := r.Header.Values("Origin")
	if len(sent) == 0 {
		return nil
	}
	if permitted == "" {
		permitted = "https://" + r.Host
		if r.TLS == nil {
			permitted = "http://" + r.Host
		}
	}
	if len(sent) == 1 && strings.EqualFold(sent[0], permitted) {
		return nil
	}
	return problem.Newf(problem.OriginNotAllowed, "pages of %s may not use this URL; request one with that origin", clip(strings.Join(sent, ", ")))
}

// refuseTerminal refuses a connection to a terminal. A browser shows the response to a
// handshake that fails to no page, so with a signed URL the handshake succeeds.
func (a *API) refuseTerminal(ctx context.Context, in *terminalInput, err error) (*huma.StreamResponse, error) {
	if !callOf(ctx).signed {
		return nil, err
	}
	return &huma.StreamResponse{Body: func(huma.Context) {
		s := new(socket)
		if s.accept(a, in.Exchange) != nil {
			return
		}
		s.serve(a, func(websocket.MessageType, []byte) error { return nil }, func() error { return err }, terminalFailed)
	}}, nil
}

func terminalFailed(p *problem.Problem) any {
	return types.TerminalFailed{Type: types.TerminalMessageTypeError, Message: p.Detail, Problem: p}
}

// endAt ends the connection at the end of its signed URL.
func (s *terminalSocket) endAt(expires time.Time) (stop func() bool) {
	return time.AfterFunc(time.Until(expires), func() {
		s.cancel(problem.New(problem.SignatureExpired, "the signed URL has expired; get a new one"))
	}).Stop
}

// holdRunning holds a sandbox that runs, and wakes none. To resume on a stopped sandbox is left to
// AttachTerminal, which reports the end of the terminal and does not wake it either.
func (a *API) holdRunning(id sandbox.ID, resume bool) (release func(), _ error) {
	lease, err := a.cfg.Sandboxes.AcquireRunning(id)
	if err == nil {
		return lease.Release, nil
	}
	sb, _ := a.cfg.Sandboxes.ByID(id)
	switch stopped := sb.State == sandbox.StateStopped || sb.State == sandbox.StateArchived; {
	case !errors.Is(err, sandbox.ErrNotRunning):
		return nil, err
	case stopped && resume:
		return func() {}, nil
	case stopped:
		return nil, problem.New(problem.SandboxStopped, "the sandbox is stopped, and wake is false; connect without it to start the sandbox")
	}
	return nil, problem.New(problem.SandboxAsleep, "the sandbox is asleep, and wake is false; connect without it to wake the sandbox")
}
