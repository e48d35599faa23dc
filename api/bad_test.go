package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

func TestBadBodiesAreRefused(t *testing.T) {
	s := newServer(t, Limits{})
	for _, tc := range []struct {
		name, body string
		code       problem.Code
		says       string // in the detail
	}{
		{"empty", ``, problem.JSONInvalid, "empty"},
		{"no JSON", `name=shop`, problem.JSONInvalid, "JSON object"},
		{"half", `{"name":"sh`, problem.JSONInvalid, "JSON object"},
		{"two", `{}{}`, problem.JSONInvalid, "JSON object"},
		{"no UTF-8", "{\"name\":\"\xff\"}", problem.JSONInvalid, "UTF-8"},
		{"deep", strings.Repeat("[", 50_000), problem.JSONInvalid, "depth of 10000"},
		{"list", `[]`, problem.RequestInvalid, "object"},
		{"null", `null`, problem.RequestInvalid, "object"},
		{"text", `"shop"`, problem.RequestInvalid, "object"},
		{"unknown field", `{"nam":"shop"}`, problem.RequestInvalid, "body.nam: unknown field; the fields are archive_after, env, image, labels, name, persist, size, sleep_after, snapshot, stop_after"},
		{"field in another case", `{"Name":"shop"}`, problem.RequestInvalid, "body.Name: unknown field; the fields are archive_after, env,"},
		{"field twice", `{"name":"a","name":"b"}`, problem.RequestInvalid, "body.name: duplicate field"},
		{"variable twice", `{"env":{"A":"1","B":"2","A":"3"}}`, problem.RequestInvalid, "body.env.A: duplicate field"},
		{"twice deep below", strings.Repeat(`{"`+strings.Repeat("x", 99)+`":`, 5_000) + `{"a":1,"a":2}` + strings.Repeat("}", 5_000), problem.RequestInvalid, "duplicate field"},
		{"wrong type", `{"name":7}`, problem.RequestInvalid, "body.name: expected string"},
		{"bad duration", `{"sleep_after":"soon"}`, problem.RequestInvalid, `"60s"`},
		{"number for a duration", `{"sleep_after":60}`, problem.RequestInvalid, "expected string"},
		{"negative duration", `{"sleep_after":"-1s"}`, problem.RequestInvalid, `"60s"`},
		{"duration out of range", `{"sleep_after":"1ms"}`, problem.RequestInvalid, "sleep_after"},
		{"enormous duration", `{"sleep_after":"99999999999999999h"}`, problem.RequestInvalid, "duration"},
		{"bad name", `{"name":"Not A Name"}`, problem.NameInvalid, "hyphens"},
		{"long name", `{"name":"` + strings.Repeat("x", 900_000) + `"}`, problem.NameInvalid, "63"},
		{"huge name", `{"name":"` + strings.Repeat("x", 2<<20) + `"}`, problem.BodyTooLarge, "1048576"},
		{"image that is not allowed", `{"image":"docker.io/evil"}`, problem.ImageNotAllowed, "base"},
		{"unknown size", `{"size":"giant"}`, problem.RequestInvalid, "lite"},
		{"bad env name", `{"env":{"A=B":"c"}}`, problem.RequestInvalid, "env"},
		{"env with NUL", `{"env":{"A":"\u0000"}}`, problem.RequestInvalid, "NUL"},
		{"oversized env", `{"env":{"A":"` + strings.Repeat("x", 100_000) + `"}}`, problem.RequestInvalid, "at most"},
		{"bad label", `{"labels":{" ":"x"}}`, problem.RequestInvalid, "labels"},
		{"label that is not text", `{"labels":{"a":1}}`, problem.RequestInvalid, "expected string"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := s.refused(tc.code, "POST", "/sandbox", tc.body)
			if !strings.Contains(p.Detail, tc.says) {
				t.Errorf("detail is %.300q", p.Detail)
			}
			if b, _ := json.Marshal(p); len(b) > 8<<10 {
				t.Errorf("the response has %d bytes", len(b))
			}
		})
	}
	if n := s.node.Engine.Created(); n != 0 {
		t.Errorf("refusals made %d containers", n)
	}
}

