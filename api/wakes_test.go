package api

import (
	"archive/tar"
	"bytes"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/runtime/sandbox"
)

// routeUse is a successful request to a route of the sandbox box, which has a file, a working
// tree, a session, a context, a terminal, a process and a port.
type routeUse struct {
	route string // as in the OpenAPI document
	query string
	body  any
	do    func(*server) // for a route whose response is a stream; nil makes one request
}

// usedBox is a sandbox that has one of everything that routes name.
type usedBox struct {
	*server
	id, process, dir, work string
	origin                 string // address of the working tree's server
}

func newUsedBox(t *testing.T) *usedBox {
	t.Helper()
	s := newInterpreters(t)
	b := &usedBox{server: s, dir: t.TempDir()}
	b.id = string(must[types.Sandbox](s, http.StatusOK, "GET", "/sandbox/box", nil).ID)
	must[types.Port](s, http.StatusOK, "POST", "/sandbox/box/expose", map[string]any{"port": 3000})
	must[types.File](s, http.StatusOK, "PUT", "/sandbox/box/files/write?"+at(b.dir+"/f"), strings.NewReader("hello"))
	must[types.Mount](s, http.StatusCreated, "POST", "/sandbox/box/mounts", map[string]any{"bucket": "data", "path": b.dir + "/mounted"})
	must[types.Session](s, http.StatusCreated, "POST", "/sandbox/box/sessions", map[string]any{"id": "dev"})
	must[types.Context](s, http.StatusCreated, "POST", "/sandbox/box/contexts", map[string]any{"id": "a", "language": "python"})
	b.process = must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", map[string]any{"command": "echo ready; exec sleep 1000"}).ID
	w := s.dialTerminal(terminalQuery("id", "main", "command", "exec cat")).awaitReady()
	w.conn.CloseNow()
	origin, _ := newRepository(t)
	gitIn(t, origin, "config", "http.receivepack", "true")
	b.origin, b.work = serveRepository(t, origin, nil), filepath.Join(b.dir, "shop")
	must[types.GitHead](s, http.StatusOK, "POST", "/sandbox/box/git/clone", map[string]any{"url": b.origin, "target_dir": b.work})
	return b
}

// inspections are requests to the routes that never wake a sandbox.
func (b *usedBox) inspections() []routeUse {
	return []routeUse{
		{route: "GET /sandbox"},
		{route: "GET /events"},
		{route: "GET /node"},
		{route: "GET /node/df"},
		{route: "GET /sandbox/{id}"},
		{route: "PATCH /sandbox/{id}", body: map[string]any{"labels": map[string]string{"a": "b"}}},
		{route: "POST /sandbox/{id}/hold", body: map[string]any{"duration": "1m"}},
		{route: "GET /sandbox/{id}/env"},
		{route: "PATCH /sandbox/{id}/env", body: map[string]any{"env": map[string]any{"A": "b"}}},
		{route: "GET /sandbox/{id}/events"},
		{route: "GET /sandbox/{id}/events", do: func(s *server) {
			s.open("GET", "/sandbox/box/events", nil, "Accept", eventStreamType).expect("created")
		}},
		{route: "GET /sandbox/{id}/processes"},
		{route: "GET /sandbox/{id}/process/{process}"},
		{route: "GET /sandbox/{id}/terminals"},
		{route: "POST /sandbox/{id}/terminal/url", body: map[string]any{}},
		{route: "POST /sandbox/{id}/files/url", body: map[string]any{"path": b.dir + "/f"}},
		{route: "GET /sandbox/{id}/sessions"},
		{route: "GET /sandbox/{id}/sessions/{session}"},
		{route: "GET /sandbox/{id}/contexts"},
		{route: "GET /sandbox/{id}/contexts/{context}"},
		{route: "POST /sandbox/{id}/expose", body: map[string]any{"port": 3001}},
		{route: "GET /sandbox/{id}/ports"},
		{route: "DELETE /sandbox/{id}/ports/{port}"},
		{route: "POST /sandbox/{id}/snapshot", body: map[string]any{"name": "before"}},
		{route: "GET /sandbox/{id}/snapshots"},
		{route: "POST /sandbox/{id}/backup", body: map[string]any{}},
		{route: "GET /sandbox/{id}/backups"},
		{route: "GET /sandbox/{id}/mounts"},
		{route: "DELETE /sandbox/{id}/mounts", query: at(b.dir + "/mounted")},
		{route: "POST /sandbox/{id}/fork", body: map[string]any{"count": 2, "names": []string{"x", "y"}}},
		{route: "GET /sandbox/{id}/egress/rules"},
		{route: "PUT /sandbox/{id}/egress/rules", body: `{"rules":[]}`},
		{route: "GET /sandbox/{id}/egress/flows"},
		{route: "POST /sandbox/{id}/egress/explain", body: map[string]any{"url": "https://example.com/"}},
	}
}

