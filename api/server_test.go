package api

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/danielgtaylor/huma/v2"
	"go.uber.org/goleak"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/egresstest"
	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/jupyter/jupytertest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) {
	jupytertest.Main()
	silentMain()
	// A process that was started with SIGHUP ignored, for example by nohup, passes that on
	// to its children, and a shell cannot trap it. Signals that this process catches are
	// not ignored by its children; the guest's own program does the same.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	dir, err := os.MkdirTemp("", "doze-api-")
	if err == nil {
		compiling, err = egresstest.Compiling(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		os.RemoveAll(dir)
		os.Exit(code)
	}))
}

// compiling is how tests compile policies.
var compiling policy.Config

// server is an API over a real Manager, with a client.
type server struct {
	t      testing.TB
	node   *sandboxtest.Node
	egress *egresstest.Egress
	api    *API
	http   *httptest.Server
}

func newServer(t testing.TB, limits Limits) *server {
	t.Helper()
	s := newUnstartedServer(t, limits)
	s.http.Start()
	return s
}

// newServerHTTP2 is newServer as most clients see it.
func newServerHTTP2(t testing.TB) *server {
	t.Helper()
	s := newUnstartedServer(t, Limits{})
	s.http.EnableHTTP2 = true
	s.http.StartTLS()
	return s
}

func newUnstartedServer(t testing.TB, limits Limits) *server {
	t.Helper()
	return newServerOn(t, sandboxtest.Open(t, nil), limits)
}

func newServerOn(t testing.TB, node *sandboxtest.Node, limits Limits) *server {
	t.Helper()
	s := &server{t: t, node: node, egress: egresstest.Open(t, node.Manager, compiling)}
	s.api = newAPI(t, Config{Sandboxes: s.node.Manager, Egress: s.egress.Egress, Limits: limits})
	s.http = httptest.NewUnstartedServer(s.api)
	t.Cleanup(s.http.Close)
	return s
}

// pipeListener accepts connections in memory, which block durably in a bubble of
// testing/synctest.
type pipeListener struct {
	conns  chan net.Conn
	closed context.Context
	net.Listener
}

func (l pipeListener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.conns:
		return conn, nil
	case <-l.closed.Done():
		return nil, net.ErrClosed
	}
}

func (l pipeListener) Close() error { return nil }

func (l pipeListener) dial(context.Context, string, string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	l.conns <- theirs
	return ours, nil
}

// serveInMemory serves a handler until the end of the test.
func serveInMemory(t *testing.T, handler http.Handler) pipeListener {
	t.Helper()
	l := pipeListener{conns: make(chan net.Conn), closed: t.Context()}
	server := &http.Server{Handler: handler}
	go server.Serve(l) // ended by the test's context
	t.Cleanup(func() { server.Close() })
	return l
}

// response is a response that was read to its end.
type response struct {
	status int
	header http.Header
	body   []byte
}

// request makes a request with the token; body may be nil, a string, a reader
// or something to send as JSON.
func (s *server) request(ctx context.Context, method, path string, body any, headers ...string) *http.Request {
	s.t.Helper()
	var r io.Reader
	kind := "application/json"
	switch body := body.(type) {
	case nil:
		kind = ""
	case string:
		r = strings.NewReader(body)
	case io.Reader:
		r, kind = body, "application/octet-stream"
	default:
		b, err := json.Marshal(body)
		if err != nil {
			s.t.Fatal(err)
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, s.http.URL+Prefix+path, r)
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+testToken)
	if kind != "" {
		req.Header.Set("Content-Type", kind)
	}
	for i := 0; i < len(headers); i += 2 {
		if headers[i+1] == "" {
			req.Header.Del(headers[i])
			continue
		}
		req.Header.Set(headers[i], headers[i+1])
	}
	return req
}

func (s *server) do(method, path string, body any, headers ...string) response {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	return s.send(s.request(ctx, method, path, body, headers...))
}