// Bodies are in memory until the response is written.
func TestLargeBodiesCountAsCalls(t *testing.T) {
	s := newServer(t, Limits{MaxCalls: 1})
	if err := s.api.calls.pool.TryAcquire(1); err != nil {
		t.Fatal(err)
	}
	const small, large = `{"name":"Not a name"}`, smallBody + 1
	s.refused(problem.NameInvalid, "POST", "/sandbox", small)
	padded := small + strings.Repeat(" ", large-len(small))
	s.refused(problem.CallLimitExceeded, "POST", "/sandbox", padded)
	s.refused(problem.CallLimitExceeded, "POST", "/sandbox", io.MultiReader(strings.NewReader(small)), "Content-Type", "application/json")
	s.refused(problem.BodyTooLarge, "GET", "/sandbox", padded)
	s.api.calls.pool.Release(1)
	s.refused(problem.NameInvalid, "POST", "/sandbox", padded)
	s.create("box")
	s.refused(problem.CallLimitExceeded, "PUT", "/sandbox/box/files/write", padded) // up to 4 MiB
	if n := s.api.calls.pool.Used(); n != 0 {
		t.Errorf("%d slots are held", n)
	}
}

func TestParametersAreCheckedBeforeTheBody(t *testing.T) {
	s := newServer(t, Limits{})
	for _, body := range []string{"{", `{"name":1}`, ""} {
		p := s.refused(problem.RequestInvalid, "POST", "/sandbox/"+strings.Repeat("x", 256)+"/exec", body)
		if len(p.Errors) != 1 || p.Errors[0].Location != "path.id" {
			t.Errorf("the faults are %+v", p.Errors)
		}
	}
	s.refused(problem.JSONInvalid, "POST", "/sandbox/"+strings.Repeat("x", 255)+"/exec", "{")
}

func TestManyFaultsMakeAShortResponse(t *testing.T) {
	s := newServer(t, Limits{})
	var body strings.Builder
	body.WriteString(`{`)
	for i := range 20_000 {
		body.WriteString(`"` + strings.Repeat("é", 3) + itoa(i) + `":1,`)
	}
	body.WriteString(`"name":"x"}`)
	p := s.refused(problem.RequestInvalid, "POST", "/sandbox", body.String())
	if len(p.Errors) != maxFaults {
		t.Errorf("%d faults are listed", len(p.Errors))
	}
}

func TestWrongContentTypeIsRefused(t *testing.T) {
	s := newServer(t, Limits{})
	for _, kind := range []string{"text/plain", "application/xml", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "nonsense", "application/jsonp"} {
		p := s.refused(problem.MediaTypeUnsupported, "POST", "/sandbox", `{}`, "Content-Type", kind)
		if !strings.Contains(p.Detail, "application/json") {
			t.Errorf("detail is %q", p.Detail)
		}
	}
	for _, kind := range []string{"", "application/json", "application/json; charset=utf-8", "Application/JSON;charset=\"a+b\""} {
		must[types.Sandbox](s, http.StatusCreated, "POST", "/sandbox", `{}`, "Content-Type", kind)
	}
}

