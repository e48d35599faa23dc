package api

import (
	"bytes"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/doze-run/doze/problem"
)

func TestRoutesNeedTheToken(t *testing.T) {
	var log bytes.Buffer
	a := newAPI(t, Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	for _, tc := range []struct{ name, header string }{
		{"none", ""},
		{"wrong", "Bearer letmeout-0123456789"},
		{"prefix", "Bearer letmein"},
		{"longer", "Bearer " + testToken + "x"},
		{"other scheme", "Basic " + testToken},
		{"no scheme", testToken},
		{"empty", "Bearer "},
		{"huge", "Bearer " + strings.Repeat("x", 100_000)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, target := range []string{"GET /node", "POST /sandbox", "GET /sandbox/x", "GET /nowhere", "DELETE /node", "GET /../secret"} {
				method, path, _ := strings.Cut(target, " ")
				r := httptest.NewRequest(method, Prefix+path, nil)
				if tc.header != "" {
					r.Header.Set("Authorization", tc.header)
				}
				w := httptest.NewRecorder()
				a.ServeHTTP(w, r)
				if w.Code != http.StatusUnauthorized || w.Header().Get("Content-Type") != problem.ContentType ||
					!strings.Contains(w.Body.String(), `"code":"unauthorized"`) || !strings.HasPrefix(w.Header().Get("WWW-Authenticate"), "Bearer ") {
					t.Errorf("%s: status %d, header %v: %s", target, w.Code, w.Header(), w.Body)
				}
				if strings.Contains(w.Body.String(), "letme") {
					t.Errorf("%s repeats the token: %s", target, w.Body)
				}
			}
		})
	}
	for line := range strings.Lines(log.String()) {
		if !strings.Contains(line, "api call ended") || !strings.Contains(line, "status=401") || strings.Contains(line, "letme") {
			t.Errorf("logged %s", line)
		}
	}
}

func TestEmptyTokenAuthenticatesNoRequest(t *testing.T) {
	if _, ok := SingleToken("", "operator")(""); ok {
		t.Error("it did")
	}
}

func TestOwnersSeeTheirSandboxesOnly(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("mine")
	other := newAPI(t, Config{Sandboxes: s.node.Manager, Auth: SingleToken(testToken, "somebody")})
	for _, path := range []string{"/sandbox/mine", "/sandbox/" + id, "/sandbox/" + id + "/events", "/sandbox/" + id + "/ports"} {
		r := httptest.NewRequest(http.MethodGet, Prefix+path, nil)
		r.Header.Set("Authorization", "Bearer "+testToken)
		w := httptest.NewRecorder()
		other.ServeHTTP(w, r)
		if w.Code != http.StatusNotFound {
			t.Errorf("%s: status %d: %s", path, w.Code, w.Body)
		}
	}
}

func TestTokenIsNeverLogged(t *testing.T) {
	var log bytes.Buffer
	a := newAPI(t, Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	// A Manager without state panics: the worst that can happen to a request.
	r := httptest.NewRequest(http.MethodGet, Prefix+"/node", nil)
	r.Header.Set("Authorization", "Bearer "+testToken)
	w := httptest.NewRecorder()
	a.ServeHTTP(w, r)
	if w.Code != http.StatusInternalServerError || !strings.Contains(w.Body.String(), `"code":"internal_error"`) {
		t.Errorf("status %d: %s", w.Code, w.Body)
	}
	if !strings.Contains(log.String(), "panicked") || strings.Contains(log.String(), testToken) {
		t.Errorf("the log is %s", &log)
	}
}
