package api

import (
	"context"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/api/signedurl"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// signTerminal makes a signed URL for terminals of sandbox box.
func (s *server) signTerminal(request map[string]any) string {
	s.t.Helper()
	signed := must[types.SignedURL](s, http.StatusOK, "POST", "/sandbox/box/terminal/url", request)
	if !strings.HasPrefix(signed.URL, "ws"+strings.TrimPrefix(s.http.URL, "http")+Prefix+"/sandbox/") || signed.Method != "GET" {
		s.t.Fatalf("got %+v", signed)
	}
	return signed.URL
}

// dialSigned connects as a browser does: without a token, and with an origin unless that is empty.
func (s *server) dialSigned(address, origin string) (*wsTerminal, *http.Response) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), testkit.Patience)
	s.t.Cleanup(cancel)
	header := http.Header{}
	if origin != "" {
		header.Set("Origin", origin)
	}
	conn, resp, err := websocket.Dial(ctx, address, &websocket.DialOptions{HTTPClient: s.http.Client(), HTTPHeader: header})
	if err != nil {
		if resp == nil {
			s.t.Fatal(err)
		}
		return nil, resp
	}
	s.t.Cleanup(func() { conn.CloseNow() })
	conn.SetReadLimit(1 << 20)
	return &wsTerminal{wsExec: &wsExec{t: s.t, conn: conn, requestID: resp.Header.Get("X-Request-Id")}}, resp
}

func TestSignedTerminalURLNeedsNoToken(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	address := s.signTerminal(map[string]any{"expires_in": "12h"})
	w, _ := s.dialSigned(address+"&id=main&cols=90&rows=20&wake=true&cwd=/&command="+url.QueryEscape("pwd; stty size; cat"), s.http.URL)
	w.sees("/\r\n20 90\r\n")
	w.awaitReady()
	again, _ := s.dialSigned(address+"&id=main&since=0", "") // not a browser
	again.sees("20 90")
	w.types("typed\r")
	again.sees("typed")

	other := must[types.Sandbox](s, http.StatusCreated, "POST", "/sandbox", types.CreateSandboxRequest{Name: "other"}).ID
	box := must[types.Sandbox](s, http.StatusOK, "GET", "/sandbox/box", nil).ID
	later := func(address string) string {
		u, _ := url.Parse(address)
		q := u.Query()
		q.Set("expires", "99999999999")
		u.RawQuery = q.Encode()
		return u.String()
	}
	file := "ws" + strings.TrimPrefix(must[types.SignedURL](s, http.StatusOK, "POST", "/sandbox/box/files/url", map[string]any{"path": "/etc/hostname"}).URL, "http")
	for name, refused := range map[string]string{
		"another sandbox":  strings.Replace(address, box, other, 1),
		"a later end":      later(address),
		"another origin":   address + "&origin=https://shop.example.com",
		"a file's":         strings.Replace(file, "/files/read", "/terminal", 1),
		"another sandbox'": strings.Replace(s.signTerminal(map[string]any{}), box, other, 1),
	} {
		w, resp := s.dialSigned(refused, s.http.URL)
		if w != nil || resp.StatusCode != http.StatusForbidden || resp.Header.Get(problem.HeaderError) != problem.SignatureInvalid.String() {
			t.Errorf("%s: %v", name, resp.Header)
		}
	}
	// It is for nothing else.
	for _, route := range []string{"", "/terminals", "/exec", "/files/read"} {
		req := s.request(t.Context(), "GET", "/sandbox/"+box+route+address[strings.Index(address, "?"):], nil, "Authorization", "")
		if got := s.send(req); got.status != http.StatusUnauthorized && got.status != http.StatusForbidden {
			t.Errorf("GET %s: status %d", route, got.status)
		}
	}
}

func TestSignedTerminalURLIsForOneOrigin(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	const shop = "https://shop.example.com"
	own, shops := s.signTerminal(map[string]any{})+"&id=main", s.signTerminal(map[string]any{"origin": shop})+"&id=main"
	for _, test := range []struct {
		address, origin string
		allowed         bool
	}{
		{own, s.http.URL, true},
		{own, "", true},
		{own, shop, false},
		{own, strings.Replace(s.http.URL, "http:", "https:", 1), false},
		{own, s.http.URL + "1", false},
		{own, "null", false},
		{shops, shop, true},
		{shops, "HTTPS://SHOP.example.com", true},
		{shops, "", true},
		{shops, s.http.URL, false},
		{shops, "https://shop.example.com:8443", false},
		{shops, "https://shop.example.com.evil.example", false},
		{shops, "null", false},
	} {
		w, resp := s.dialSigned(test.address, test.origin)
		if (w != nil) != test.allowed || w == nil && resp.Header.Get(problem.HeaderError) != problem.OriginNotAllowed.String() {
			t.Errorf("%q at %s: %d %v", test.origin, test.address[:60], resp.StatusCode, resp.Header)
		}
	}
	if n := len(s.terminals()); n != 1 {
		t.Errorf("%d terminals", n)
	}
	for _, origin := range []string{"null", "*", "shop.example.com", "https://shop.example.com/", "https://user@shop.example.com", "HTTPS://shop.example.com", "https://Shop.example.com", "ftp://shop.example.com", "https://", "https://shop.example.com?x"} {
		s.refused(problem.RequestInvalid, "POST", "/sandbox/box/terminal/url", map[string]any{"origin": origin})
	}
	for _, lifetime := range []string{"0s", "-1s", "169h"} {
		s.refused(problem.RequestInvalid, "POST", "/sandbox/box/terminal/url", map[string]any{"expires_in": lifetime})
	}
}