func TestWrongAddressesAreRefused(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	for _, tc := range []struct {
		method, path string
		code         problem.Code
		says         string
	}{
		{"GET", "/", problem.RouteNotFound, "/api/v1/openapi.json"},
		{"GET", "/sandboxes", problem.RouteNotFound, "/api/v1/openapi.json"},
		{"GET", "/sandbox/box/nothing", problem.RouteNotFound, ""},
		{"GET", "/sandbox/box/exec/more", problem.RouteNotFound, ""},
		{"GET", "/sandbox/", problem.RouteNotFound, ""},
		{"GET", "//sandbox", problem.RouteNotFound, ""},
		{"GET", "/node/../sandbox", problem.RouteNotFound, ""},
		{"DELETE", "/sandbox", problem.MethodNotAllowed, "DELETE; use GET, HEAD, POST"},
		{"PUT", "/sandbox/box/exec", problem.MethodNotAllowed, "POST"},
		{"POST", "/node", problem.MethodNotAllowed, "GET"},
		{"BREW", "/node", problem.MethodNotAllowed, "GET"},
		{"POST", "/openapi.json", problem.MethodNotAllowed, "GET"},
		{"GET", "/sandbox?limit=0", problem.RequestInvalid, "query.limit"},
		{"GET", "/sandbox?limit=1001", problem.RequestInvalid, "<= 1000"},
		{"GET", "/sandbox?limit=ten", problem.RequestInvalid, "integer"},
		{"GET", "/sandbox?stat=running", problem.RequestInvalid, "the parameters are label, state, usage, cursor, limit"},
		{"GET", "/sandbox?state=bored", problem.RequestInvalid, "asleep"},
		{"GET", "/sandbox?label=x", problem.RequestInvalid, "key=value"},
		{"GET", "/sandbox?label=", problem.RequestInvalid, "key=value"},
		{"GET", "/sandbox?label==x", problem.RequestInvalid, "key=value"},
		{"GET", "/sandbox?label=a=1&label=a=2", problem.RequestInvalid, "two values"},
		{"GET", "/sandbox?limit=1;cursor=2", problem.RequestInvalid, "query"},
		{"GET", "/sandbox?limit=%zz", problem.RequestInvalid, "query"},
		{"GET", "/sandbox?cursor=" + strings.Repeat("x", 256), problem.RequestInvalid, "255"},
		{"GET", "/sandbox?cursor=" + strings.Repeat("x", maxURI), problem.URITooLong, "16384"},
		{"GET", "/sandbox/" + strings.Repeat("x", maxURI), problem.URITooLong, ""},
		{"GET", "/sandbox/" + strings.Repeat("x", 256), problem.RequestInvalid, "255"},
		{"GET", "/sandbox/absent", problem.SandboxNotFound, "/api/v1/sandbox"},
		{"GET", "/sandbox/%2e%2e%2fetc", problem.SandboxNotFound, ""},
		{"GET", "/sandbox/%00", problem.SandboxNotFound, ""},
		{"GET", "/sandbox/BOX", problem.SandboxNotFound, ""},
		{"GET", "/node?verbose=1", problem.RequestInvalid, "this route has none"},
		{"GET", "/sandbox?limit=1&limit=2", problem.RequestInvalid, "query.limit: duplicate parameter"},
		{"GET", "/sandbox?state=", problem.RequestInvalid, "query.state: empty"},
		{"GET", "/sandbox/box/events?cursor=1&cursor=1", problem.RequestInvalid, "query.cursor"},
		{"GET", "/sandbox/box/files/read?path=/etc/hosts&path=/etc/passwd", problem.RequestInvalid, "query.path"},
		{"DELETE", "/sandbox/box/process/1?signal=", problem.RequestInvalid, "query.signal: empty"},
	} {
		p := s.refused(tc.code, tc.method, tc.path, nil)
		if !strings.Contains(p.Detail, tc.says) {
			t.Errorf("%s %.60s: detail is %q", tc.method, tc.path, p.Detail)
		}
		if len(p.Detail) > 1000 {
			t.Errorf("%s %.60s: detail has %d bytes", tc.method, tc.path, len(p.Detail))
		}
	}
}

func TestBodyOfARouteWithoutFieldsIsRefused(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	for _, route := range []string{"sleep", "stop", "wake"} {
		for body, code := range map[string]problem.Code{`{"duration":"5m"}`: problem.RequestInvalid, `5m`: problem.RequestInvalid, "{}{}": problem.RequestInvalid} {
			p := s.refused(code, "POST", "/sandbox/box/"+route, body)
			if p.Detail != "body: this route has no fields; send no body" {
				t.Errorf("detail is %q", p.Detail)
			}
		}
		s.refused(problem.MediaTypeUnsupported, "POST", "/sandbox/box/"+route, "x", "Content-Type", "text/plain")
	}
	process := must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", `{"command":"exec sleep 1000"}`).ID
	s.refused(problem.RequestInvalid, "DELETE", "/sandbox/box/process/"+process, `{"signal":"SIGHUP"}`)
	if list := must[types.ProcessList](s, http.StatusOK, "GET", "/sandbox/box/processes", nil).Processes; len(list) != 1 || list[0].State != types.ProcessStateRunning {
		t.Errorf("a refusal left %+v", list)
	}
	s.refused(problem.RequestInvalid, "DELETE", "/sandbox/box", `{"force":true}`)
	s.refused(problem.RequestInvalid, "GET", "/sandbox", `{"limit":5}`)
	if state := s.state(id); state != sandbox.StateRunning {
		t.Errorf("a refusal made it %s", state)
	}
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/sleep", `{}`)
	must[types.SandboxList](s, http.StatusOK, "GET", "/sandbox?cursor=", nil)
}

