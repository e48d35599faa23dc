package problem

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/doze-run/doze/requestid"
)

// endings are the words after the subject of a code. A new one needs a reason: the
// closed list keeps codes alike.
var endings = []string{
	"ambiguous", "asleep", "built_in", "busy", "conflict", "denied", "destroyed", "disconnected", "error", "exhausted",
	"exists", "exited", "expired", "failed", "full", "in_use", "incomplete", "invalid", "is_directory", "limit_exceeded", "lost", "malformed",
	"misdirected", "mismatch", "not_allowed", "not_directory", "not_empty", "not_executable", "not_exposed", "not_found", "not_installed",
	"not_listening", "not_permitted", "not_ready", "not_running", "not_satisfiable", "required", "stopped", "timeout", "too_large",
	"too_long", "unavailable", "unreachable", "unreadable", "unsafe", "unsupported",
}

func TestDefinitionsAreComplete(t *testing.T) {
	grammar := regexp.MustCompile(`\A[a-z][a-z0-9]*(_[a-z0-9]+)*_(` + strings.Join(endings, "|") + `)\z`)
	title := regexp.MustCompile(`\A[A-Z][^.]*[^. ]\z`)
	used := map[string]bool{}
	for _, d := range All() {
		switch m := grammar.FindStringSubmatch(d.Name); {
		case m != nil:
			used[m[2]] = true
		case d.Name != "unauthorized": // HTTP's own word
			t.Errorf("%s is not <subject>_<problem> with a known problem", d.Name)
		}
		if !title.MatchString(d.Title) {
			t.Errorf("%s: the title is %q", d.Name, d.Title)
		}
		if !strings.HasSuffix(strings.TrimRight(d.Meaning, ")"), ".") || strings.ContainsAny(d.Meaning, "|\n") {
			t.Errorf("%s: the meaning is %q", d.Name, d.Meaning)
		}
		if d.Status < 400 || d.Status > 599 || d.RetryAfter < 0 || d.From == 0 {
			t.Errorf("%s is incomplete: %+v", d.Name, d)
		}
		if d.RetryAfter == 0 && (d.Status == http.StatusServiceUnavailable || d.Status == http.StatusTooManyRequests) {
			t.Errorf("%s has status %d without Retry-After", d.Name, d.Status)
		}
		if d.Code().Definition() != d {
			t.Errorf("%s is not the definition of its code", d.Name)
		}
	}
	for _, ending := range endings {
		if !used[ending] {
			t.Errorf("no code ends with %s", ending)
		}
	}
}

func TestCodesAreUnique(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("a second definition of a code is accepted")
		}
	}()
	define(API, SandboxNotFound.String(), http.StatusNotFound, "Again", "Again.")
}