// uses are requests to the routes that wake a sandbox, those that end something last.
func (b *usedBox) uses(t *testing.T) []routeUse {
	t.Helper()
	var archive bytes.Buffer
	if err := tar.NewWriter(&archive).Close(); err != nil {
		t.Fatal(err)
	}
	tree := func(more ...any) map[string]any {
		body := map[string]any{"path": b.work}
		for i := 0; i < len(more); i += 2 {
			body[more[i].(string)] = more[i+1]
		}
		return body
	}
	author := map[string]any{"name": "A", "email": "a@example.com"}
	return []routeUse{
		{route: "POST /sandbox/{id}/wake"},
		{route: "POST /sandbox/{id}/mounts", body: map[string]any{"bucket": "data", "path": b.dir + "/bucket"}},
		{route: "POST /sandbox/{id}/exec", body: map[string]any{"argv": []string{"true"}}},
		{route: "POST /sandbox/{id}/exec", body: map[string]any{"command": "true", "session": "dev"}},
		{route: "GET /sandbox/{id}/exec", do: func(s *server) {
			e, _ := s.execWS(map[string]any{"argv": []string{"true"}})
			e.expectComplete()
		}},
		{route: "GET /sandbox/{id}/terminal", do: func(s *server) { s.dialTerminal("id=main").awaitReady().conn.CloseNow() }},

		{route: "PUT /sandbox/{id}/files/write", query: at(b.dir + "/f"), body: "hello"},
		{route: "GET /sandbox/{id}/files/read", query: at(b.dir + "/f")},
		{route: "GET /sandbox/{id}/files/stat", query: at(b.dir + "/f")},
		{route: "GET /sandbox/{id}/files", query: at(b.dir)},
		{route: "GET /sandbox/{id}/files/search", query: at(b.dir) + "&name=f"},
		{route: "GET /sandbox/{id}/files/watch", do: func(s *server) { s.open("GET", watchPath(b.dir), nil).close() }},
		{route: "GET /sandbox/{id}/files/archive", query: at(b.dir)},
		{route: "PUT /sandbox/{id}/files/archive", query: at(b.dir), body: &archive},
		{route: "POST /sandbox/{id}/files/mkdir", body: map[string]any{"path": b.dir + "/d"}},
		{route: "POST /sandbox/{id}/files/move", body: map[string]any{"from": b.dir + "/f", "to": b.dir + "/g"}},
		{route: "DELETE /sandbox/{id}/files", query: at(b.dir + "/g")},

		{route: "POST /sandbox/{id}/git/clone", body: map[string]any{"url": b.origin, "target_dir": b.dir + "/again"}},
		{route: "GET /sandbox/{id}/git/status", query: at(b.work)},
		{route: "GET /sandbox/{id}/git/diff", query: at(b.work)},
		{route: "GET /sandbox/{id}/git/log", query: at(b.work)},
		{route: "GET /sandbox/{id}/git/branches", query: at(b.work)},
		{route: "POST /sandbox/{id}/git/add", body: tree()},
		{route: "POST /sandbox/{id}/git/commit", body: tree("message", "second", "author", author, "allow_empty", true)},
		{route: "POST /sandbox/{id}/git/push", body: tree()},
		{route: "POST /sandbox/{id}/git/pull", body: tree()},
		{route: "POST /sandbox/{id}/git/checkout", body: tree("ref", "cart", "create", true)},

		{route: "POST /sandbox/{id}/sessions", body: map[string]any{}},
		{route: "POST /sandbox/{id}/sessions/{session}/interrupt"},
		{route: "POST /sandbox/{id}/contexts", body: map[string]any{"language": "python"}},
		{route: "POST /sandbox/{id}/contexts/{context}/interrupt"},
		{route: "POST /sandbox/{id}/contexts/{context}/run", body: map[string]any{"code": "value 2"}},
		{route: "POST /sandbox/{id}/contexts/{context}/restart"},
		{route: "POST /sandbox/{id}/process", body: map[string]any{"command": "true"}},
		{route: "GET /sandbox/{id}/process/{process}/logs"},
		{route: "POST /sandbox/{id}/process/{process}/wait", body: map[string]any{"log": "ready"}},

		{route: "DELETE /sandbox/{id}/process/{process}"},
		{route: "DELETE /sandbox/{id}/sessions/{session}"},
		{route: "DELETE /sandbox/{id}/contexts/{context}"},
		{route: "DELETE /sandbox/{id}/terminal/{terminal}"},
	}
}