// A request without a body has an unknown length in HTTP/3, and so has an empty chunked one.
func TestBodyOfUnknownLengthMayBeEmpty(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	for _, tc := range []struct {
		method, path, body string
		want               int
	}{
		{"POST", "/sandbox/box/wake", "", http.StatusOK},
		{"POST", "/sandbox/box/wake", "{}", http.StatusOK},
		{"POST", "/sandbox/box/wake", "x", http.StatusUnprocessableEntity},
		{"GET", "/sandbox/box", "", http.StatusOK},
		{"DELETE", "/sandbox/box", "x", http.StatusUnprocessableEntity},
		{"DELETE", "/sandbox/box", "", http.StatusNoContent},
	} {
		r := s.request(t.Context(), tc.method, tc.path, tc.body)
		r.ContentLength = -1
		w := httptest.NewRecorder()
		s.api.ServeHTTP(w, r)
		if w.Code != tc.want {
			t.Errorf("%s %s with body %q: status %d: %s", tc.method, tc.path, tc.body, w.Code, w.Body)
		}
	}
}

func TestRefusalsWakeNothing(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	s.sleep(id)
	for _, route := range []string{"exec", "process"} {
		for _, body := range []string{
			`{"argv":["true"],"cwd":"relative"}`, `{"argv":["true"],"cwd":"/\u0000"}`, `{"argv":["a\u0000"]}`, `{"command":"a\u0000"}`, `{"argv":[""]}`,
			`{"argv":["true"],"env":{"A=B":"c"}}`, `{"argv":["true"],"env":{"":"c"}}`, `{"argv":["true"],"env":{"A":"\u0000"}}`,
		} {
			s.refused(problem.RequestInvalid, "POST", "/sandbox/box/"+route, body)
		}
	}
	for _, name := range []string{"a b", "-a", ".a", "a/b", strings.Repeat("x", 65)} {
		s.refused(problem.RequestInvalid, "POST", "/sandbox/box/process", map[string]any{"command": "true", "name": name})
	}
	for _, path := range []string{"/files?path=x", "/files/read?path=x", "/files/archive?path=x"} {
		s.refused(problem.RequestInvalid, "GET", "/sandbox/box"+path, nil)
	}
	s.refused(problem.RequestInvalid, "PUT", "/sandbox/box/files/write?path=/f&mode=000", strings.NewReader("x"))
	s.refused(problem.RequestInvalid, "POST", "/sandbox/box/expose", `{"port":80,"wait_timeout":"6m"}`)
	if state := s.state(id); state != sandbox.StateAsleep {
		t.Errorf("a refusal made it %s", state)
	}
}