func TestDocumentOfAProblem(t *testing.T) {
	code := 1
	full := New(ProcessExited, "no process listens on the port").WithErrors(FieldError{"body.name", "is empty", "set a name"}).
		WithFlow("api.example.com", "owner/example", "hocl097cxn").For("G2MGFUZCA7UASKWV")
	full.Process = &FailedProcess{Name: "web", ExitCode: &code, Signal: "SIGKILL", Output: "killed"}
	full.ContainerOutput = "out of memory"
	for _, test := range []struct {
		name    string
		problem *Problem
		want    string
	}{
		{"minimal", New(SandboxNotFound, ""), `{"type":"https://github.com/doze-run/doze/blob/main/docs/reference/errors.md#sandbox_not_found",
			"title":"Sandbox not found","status":404,"detail":"","code":"sandbox_not_found"}`},
		{"full", full, `{"type":"https://github.com/doze-run/doze/blob/main/docs/reference/errors.md#process_exited","title":"Process exited","status":502,
			"detail":"no process listens on the port","code":"process_exited","request_id":"G2MGFUZCA7UASKWV",
			"errors":[{"location":"body.name","message":"is empty","hint":"set a name"}],
			"host":"api.example.com","rule":"owner/example","flow":"hocl097cxn",
			"process":{"name":"web","exit_code":1,"signal":"SIGKILL","output":"killed"},"container_output":"out of memory"}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			var compact bytes.Buffer
			if err := json.Compact(&compact, []byte(test.want)); err != nil {
				t.Fatal(err)
			}
			got, err := json.Marshal(test.problem)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(compact.String(), string(got)); diff != "" {
				t.Errorf("the document differs (-want +got):\n%s", diff)
			}
			var decoded Problem
			if err := json.Unmarshal(got, &decoded); err != nil {
				t.Fatal(err)
			}
			sent := *test.problem
			sent.header = nil
			if diff := cmp.Diff(sent, decoded, cmp.AllowUnexported(Problem{}, Code{})); diff != "" {
				t.Errorf("decoding does not return what was encoded (-sent +decoded):\n%s", diff)
			}
		})
	}
}

// A newer node has codes that this version does not know.
func TestUnknownCodesAreKept(t *testing.T) {
	const document = `{"title":"Later","status":400,"detail":"","code":"later_invalid"}`
	var p Problem
	if err := json.Unmarshal([]byte(document), &p); err != nil {
		t.Fatal(err)
	}
	if p.Code.String() != "later_invalid" || p.Code.Definition() != (Definition{}) || p.Code == (Code{}) {
		t.Errorf("code %q with the definition %+v", p.Code, p.Code.Definition())
	}
}

func TestOnlyDefinedCodesAreSent(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("New accepts a code without a definition")
		}
	}()
	New(Code{"later_invalid"}, "")
}

// Problems can be package variables: no method changes one.
func TestCopiesShareNothing(t *testing.T) {
	shared := New(SandboxBusy, "in use")
	shared.WithHeader("Retry-After", "30").WithHeader("Allow", "GET")
	shared.WithErrors(FieldError{Location: "body"})
	shared.WithFlow("host", "rule", "flow")
	shared.For("id")
	shared.GetHeaders().Set("Retry-After", "60")
	shared.Write(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
	if diff := cmp.Diff(New(SandboxBusy, "in use"), shared, cmp.AllowUnexported(Problem{}, Code{})); diff != "" {
		t.Errorf("a copy changed the original (-want +got):\n%s", diff)
	}
}

func TestHas(t *testing.T) {
	p := New(SandboxNotFound, "no sandbox shop")
	for _, test := range []struct {
		err  error
		code Code
		want bool
	}{
		{p, SandboxNotFound, true},
		{fmt.Errorf("wake: %w", p), SandboxNotFound, true},
		{p, SandboxBusy, false},
		{errors.New("sandbox_not_found"), SandboxNotFound, false},
		{nil, SandboxNotFound, false},
	} {
		if got := Has(test.err, test.code); got != test.want {
			t.Errorf("Has(%v, %s) = %v", test.err, test.code, got)
		}
	}
	if got := p.Error(); got != "sandbox_not_found: no sandbox shop" {
		t.Errorf("the error reads %q", got)
	}
	if got := New(SandboxNotFound, "").Error(); got != "sandbox_not_found: Sandbox not found" {
		t.Errorf("without a detail, the error reads %q", got)
	}
}

func TestWrite(t *testing.T) {
	p := New(EgressDenied, "no rule allows it").WithFlow("example.com", "default", "f1").WithHeader("Allow", "GET")
	for _, test := range []struct {
		name    string
		problem *Problem
		method  string
		header  http.Header // of the response before
		want    map[string]string
	}{
		{"document", p, http.MethodGet, nil, map[string]string{
			"Content-Type": ContentType, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
			"Doze-Error": "egress_denied", "Doze-Flow": "f1", "Allow": "GET", "Retry-After": "",
		}},
		{"no body for HEAD", p, http.MethodHead, nil, map[string]string{"Content-Type": ContentType, "Doze-Error": "egress_denied"}},
		{"default Retry-After", New(SandboxAsleep, ""), http.MethodGet, nil, map[string]string{"Retry-After": "30", "Doze-Flow": ""}},
		{"own Retry-After", New(SandboxAsleep, "").WithHeader("Retry-After", "1"), http.MethodGet, nil, map[string]string{"Retry-After": "1"}},
		{"other headers stay", p, http.MethodGet, http.Header{"Connection": {"close"}, "Content-Length": {"7"}}, map[string]string{"Connection": "close"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := httptest.NewRecorder()
			for name, values := range test.header {
				w.Header()[name] = values
			}
			r := httptest.NewRequest(test.method, "/", nil)
			r.Header.Set(requestid.Header, "mine")
			test.problem.Write(w, r)
			result := w.Result()
			body, err := io.ReadAll(result.Body)
			if err != nil {
				t.Fatal(err)
			}
			if result.StatusCode != test.problem.Status {
				t.Errorf("status %d", result.StatusCode)
			}
			for name, value := range test.want {
				if got := result.Header.Get(name); got != value {
					t.Errorf("%s is %q, want %q", name, got, value)
				}
			}
			want, err := json.Marshal(test.problem.For("mine"))
			if err != nil {
				t.Fatal(err)
			}
			want = append(want, '\n')
			if got := result.Header.Get("Content-Length"); got != strconv.Itoa(len(want)) {
				t.Errorf("Content-Length is %s, want %d", got, len(want))
			}
			if test.method == http.MethodHead {
				want = []byte{}
			}
			if diff := cmp.Diff(string(want), string(body)); diff != "" {
				t.Errorf("the body differs (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRequestIDOfTheResponse(t *testing.T) {
	for _, test := range []struct {
		name                   string
		own, response, request string
		want                   string
	}{
		{"the problem's own", "own", "response", "request", "own"},
		{"the response's", "", "response", "request", "response"},
		{"the request's", "", "", "request", "request"},
	} {
		t.Run(test.name, func(t *testing.T) {
			w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil)
			r.Header.Set(requestid.Header, test.request)
			if test.response != "" {
				w.Header().Set(requestid.Header, test.response)
			}
			New(SandboxNotFound, "").For(test.own).Write(w, r)
			var got Problem
			if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
				t.Fatal(err)
			}
			if header := w.Header().Get(requestid.Header); got.RequestID != test.want || header != test.want {
				t.Errorf("request_id is %q, the header %q; want %q", got.RequestID, header, test.want)
			}
		})
	}
	w := httptest.NewRecorder()
	New(SandboxNotFound, "").Write(w, httptest.NewRequest(http.MethodGet, "/", nil))
	if w.Header().Get(requestid.Header) == "" {
		t.Error("a request without an id gets none")
	}
}

func TestWriteToGRPC(t *testing.T) {
	for _, test := range []struct {
		method, contentType string
		grpc                bool
	}{
		{"POST", "application/grpc", true},
		{"POST", "application/grpc+proto", true},
		{"POST", "application/grpc;charset=utf-8", true},
		{"POST", "application/grpc-web", false},
		{"POST", "application/json", false},
		{"POST", "", false},
		{"CONNECT", "application/grpc", false},
	} {
		w, r := httptest.NewRecorder(), httptest.NewRequest(test.method, "/", nil)
		r.Header.Set("Content-Type", test.contentType)
		New(EgressDenied, "100% déjà").WithFlow("example.com", "", "f1").Write(w, r)
		if test.grpc != (w.Code == http.StatusOK) {
			t.Errorf("%s with %q gets status %d", test.method, test.contentType, w.Code)
		}
		if !test.grpc {
			continue
		}
		for name, want := range map[string]string{
			"Content-Type": "application/grpc", "Grpc-Status": "7", "Grpc-Message": "100%25 d%C3%A9j%C3%A0 (flow f1)",
			"Doze-Error": "egress_denied", "Doze-Flow": "f1",
		} {
			if got := w.Header().Get(name); got != want {
				t.Errorf("%q: %s is %q, want %q", test.contentType, name, got, want)
			}
		}
		if w.Body.Len() > 0 {
			t.Errorf("%q: the body is %q", test.contentType, w.Body)
		}
	}
}

// gRPC clients retry UNAVAILABLE.
func TestGRPCStatus(t *testing.T) {
	for _, d := range All() {
		w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/", nil)
		r.Header.Set("Content-Type", "application/grpc")
		New(d.Code(), "").Write(w, r)
		want := "7"
		switch {
		case d.Status >= 500:
			want = "14"
		case d.Status == http.StatusNotFound:
			want = "12"
		}
		if got := w.Header().Get("Grpc-Status"); got != want {
			t.Errorf("%s: status %s, want %s", d.Name, got, want)
		}
	}
}

func TestInvalidErrorReads(t *testing.T) {
	err := &InvalidError{Field: "hosts[2]", Reason: `"https://x" is not a host name`, Want: "write x"}
	if got, want := err.Error(), `hosts[2]: "https://x" is not a host name; write x`; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