func (s *server) send(req *http.Request) response {
	s.t.Helper()
	resp, err := s.http.Client().Do(req)
	if err != nil {
		s.t.Fatalf("%s %s: %v", req.Method, req.URL.Path, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatalf("%s %s: %v", req.Method, req.URL.Path, err)
	}
	got := response{resp.StatusCode, resp.Header, b}
	s.checkDocumented(req, got)
	return got
}

// checkDocumented expects the status and code of a response, and its JSON, to be as the OpenAPI
// document describes them.
func (s *server) checkDocumented(req *http.Request, got response) {
	s.t.Helper()
	op, pattern := s.documented(req)
	if op == nil {
		return
	}
	response := op.Responses[strconv.Itoa(got.status)]
	if response == nil {
		s.t.Errorf("%s: the document has no status %d: %.300s", pattern, got.status, got.body)
		return
	}
	if code := got.header.Get(problem.HeaderError); code != "" && !slices.Contains(op.Extensions[codesExtension].([]string), code) {
		s.t.Errorf("%s: the document has no code %s", pattern, code)
	}
	kind, _, _ := strings.Cut(got.header.Get("Content-Type"), ";")
	content := response.Content[kind]
	if len(response.Content) > 0 && content == nil && req.Method != http.MethodHead && op.Path != "/sandbox/{id}/files/read" {
		s.t.Errorf("%s: the document has no %s at status %d", pattern, kind, got.status)
	}
	if content == nil || len(got.body) == 0 || !strings.HasSuffix(kind, "json") {
		return
	}
	var tree any
	if err := json.Unmarshal(got.body, &tree); err != nil {
		s.t.Errorf("%s: %v in %.300s", pattern, err, got.body)
		return
	}
	s.checkSchema(pattern, content.Schema, tree)
}

// documented returns the operation of a request; nil where no route matches.
func (s *server) documented(req *http.Request) (op *huma.Operation, pattern string) {
	if escaped := req.URL.EscapedPath(); path.Clean(escaped) != escaped {
		return nil, ""
	}
	_, pattern = s.api.mux.Handler(req)
	method, route, _ := strings.Cut(pattern, " ")
	return s.api.documented(method, strings.TrimPrefix(route, Prefix)), pattern
}

// checkSchema expects decoded JSON to be as a schema of the OpenAPI document describes it.
func (s *server) checkSchema(what string, schema *huma.Schema, tree any) {
	s.t.Helper()
	var result huma.ValidateResult
	where := huma.NewPathBuffer(nil, 0)
	where.Push("body")
	huma.Validate(s.api.huma.OpenAPI().Components.Schemas, schema, where, huma.ModeReadFromServer, tree, &result)
	for _, err := range result.Errors {
		s.t.Errorf("%s is not as documented: %v in %.500v", what, err, tree)
	}
}

// checkEvent expects an event of a stream to be as the OpenAPI document describes it.
func (s *server) checkEvent(req *http.Request, ev sse) {
	s.t.Helper()
	op, pattern := s.documented(req)
	content := op.Responses["200"].Content[eventStreamType]
	if content == nil {
		s.t.Errorf("%s: the document has no events", pattern)
		return
	}
	var data any
	if err := json.Unmarshal([]byte(ev.data), &data); err != nil {
		s.t.Errorf("%s: %v in %.300s", pattern, err, ev.data)
		return
	}
	for _, kind := range content.Schema.Items.OneOf {
		if kind.Properties["event"].Enum[0] == ev.name {
			s.checkSchema(pattern+": event "+ev.name, kind.Properties["data"], data)
			return
		}
	}
	s.t.Errorf("%s: the document has no event %s", pattern, ev.name)
}

// must expects a status and decodes the response.
func must[T any](s *server, want int, method, path string, body any, headers ...string) T {
	s.t.Helper()
	got := s.do(method, path, body, headers...)
	if got.status != want {
		s.t.Fatalf("%s %s: status %d, not %d: %s", method, path, got.status, want, got.body)
	}
	var v T
	if len(got.body) > 0 {
		if err := json.Unmarshal(got.body, &v); err != nil {
			s.t.Fatalf("%s %s: %v in %s", method, path, err, got.body)
		}
	}
	return v
}

// refused expects a problem document with that code.
func (s *server) refused(code problem.Code, method, path string, body any, headers ...string) problem.Problem {
	s.t.Helper()
	return s.checkProblem(code, fmt.Sprintf("%s %.100s", method, path), s.do(method, path, body, headers...))
}

func (s *server) checkProblem(code problem.Code, what string, got response) problem.Problem {
	s.t.Helper()
	var p problem.Problem
	if err := json.Unmarshal(got.body, &p); err != nil || got.header.Get("Content-Type") != problem.ContentType {
		s.t.Fatalf("%s: status %d, type %q, no problem document: %.300s", what, got.status, got.header.Get("Content-Type"), got.body)
	}
	if p.Code != code || p.Status != got.status || p.Title == "" || p.Detail == "" || p.Type != problem.TypeBase+p.Code.String() || got.header.Get(problem.HeaderError) != p.Code.String() {
		s.t.Fatalf("%s: status %d, not a whole problem with code %s: %.500s", what, got.status, code, got.body)
	}
	if id := got.header.Get("X-Request-Id"); id == "" || p.RequestID != id {
		s.t.Fatalf("%s: X-Request-Id %q, request_id %q", what, id, p.RequestID)
	}
	if want := code.Definition().Status; got.status != want {
		s.t.Fatalf("%s: status %d of %s, not %d", what, got.status, code, want)
	}
	return p
}

// create makes a sandbox and returns its id.
func (s *server) create(name string) string {
	s.t.Helper()
	return string(must[types.Sandbox](s, http.StatusCreated, "POST", "/sandbox", map[string]any{"name": name}).ID)
}

func (s *server) state(id string) sandbox.State {
	s.t.Helper()
	sb, ok := s.node.Manager.ByID(sandbox.ID(id))
	if !ok {
		s.t.Fatalf("sandbox %s is gone", id)
	}
	return sb.State
}

func (s *server) sleep(id string) {
	s.t.Helper()
	s.eventually("the sandbox sleeps", func() bool {
		return s.do("POST", "/sandbox/"+id+"/sleep", nil).status == http.StatusOK
	})
}

// eventually polls until ok holds.
func (s *server) eventually(what string, ok func() bool) {
	s.t.Helper()
	testkit.Eventually(s.t, what, ok)
}

// events is an open stream of server-sent events.
type events struct {
	t      testing.TB
	resp   *http.Response
	lines  *bufio.Reader
	cancel context.CancelFunc
	check  func(sse) // that it is as documented
}

// sse is one event; comment lines are events named ":".
type sse struct {
	id, name, data string
}

func (s *server) open(method, path string, body any, headers ...string) *events {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	req := s.request(ctx, method, path, body, headers...)
	resp, err := s.http.Client().Do(req)
	if err != nil {
		cancel()
		s.t.Fatal(err)
	}
	e := &events{t: s.t, resp: resp, lines: bufio.NewReader(resp.Body), cancel: cancel}
	e.check = func(ev sse) { s.checkEvent(req, ev) }
	s.t.Cleanup(e.close)
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != eventStreamType {
		b, _ := io.ReadAll(resp.Body)
		s.t.Fatalf("%s: status %d, type %q: %s", path, resp.StatusCode, resp.Header.Get("Content-Type"), b)
	}
	return e
}

func (e *events) close() {
	e.cancel()
	e.resp.Body.Close()
}

// next returns the next event, or false at the end of the stream.
func (e *events) next() (sse, bool) {
	e.t.Helper()
	var ev sse
	for {
		line, err := e.lines.ReadString('\n')
		if err == io.EOF && line == "" && ev == (sse{}) {
			return sse{}, false
		}
		if err != nil {
			e.t.Fatalf("stream broke: %v", err)
		}
		line = strings.TrimSuffix(line, "\n")
		key, value, _ := strings.Cut(line, ": ")
		switch {
		case line == "" && ev != (sse{}):
			if ev.name != ":" {
				e.check(ev)
			}
			return ev, true
		case line == ":":
			ev.name = ":"
		case key == "id":
			ev.id = value
		case key == "event":
			ev.name = value
		case key == "data":
			ev.data = value
		case line != "":
			e.t.Fatalf("no line of an event stream: %q", line)
		}
	}
}

// expect skips comments and expects an event of that name.
func (e *events) expect(name string) sse {
	e.t.Helper()
	for {
		ev, ok := e.next()
		if !ok {
			e.t.Fatalf("stream ended before %s", name)
		}
		if ev.name == ":" {
			continue
		}
		if ev.name != name {
			e.t.Fatalf("event %s %s, not %s", ev.name, ev.data, name)
		}
		return ev
	}
}

func (e *events) expectEnd() {
	e.t.Helper()
	for {
		ev, ok := e.next()
		if !ok {
			return
		}
		if ev.name != ":" {
			e.t.Fatalf("event %s %s after the end", ev.name, ev.data)
		}
	}
}

func parse[T any](t testing.TB, ev sse) T {
	t.Helper()
	var v T
	if err := json.Unmarshal([]byte(ev.data), &v); err != nil {
		t.Fatalf("%s: %v", ev.data, err)
	}
	return v
}

func sandboxID(id string) sandbox.ID { return sandbox.ID(id) }

func itoa(n int) string { return fmt.Sprint(n) }