// incompleteBody is a request whose body is not complete.
const incompleteBody = "POST /api/v1/sandbox HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + testToken + "\r\nContent-Length: 100\r\n\r\n{\"name\":"

func TestBodyThatEndsEarlyIsRefused(t *testing.T) {
	s := newServer(t, Limits{})
	conn, err := net.Dial("tcp", s.http.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	io.WriteString(conn, incompleteBody)
	conn.(*net.TCPConn).CloseWrite()
	conn.SetReadDeadline(time.Now().Add(testkit.Patience))
	got, err := io.ReadAll(io.LimitReader(conn, 4096))
	if !strings.Contains(string(got), `"code":"body_incomplete"`) {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestBodyThatStallsIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, err := serveInMemory(t, newAPI(t, Config{})).dial(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		start := time.Now()
		io.WriteString(conn, incompleteBody)
		got, err := io.ReadAll(io.LimitReader(conn, 4096))
		if !strings.Contains(string(got), `"code":"body_timeout"`) {
			t.Errorf("got %q, %v", got, err)
		}
		if took := time.Since(start); took < time.Minute {
			t.Errorf("the body was refused after %v, want the default of Stall", took)
		}
	})
}

// A reader that reads nothing must not keep a stream open indefinitely.
func TestClientThatReadsNothingIsCutOff(t *testing.T) {
	s := newServer(t, Limits{Stall: 200 * time.Millisecond})
	id := s.create("box")
	body := `{"command":"cat /dev/zero","stream":true}`
	conn, err := net.Dial("tcp", s.http.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	io.WriteString(conn, "POST /api/v1/sandbox/box/exec HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "+testToken+
		"\r\nContent-Length: "+itoa(len(body))+"\r\n\r\n"+body)
	conn.SetReadDeadline(time.Now().Add(testkit.Patience))
	if _, err := io.ReadFull(conn, make([]byte, len("HTTP/1.1 200 OK"))); err != nil { // the stream has begun
		t.Fatal(err)
	}
	s.eventually("the stream was cut off", func() bool { return s.api.streams.pool.Used() == 0 })
	s.sleep(id)
}

// heldWriter is a client that reads nothing until it is released.
type heldWriter struct {
	*httptest.ResponseRecorder
	began, release chan struct{}
	once           sync.Once
}

func (w *heldWriter) Write(b []byte) (int, error) {
	w.once.Do(func() { close(w.began) })
	<-w.release
	return w.ResponseRecorder.Write(b)
}

// Output in memory counts until a slow client has read it; it does not keep the sandbox
// awake.
func TestResponseHasItsSlotUntilItIsWritten(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	process := must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", `{"command":"echo x; exec sleep 1000"}`).ID
	for r, want := range map[*http.Request]int64{
		s.request(t.Context(), "POST", "/sandbox/box/exec", `{"command":"true","max_output_bytes":5000000}`): 5,
		s.request(t.Context(), "GET", "/sandbox/box/process/"+process+"/logs", nil):                          maxLogs >> 20,
		s.request(t.Context(), "GET", "/sandbox/box/files?"+at(t.TempDir()), nil):                            1,
	} {
		w := &heldWriter{ResponseRecorder: httptest.NewRecorder(), began: make(chan struct{}), release: make(chan struct{})}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			s.api.ServeHTTP(w, r)
		}()
		testkit.Closed(t, "the response begins", w.began)
		if n := s.api.calls.pool.Used(); n != want {
			t.Errorf("%s: %d slots are held while it is written, not %d", r.URL.Path, n, want)
		}
		s.sleep(id)
		close(w.release)
		<-ended
		if n := s.api.calls.pool.Used(); n != 0 || w.Code != http.StatusOK {
			t.Errorf("%s: %d slots are held after its end, status %d", r.URL.Path, n, w.Code)
		}
	}
}

// deadlineConn remembers which deadlines it has.
type deadlineConn struct {
	net.Conn
	mu          sync.Mutex
	read, write time.Time
}

func (c *deadlineConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.read = t
	return c.Conn.SetReadDeadline(t)
}

func (c *deadlineConn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.write = t
	return c.Conn.SetWriteDeadline(t)
}

func (c *deadlineConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *deadlineConn) deadlines() (read, write time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.read, c.write
}

type deadlineListener struct {
	net.Listener
	accepted chan *deadlineConn
}

func (l deadlineListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &deadlineConn{Conn: conn}
	l.accepted <- c
	return c, nil
}

// Connections are reused after responses that had deadlines.
func TestDeadlinesEndWithTheirResponse(t *testing.T) {
	s := newUnstartedServer(t, Limits{})
	accepted := make(chan *deadlineConn, 10)
	s.http.Listener = deadlineListener{s.http.Listener, accepted}
	s.http.Start()
	s.create("box")
	conn := <-accepted
	for range 3 {
		got := s.do("POST", "/sandbox/box/exec", `{"command":"head -c 100000 /dev/zero"}`)
		if got.status != http.StatusOK || len(got.body) < 100_000 {
			t.Fatalf("status %d, %d bytes", got.status, len(got.body))
		}
		dir := t.TempDir()
		ended := make(chan response, 1)
		go func() {
			ended <- s.do("POST", "/sandbox/box/exec", map[string]any{"command": "mkfifo gate; echo >up; cat gate", "cwd": dir})
		}()
		s.eventually("the command runs", func() bool { _, err := os.Stat(filepath.Join(dir, "up")); return err == nil })
		// Neither reading this request nor the response before has left any.
		if read, write := conn.deadlines(); !read.IsZero() || !write.IsZero() {
			t.Errorf("while the next command runs, the deadlines are %v and %v", read, write)
		}
		if err := os.WriteFile(filepath.Join(dir, "gate"), nil, 0); err != nil {
			t.Fatal(err)
		}
		if got := testkit.Receive(t, "the command ends", ended); got.status != http.StatusOK {
			t.Fatalf("status %d: %s", got.status, got.body)
		}
	}
	if len(accepted) > 0 {
		t.Error("there was another connection")
	}
}

// brokenWriter is a client that goes away without the server noticing.
type brokenWriter struct {
	*httptest.ResponseRecorder
	left int // writes that still succeed
}

func (w *brokenWriter) Write(b []byte) (int, error) {
	if w.left--; w.left < 0 {
		return 0, errors.New("broken pipe")
	}
	return w.ResponseRecorder.Write(b)
}

func TestFailedWriteEndsTheStream(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	process := must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", `{"command":"echo x; exec sleep 1000"}`).ID
	for _, r := range []*http.Request{
		s.request(t.Context(), "POST", "/sandbox/box/exec", `{"command":"echo x; exec sleep 1000","stream":true}`),
		s.request(t.Context(), "GET", "/sandbox/box/process/"+process+"/logs", nil, "Accept", eventStreamType),
		s.request(t.Context(), "GET", "/sandbox/box/events", nil, "Accept", eventStreamType),
	} {
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			s.api.ServeHTTP(&brokenWriter{ResponseRecorder: httptest.NewRecorder()}, r)
		}()
		select {
		case <-ended:
		case <-time.After(testkit.Patience):
			t.Fatalf("%s goes on", r.URL.Path)
		}
	}
	s.sleep(id)
}

func TestCreationGoesOnWithoutItsClient(t *testing.T) {
	s := newServer(t, Limits{})
	release := s.node.Engine.Block("start")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if resp, err := s.http.Client().Do(s.request(ctx, "POST", "/sandbox", `{"name":"box"}`)); err == nil {
			resp.Body.Close()
		}
	}()
	s.node.Engine.AwaitBlocked(t, "start")
	cancel()
	<-ended
	release()
	if sb := must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox", `{"name":"box"}`); sb.State != types.StateRunning {
		t.Errorf("it is %s", sb.State)
	}
	if n := s.node.Engine.Created(); n != 1 {
		t.Errorf("%d containers were made", n)
	}
}