// make makes the request, and expects it to succeed.
func (b *usedBox) make(u routeUse) {
	b.t.Helper()
	if u.do != nil {
		u.do(b.server)
		return
	}
	method, path, _ := strings.Cut(u.route, " ")
	path = strings.NewReplacer("{id}", "box", "{session}", "dev", "{context}", "a", "{terminal}", "main", "{process}", b.process, "{port}", "3000").Replace(path)
	if u.query != "" {
		path += "?" + u.query
	}
	if got := b.do(method, path, u.body); got.status >= http.StatusMultipleChoices {
		b.t.Fatalf("%s: status %d: %s", u.route, got.status, got.body)
	}
}

// The promises of descriptions. Exposing a port wakes the sandbox only to wait for a server.
var (
	neverWakes = regexp.MustCompile(`\bNever wakes (a|the) sandbox\b|\bWakes nothing\b|\bWakes the sandbox only\b`)
	wakes      = regexp.MustCompile(`\bWakes the sandbox\b`)
)

// ending are the routes that end a sandbox or its use: what they do to one that sleeps is in
// their own tests.
var ending = []string{"POST /sandbox/{id}/sleep", "POST /sandbox/{id}/stop", "POST /sandbox/{id}/archive", "POST /sandbox/{id}/restore", "DELETE /sandbox/{id}"}

// copying are the routes that download the disk of an archived sandbox, to copy it.
var copying = []string{"POST /sandbox/{id}/snapshot", "POST /sandbox/{id}/backup", "POST /sandbox/{id}/fork"}

// routesThat returns the routes whose description promises to wake a sandbox, or never to.
func routesThat(t *testing.T, wake bool) []string {
	t.Helper()
	d, _ := readDocument(t)
	var list []string
	for path, methods := range d.Paths {
		for method, op := range methods {
			route := strings.ToUpper(method) + " " + path
			never := neverWakes.MatchString(op.Description)
			promises := never || wakes.MatchString(op.Description)
			switch {
			case promises && never != wake:
				list = append(list, route)
			case !promises && strings.HasPrefix(path, "/sandbox/{id}") && !slices.Contains(ending, route):
				t.Errorf("the description of %s lacks whether it wakes the sandbox", route)
			}
		}
	}
	slices.Sort(list)
	return list
}

// checkRoutes expects requests to exactly these routes.
func checkRoutes(t *testing.T, requests []routeUse, routes []string) {
	t.Helper()
	var have []string
	for _, u := range requests {
		have = append(have, u.route)
	}
	slices.Sort(have)
	if have = slices.Compact(have); !slices.Equal(have, routes) {
		t.Errorf("tested are\n%s\nnot, as documented,\n%s", strings.Join(have, "\n"), strings.Join(routes, "\n"))
	}
}

func TestReadsWakeNothing(t *testing.T) {
	for state, end := range map[sandbox.State]struct {
		path string
		body any
	}{sandbox.StateAsleep: {"/sandbox/box/sleep", nil}, sandbox.StateStopped: {"/sandbox/box/stop", nil}, sandbox.StateArchived: {"/sandbox/box/archive", map[string]any{}}} {
		t.Run(string(state), func(t *testing.T) {
			b := newUsedBox(t)
			requests := b.inspections()
			checkRoutes(t, requests, routesThat(t, false))
			for _, route := range routes {
				// Lists and documents that belong to no sandbox.
				if strings.HasPrefix(route, "GET ") && !strings.Contains(route, "{") {
					requests = append(requests, routeUse{route: route})
				}
			}
			if state == sandbox.StateArchived {
				requests = slices.DeleteFunc(requests, func(u routeUse) bool { return slices.Contains(copying, u.route) })
			}
			b.eventually("the sandbox is "+string(state), func() bool { return b.do("POST", end.path, end.body).status == http.StatusOK })
			_, thaws := b.node.Freezer.Counts()
			for _, u := range requests {
				b.make(u)
				if got := b.state(b.id); got != state {
					t.Fatalf("after %s it is %s", u.route, got)
				}
			}
			if _, after := b.node.Freezer.Counts(); after != thaws {
				t.Errorf("it was thawed %d times", after-thaws)
			}
		})
	}
}

func TestEveryUseWakes(t *testing.T) {
	b := newUsedBox(t)
	requests := b.uses(t)
	checkRoutes(t, requests, routesThat(t, true))
	for _, u := range requests {
		t.Run(u.route, func(t *testing.T) {
			b.t = t
			b.sleep(b.id)
			b.make(u)
			if state := b.state(b.id); state != sandbox.StateRunning {
				t.Errorf("it is %s", state)
			}
		})
	}
}