// A browser shows its page no response to a handshake that fails.
func TestSignedTerminalURLReportsRefusalsInTheWebSocket(t *testing.T) {
	s := newServer(t, Limits{MaxStreams: 1})
	s.create("box")
	address := s.signTerminal(map[string]any{})
	unused := func() {
		s.eventually("the streams are closed", func() bool { return s.api.streams.pool.Used() == 0 })
	}
	w, _ := s.dialSigned(address+"&id=gone&since=10", s.http.URL)
	w.expectFailed(problem.TerminalNotFound, "gone")
	w, _ = s.dialSigned(address+"&since=10", s.http.URL)
	w.expectFailed(problem.RequestInvalid, "no id given")
	w, _ = s.dialSigned(address+"&cwd=relative", s.http.URL)
	w.expectFailed(problem.RequestInvalid, "query.cwd")
	unused()
	w, _ = s.dialSigned(address+"&command="+url.QueryEscape("true")+"&cwd=/does/not/exist", s.http.URL)
	w.expectFailed(problem.PathNotFound, "")
	unused()
	only := s.dialTerminal("id=main&command=cat").awaitReady()
	w, _ = s.dialSigned(address+"&id=main", s.http.URL)
	w.expectFailed(problem.StreamLimitExceeded, "streams are open")
	only.conn.CloseNow()
	// With a token it is the response.
	s.refused(problem.UpgradeRequired, "GET", "/sandbox/box/terminal", nil)
}

func TestTerminalEndsWithItsSignedURL(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	var address string
	var w *wsTerminal
	for lifetime := time.Second; w == nil; lifetime *= 2 { // on a slow machine it may expire before it is used
		address = s.signTerminal(map[string]any{"expires_in": lifetime.String()}) + "&id=main"
		w, _ = s.dialSigned(address, s.http.URL)
	}
	w.expectFailed(problem.SignatureExpired, "expired")
	if _, resp := s.dialSigned(address, s.http.URL); resp.Header.Get(problem.HeaderError) != problem.SignatureExpired.String() {
		t.Errorf("got %v", resp.Header)
	}
	if list := s.terminals(); len(list) != 1 || list[0].State != types.ProcessStateRunning {
		t.Errorf("the terminal ended with the connection: %+v", list)
	}
}

func TestNewTokenEndsSignedTerminalURLs(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	address := s.signTerminal(map[string]any{})
	next := newAPI(t, Config{Sandboxes: s.node.Manager, Egress: s.egress.Egress, Signer: signedurl.New([]byte(strings.Repeat("k", 32)), TokenGeneration("another"))})
	server := httptest.NewServer(next)
	t.Cleanup(server.Close)
	u, _ := url.Parse(address)
	u.Host = strings.TrimPrefix(server.URL, "http://")
	if _, resp := s.dialSigned(u.String(), server.URL); resp.Header.Get(problem.HeaderError) != problem.SignatureInvalid.String() {
		t.Errorf("got %v", resp.Header)
	}
}

func TestReconnectingAndResizingDoNotWake(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	address := s.signTerminal(map[string]any{}) + "&id=main"
	w, _ := s.dialSigned(address, "")
	w.awaitReady()
	w.types("PS1='rea''dy> '\r")
	w.sees("ready> ")
	s.sleep(id)

	w.sendJSON(types.TerminalResize{Type: types.TerminalMessageTypeResize, Cols: 111, Rows: 33})
	for _, query := range []string{"&wake=false", "&wake=false&since=0"} {
		refused, _ := s.dialSigned(address+query, "")
		refused.expectFailed(problem.SandboxAsleep, "asleep")
	}
	s.checkProblem(problem.UpgradeRequired, "WebSocket", s.do("GET", "/sandbox/box/terminal?wake=false", nil))
	if state := s.state(id); state != sandbox.StateAsleep {
		t.Fatalf("the sandbox is %s", state)
	}
	w.types("stty size\r")
	w.sees("33 111")
	running, _ := s.dialSigned(address+"&wake=false", "")
	running.sees("33 111")
}

func TestTerminalPageNeedsNoToken(t *testing.T) {
	s := newServer(t, Limits{})
	get := func(method, path string) response {
		req, err := http.NewRequestWithContext(t.Context(), method, s.http.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := s.http.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return response{resp.StatusCode, resp.Header, nil}
	}
	if got := get("GET", "/terminal/box"); got.status != http.StatusOK || !strings.Contains(got.header.Get("Content-Security-Policy"), "script-src 'self'") || got.header.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("got %+v", got)
	}
	for path, want := range map[string]int{
		"/terminal/": http.StatusNotFound, "/terminal": http.StatusUnauthorized, "/terminal/box/x": http.StatusNotFound, "/terminal/assets/0123/x.js": http.StatusNotFound,
		"/terminal/../api/v1/sandbox": http.StatusNotFound, "/terminal//api/v1/sandbox": http.StatusNotFound, "/terminal/%2e%2e/api/v1/sandbox": http.StatusNotFound,
	} {
		if got := get("GET", path); got.status != want {
			t.Errorf("%s: %d, want %d", path, got.status, want)
		}
	}
	if got := get("POST", "/terminal/box"); got.status != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", got.status)
	}
}