func TestClientsGetAProblemWhenTheNodeShutsDown(t *testing.T) {
	s := newUnstartedServer(t, Limits{})
	node, exit := context.WithCancel(t.Context())
	s.http.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { // as the Caddy module does
		ctx, cancel := context.WithCancelCause(r.Context())
		defer cancel(nil)
		defer context.AfterFunc(node, func() { cancel(sandbox.ErrClosed) })()
		s.api.ServeHTTP(w, r.WithContext(ctx))
	})
	s.http.Start()
	s.create("box")
	process := must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", `{"command":"echo x; exec sleep 1000"}`).ID
	exec := s.open("POST", "/sandbox/box/exec", `{"command":"exec sleep 1000","stream":true}`)
	exec.expect("start")
	socket, _ := s.execWS(map[string]any{"argv": []string{"cat"}, "stream_stdin": true})
	logs := s.open("GET", "/sandbox/box/process/"+process+"/logs", nil, "Accept", eventStreamType)
	logs.expect("stdout")
	timeline := s.open("GET", "/sandbox/box/events?cursor=1000", nil, "Accept", eventStreamType)
	buffered := make(chan response, 1)
	go func() { buffered <- s.do("POST", "/sandbox/box/exec", `{"command":"exec sleep 1000"}`) }()
	s.eventually("the call is under way", func() bool { return s.api.calls.pool.Used() == 1 })

	exit()
	for name, stream := range map[string]*events{"exec": exec, "logs": logs, "timeline": timeline} {
		if p := parse[problem.Problem](t, stream.expect("problem")); p.Code != problem.NodeUnavailable {
			t.Errorf("%s: got %+v", name, p)
		}
		stream.expectEnd()
	}
	socket.expectProblem(problem.NodeUnavailable, "")
	got := testkit.Receive(t, "the buffered command ends", buffered)
	s.checkProblem(problem.NodeUnavailable, "the buffered command", got)
	if got.header.Get("Retry-After") == "" {
		t.Error("there is no Retry-After")
	}
	// The buffered command may not have begun.
	s.eventually("the streamed command is counted as lost", func() bool { return execs(t, s.api.cfg.Metrics)[outcomeLost] > 0 })
	if counted := execs(t, s.api.cfg.Metrics); counted[outcomeClient] > 0 {
		t.Errorf("counted were %v", counted)
	}
}

// logLines takes lines of a log.
type logLines chan string

func (l logLines) Write(b []byte) (int, error) {
	l <- string(b)
	return len(b), nil
}

