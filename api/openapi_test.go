package api

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/doze-run/doze/docs"
	"github.com/doze-run/doze/egress"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

// routes are all there are, as promised to clients.
var routes = []string{
	"POST /sandbox",
	"POST /node/quarantine/{id}/adopt",
	"DELETE /node/quarantine/{id}",
	"GET /sandbox",
	"GET /sandbox/{id}",
	"PATCH /sandbox/{id}",
	"DELETE /sandbox/{id}",
	"POST /sandbox/{id}/exec",
	"PUT /sandbox/{id}/files/write",
	"GET /sandbox/{id}/files/read",
	"GET /sandbox/{id}/files/watch",
	"GET /sandbox/{id}/files",
	"DELETE /sandbox/{id}/files",
	"POST /sandbox/{id}/files/mkdir",
	"POST /sandbox/{id}/files/move",
	"POST /sandbox/{id}/files/url",
	"POST /sandbox/{id}/terminal/url",
	"GET /sandbox/{id}/files/search",
	"GET /sandbox/{id}/files/stat",
	"PUT /sandbox/{id}/files/archive",
	"GET /sandbox/{id}/files/archive",
	"POST /sandbox/{id}/git/clone",
	"GET /sandbox/{id}/git/status",
	"GET /sandbox/{id}/git/diff",
	"GET /sandbox/{id}/git/log",
	"GET /sandbox/{id}/git/branches",
	"POST /sandbox/{id}/git/checkout",
	"POST /sandbox/{id}/git/add",
	"POST /sandbox/{id}/git/commit",
	"POST /sandbox/{id}/git/push",
	"POST /sandbox/{id}/git/pull",
	"POST /sandbox/{id}/process",
	"GET /sandbox/{id}/env",
	"PATCH /sandbox/{id}/env",
	"POST /sandbox/{id}/sessions",
	"GET /sandbox/{id}/sessions",
	"GET /sandbox/{id}/sessions/{session}",
	"POST /sandbox/{id}/sessions/{session}/interrupt",
	"DELETE /sandbox/{id}/sessions/{session}",
	"POST /sandbox/{id}/contexts",
	"GET /sandbox/{id}/contexts",
	"GET /sandbox/{id}/contexts/{context}",
	"POST /sandbox/{id}/contexts/{context}/run",
	"POST /sandbox/{id}/contexts/{context}/interrupt",
	"POST /sandbox/{id}/contexts/{context}/restart",
	"DELETE /sandbox/{id}/contexts/{context}",
	"GET /sandbox/{id}/processes",
	"GET /sandbox/{id}/process/{process}",
	"DELETE /sandbox/{id}/process/{process}",
	"POST /sandbox/{id}/process/{process}/wait",
	"GET /sandbox/{id}/process/{process}/logs",
	"GET /sandbox/{id}/terminal",
	"GET /sandbox/{id}/terminals",
	"DELETE /sandbox/{id}/terminal/{terminal}",
	"POST /sandbox/{id}/expose",
	"GET /sandbox/{id}/ports",
	"DELETE /sandbox/{id}/ports/{port}",
	"POST /sandbox/{id}/sleep",
	"POST /sandbox/{id}/wake",
	"POST /sandbox/{id}/snapshot",
	"GET /sandbox/{id}/snapshots",
	"POST /sandbox/{id}/restore",
	"POST /sandbox/{id}/fork",
	"GET /node/df",
	"GET /snapshots",
	"GET /snapshots/{snapshot}",
	"GET /snapshots/{snapshot}/export",
	"DELETE /snapshots/{snapshot}",
	"POST /sandbox/{id}/backup",
	"GET /sandbox/{id}/backups",
	"GET /backups",
	"GET /backups/{backup}",
	"DELETE /backups/{backup}",
	"POST /sandbox/{id}/mounts",
	"GET /sandbox/{id}/mounts",
	"DELETE /sandbox/{id}/mounts",
	"POST /sandbox/{id}/stop",
	"POST /sandbox/{id}/archive",
	"POST /sandbox/{id}/hold",
	"GET /sandbox/{id}/events",
	"GET /events",
	"GET /sandbox/{id}/exec",
	"GET /sandbox/{id}/egress/flows",
	"POST /sandbox/{id}/egress/explain",
	"GET /egress/proxy/flows",
	"POST /egress/proxy/explain",
	"GET /sandbox/{id}/egress/rules",
	"PUT /sandbox/{id}/egress/rules",
	"GET /egress/presets",
	"GET /egress/rules",
	"PUT /egress/rules",
	"GET /node/egress/rules",
	"GET /egress/ca",
	"PUT /secrets/{name}",
	"GET /secrets",
	"GET /secrets/{name}",
	"DELETE /secrets/{name}",
	"PUT /policies/{name}",
	"GET /policies",
	"GET /policies/{name}",
	"DELETE /policies/{name}",
	"GET /policies/{name}/logs",
	"GET /node",
	"GET /openapi.json",
}