// Failures of a streamed response are logged like failures before it.
func TestFailuresOfStreamsAndDownloadsAreLogged(t *testing.T) {
	s := newServer(t, Limits{})
	log := make(logLines, 10)
	s.api.cfg.Log = slog.New(slog.NewTextHandler(log, nil))
	id := s.create("box")
	path := filepath.Join(t.TempDir(), "large")
	must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?"+at(path), io.Reader(&pattern{left: 64 << 20}))
	stream := s.open("POST", "/sandbox/box/exec", `{"command":"exec sleep 1000","stream":true}`)
	stream.expect("start")
	resp, err := s.http.Client().Do(s.request(t.Context(), "GET", "/sandbox/box/files/archive?"+at(filepath.Dir(path)), nil))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	s.node.Engine.Kill(t, sandboxID(id))
	stream.expect("problem")
	io.Copy(io.Discard, resp.Body)
	missing := []string{"operation=exec sandbox=box code=guest_lost", "operation=get-archive sandbox=box code=guest_lost"}
	for len(missing) > 0 {
		select {
		case line := <-log:
			missing = slices.DeleteFunc(missing, func(part string) bool { return strings.Contains(line, part) })
		case <-time.After(testkit.Patience):
			t.Fatalf("the log lacks %q", missing)
		}
	}
}

func TestFailuresOfTheNodeHaveTheirCodes(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	s.node.Engine.Fail("image", sandbox.ErrImageMissing)
	s.refused(problem.ImageUnavailable, "POST", "/sandbox", `{"name":"other"}`)
	s.node.Engine.Fail("image", &sandbox.ImageNotBuiltError{Ref: "localhost/doze/python:latest"})
	if p := s.refused(problem.ImageUnavailable, "POST", "/sandbox", `{"name":"other"}`); !strings.Contains(p.Detail, "make image-python") {
		t.Errorf("detail is %q", p.Detail)
	}
	s.node.Engine.Fail("image", nil)
	s.node.Engine.Fail("start", errors.New("exec format error"))
	p := s.refused(problem.WakeFailed, "POST", "/sandbox", `{"name":"other"}`)
	if !strings.Contains(p.Detail, "exec format error") {
		t.Errorf("detail is %q", p.Detail)
	}
	s.node.Engine.Fail("start", sandbox.ErrEngineDown)
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/stop", nil)
	got := s.do("POST", "/sandbox/box/wake", nil)
	s.checkProblem(problem.EngineUnavailable, "wake", got)
	if got.header.Get("Retry-After") == "" {
		t.Error("there is no Retry-After")
	}
	s.refused(problem.EngineUnavailable, "POST", "/sandbox/box/exec", `{"command":"true"}`)
	s.node.Engine.Fail("start", nil)
	s.node.Store.Fill(true)
	s.refused(problem.NodeDiskFull, "POST", "/sandbox/box/expose", `{"port":3000}`)
	s.refused(problem.NodeDiskFull, "PATCH", "/sandbox/"+id, `{"labels":{}}`)
	s.node.Store.Fill(false)
	if sb := must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/wake", nil); len(sb.Ports) != 0 {
		t.Errorf("a refused port was exposed: %+v", sb.Ports)
	}
}

func TestEveryErrorHasItsProblem(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	closing, end := context.WithCancelCause(t.Context())
	end(sandbox.ErrClosed)
	wake := func(err error) error { return &sandbox.WakeError{ID: "abc", Err: err, LastLog: "last words"} }
	for _, tc := range []struct {
		name string
		ctx  context.Context
		err  error
		want problem.Code
	}{
		{"not found", nil, sandbox.ErrNotFound, problem.SandboxNotFound},
		{"destroyed", nil, wake(sandbox.ErrDestroyed), problem.SandboxDestroyed},
		{"waiters", nil, sandbox.ErrTooManyWaiters, problem.WaiterLimitExceeded},
		{"sandboxes", nil, sandbox.ErrTooManySandboxes, problem.SandboxLimitExceeded},
		{"busy", nil, sandbox.ErrBusy, problem.SandboxBusy},
		{"closed", nil, sandbox.ErrClosed, problem.NodeUnavailable},
		{"image", nil, wake(sandbox.ErrImageMissing), problem.ImageUnavailable},
		{"image of this machine", nil, wake(&sandbox.ImageNotBuiltError{Ref: "localhost/own:1"}), problem.ImageUnavailable},
		{"engine", nil, wake(sandbox.ErrEngineDown), problem.EngineUnavailable},
		{"store", nil, sandbox.ErrStoreFull, problem.NodeDiskFull},
		{"wake", nil, wake(errors.New("boom")), problem.WakeFailed},
		{"lost", nil, fromGuest(guest.ErrLost), problem.GuestLost},
		{"no response", nil, guest.ErrNoResponse, problem.SandboxTimeout},
		{"deadline", nil, context.DeadlineExceeded, problem.SandboxTimeout},
		{"network", nil, &net.OpError{Op: "dial", Err: errors.New("refused")}, problem.GuestLost},
		{"guest's nonsense", nil, fromGuest(errors.New("unusable JSON")), problem.GuestError},
		{"guest's own code", nil, &guest.Error{Status: 200, Code: "<script>", Message: "x"}, problem.GuestError},
		{"guest's code", nil, &guest.Error{Status: 500, Code: guest.CodeNoSpace, Message: "full"}, problem.SandboxDiskFull},
		{"client gone", canceled, wake(context.Canceled), problem.ClientDisconnected},
		{"node closing", closing, wake(context.Canceled), problem.NodeUnavailable},
		{"anything else", nil, errors.New("secret internals"), problem.InternalError},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx := tc.ctx
			if ctx == nil {
				ctx = t.Context()
			}
			p := problemOf(ctx, tc.err)
			if p.Code != tc.want || strings.Contains(p.Detail, "secret internals") {
				t.Errorf("got %+v", p)
			}
		})
	}
	for code, ours := range guestCodes {
		if p := problemOf(t.Context(), &guest.Error{Code: code, Message: strings.Repeat("é\xff", 5000)}); p.Code != ours || len(p.Detail) > 3*maxGuestMessage {
			t.Errorf("%s became %s with %d bytes", code, p.Code, len(p.Detail))
		}
	}
}

// FuzzRequests: the node never panics, reports every error as a problem document, and
// never fails with 500.
func FuzzRequests(f *testing.F) {
	for _, r := range routes {
		method, path, _ := strings.Cut(r, " ")
		path = strings.NewReplacer("{id}", "box", "{process}", "1", "{port}", "3000").Replace(path)
		for _, body := range []string{"", "{}", `{"port":1}`, `{"command":7}`, `{"path":"relative"}`, `{"duration":"1h","x":[[]]}`} {
			f.Add(method, path, body, "application/json")
		}
		f.Add(method, path+"?path=/nonexistent/f&limit=1&label=a=b", "raw", octetStream)
	}
	f.Add("GET", "/sandbox/../../node", "", "")
	f.Add("GET", "//sandbox", "", "")
	f.Add("CONNECT", "/node", "", "")
	// Nothing of what is fuzzed may run: the engine cannot start anything.
	s := newServer(f, Limits{})
	s.create("box")
	s.node.Engine.Fail("create", sandbox.ErrEngineDown)
	s.node.Engine.Fail("start", sandbox.ErrEngineDown)
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/stop", nil)
	f.Fuzz(func(t *testing.T, method, path, body, kind string) {
		if method == "DELETE" && (strings.Contains(path, "sandbox/box") && !strings.Contains(path, "sandbox/box/")) {
			return
		}
		r, err := http.NewRequest(method, "http://node/", bytes.NewReader([]byte(body)))
		if err != nil {
			return
		}
		u, err := r.URL.Parse(Prefix + path)
		if err != nil || u.Host != "node" {
			return
		}
		r.URL = u
		r.Header.Set("Authorization", "Bearer "+testToken)
		r.Header.Set("Content-Type", kind)
		w := httptest.NewRecorder()
		s.api.ServeHTTP(w, r)
		switch {
		case w.Code == http.StatusInternalServerError:
			t.Fatalf("%s %q %q: %s", method, path, body, w.Body)
		case w.Code >= 400:
			var p problem.Problem
			if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil || w.Header().Get("Content-Type") != problem.ContentType ||
				p.Code == (problem.Code{}) || p.Status != w.Code || p.Detail == "" || p.Code.Definition().Status != w.Code {
				t.Fatalf("%s %q %q: status %d, header %v: %s", method, path, body, w.Code, w.Header(), w.Body)
			}
		}
	})
}