type document struct {
	OpenAPI    string
	Paths      map[string]map[string]operation
	Components struct {
		Schemas map[string]map[string]any
	}
}

type operation struct {
	OperationID string
	Summary     string
	Description string
	Codes       []string `json:"x-problem-codes"`
	Security    []any
	Parameters  []struct{ Name string }
	RequestBody struct{ Content map[string]any }
	Responses   map[string]struct {
		Description string
		Content     map[string]any
	}
}

// theDocument is one for the tests that read it, which are not parallel: it takes seconds with -race.
var theDocument []byte

func generate(t *testing.T) []byte {
	t.Helper()
	text, err := newAPI(t, Config{}).document()
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func readDocument(t *testing.T) (document, []byte) {
	t.Helper()
	if theDocument == nil {
		theDocument = generate(t)
	}
	var d document
	if err := json.Unmarshal(theDocument, &d); err != nil {
		t.Fatal(err)
	}
	return d, theDocument
}

// The node serves the committed document, which TestDocumentIsCommitted compares with the
// routes.
func TestDocumentIsServed(t *testing.T) {
	rec := httptest.NewRecorder()
	newAPI(t, Config{}).ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/api/v1/openapi.json", nil))
	if rec.Code != http.StatusOK || rec.Header().Get("Content-Type") != "application/json" {
		t.Fatalf("status %d, type %q", rec.Code, rec.Header().Get("Content-Type"))
	}
	if !bytes.Equal(rec.Body.Bytes(), docs.OpenAPI) || len(docs.OpenAPI) < 1<<16 {
		t.Errorf("the node serves %d bytes, not the %d of docs/openapi.json", rec.Body.Len(), len(docs.OpenAPI))
	}
}

func TestDocumentHasEveryRouteWithItsProblems(t *testing.T) {
	d, raw := readDocument(t)
	if d.OpenAPI != "3.1.0" {
		t.Errorf("openapi is %q", d.OpenAPI)
	}
	var have []string
	for path, methods := range d.Paths {
		for method, op := range methods {
			name := strings.ToUpper(method) + " " + path
			have = append(have, name)
			if op.OperationID == "" || op.Summary == "" || len(op.Codes) == 0 {
				t.Errorf("%s: id %q, summary %q, codes %v", name, op.OperationID, op.Summary, op.Codes)
			}
			if needsToken := path != "/openapi.json"; (len(op.Security) > 0) != needsToken {
				t.Errorf("%s: security is %v", name, op.Security)
			}
			success := false
			for status, response := range op.Responses {
				if status < "400" {
					success = true
					continue
				}
				if response.Content["application/problem+json"] == nil {
					t.Errorf("%s: status %s is not a problem document", name, status)
				}
			}
			if !success {
				t.Errorf("%s has no success", name)
			}
			for _, code := range op.Codes {
				d := definition(t, code)
				if d.From&problem.API == 0 {
					t.Errorf("%s: %s is not a code of the API", name, code)
				}
				if !strings.Contains(op.Responses[strconv.Itoa(d.Status)].Description, "`"+code+"`") {
					t.Errorf("%s does not describe %s at status %d", name, code, d.Status)
				}
			}
		}
	}
	slices.Sort(have)
	want := slices.Sorted(slices.Values(routes))
	if !slices.Equal(have, want) {
		t.Errorf("routes are\n%s\nnot\n%s", strings.Join(have, "\n"), strings.Join(want, "\n"))
	}
	refs := regexp.MustCompile(`"\$ref": "#/components/schemas/([^"]+)"`).FindAllSubmatch(raw, -1)
	if len(refs) < 500 {
		t.Errorf("only %d references to schemas", len(refs))
	}
	for _, ref := range refs {
		if d.Components.Schemas[string(ref[1])] == nil {
			t.Errorf("schema %s is missing", ref[1])
		}
	}
	for _, name := range []string{"Sandbox", "Problem", "ExecResult", "Process", "File", "Event", "Port", "Rule", "RuleSet", "Secret", "Policy", "Flow", "Explanation"} {
		if d.Components.Schemas[name] == nil {
			t.Errorf("schema %s is missing", name)
		}
	}
	write := d.Paths["/sandbox/{id}/files/write"]["put"]
	for _, kind := range []string{"application/octet-stream", "application/json"} {
		if write.RequestBody.Content[kind] == nil {
			t.Errorf("write takes no %s", kind)
		}
	}
	for path, method := range map[string]string{"/sandbox/{id}/exec": "post", "/sandbox/{id}/events": "get", "/sandbox/{id}/egress/flows": "get", "/sandbox/{id}/process/{process}/logs": "get"} {
		for _, kind := range []string{"application/json", "text/event-stream"} {
			if d.Paths[path][method].Responses["200"].Content[kind] == nil {
				t.Errorf("%s has no response of type %s", path, kind)
			}
		}
	}
}

func TestEveryCodeIsPromisedByARoute(t *testing.T) {
	d, _ := readDocument(t)
	promised := map[string]bool{
		problem.RouteNotFound.String(): true, problem.MethodNotAllowed.String(): true, // of no route
		problem.ClientDisconnected.String(): true, // never received
		problem.RequestMisdirected.String(): true, // sent before the API gets the request
	}
	for _, methods := range d.Paths {
		for _, op := range methods {
			for _, code := range op.Codes {
				promised[code] = true
			}
		}
	}
	for _, d := range problem.All() {
		if d.From&problem.API != 0 && !promised[d.Name] {
			t.Errorf("no route promises %s", d.Name)
		}
	}
}

// definition returns the definition of a code by its name.
func definition(t *testing.T, name string) problem.Definition {
	t.Helper()
	var code problem.Code
	if err := code.UnmarshalText([]byte(name)); err != nil {
		t.Fatal(err)
	}
	d := code.Definition()
	if d.Name != name {
		t.Fatalf("code %s is not in the registry", name)
	}
	return d
}

const (
	testToken = "letmein-0123456789"
	testOwner = "operator"
)

// newAPI fills in what a test does not care about.
func newAPI(t testing.TB, cfg Config) *API {
	t.Helper()
	if cfg.Sandboxes == nil {
		cfg.Sandboxes = new(sandbox.Manager) // no request may reach it
	}
	if cfg.Egress == nil {
		cfg.Egress = new(egress.Egress)
	}
	if cfg.Auth == nil {
		cfg.Auth = SingleToken(testToken, testOwner)
	}
	if cfg.PreviewURL == nil {
		cfg.PreviewURL = func(sb sandbox.Sandbox, p sandbox.Port) string {
			return "https://" + string(sb.ID) + "-" + p.Token + ".preview.test/"
		}
	}
	if cfg.Version == "" {
		cfg.Version = "test"
	}
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return a
}
