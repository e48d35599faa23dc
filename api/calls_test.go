package api

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// logged sends the API's log to the returned one.
func (s *server) logged() *testkit.Log {
	log := testkit.NewLog(s.t)
	s.api.cfg.Log = slog.New(slog.NewJSONHandler(log, nil))
	return log
}

// callLine waits for the line of the call with an id, which comes after its response.
func (s *server) callLine(log *testkit.Log, id string) (line map[string]any) {
	s.t.Helper()
	s.eventually("the call "+id+" is logged", func() bool {
		for text := range strings.Lines(log.String()) {
			line = nil
			if err := json.Unmarshal([]byte(text), &line); err != nil {
				s.t.Fatalf("%q: %v", text, err)
			}
			if line["msg"] == "api call ended" && line["request_id"] == id {
				return true
			}
		}
		return false
	})
	return line
}

func TestEachCallHasALineWithItsRequestID(t *testing.T) {
	s := newServer(t, Limits{})
	log := s.logged()
	s.create("app")
	for _, c := range []struct {
		method, path, route string
		status              int
		sandbox, owner      any
		headers             []string
	}{
		{"GET", "/sandbox/app?secret=canary", "/api/v1/sandbox/{id}", 422, "app", testOwner, nil},
		{"GET", "/sandbox/app", "/api/v1/sandbox/{id}", 200, "app", testOwner, []string{"Referer", "https://canary/"}},
		{"GET", "/sandbox/none/events", "/api/v1/sandbox/{id}/events", 404, "none", testOwner, nil},
		{"GET", "/nothing/canary", "", 404, nil, testOwner, nil},
		{"PUT", "/secrets/canary", "/api/v1/secrets/{name}", 0, nil, testOwner, nil},
		{"GET", "/node", "", 401, nil, nil, []string{"Authorization", "Bearer canary"}},
	} {
		got := s.do(c.method, c.path, nil, c.headers...)
		line := s.callLine(log, got.header.Get("X-Request-Id"))
		if c.status == 0 {
			c.status = got.status
		}
		if line["method"] != c.method || line["route"] != c.route || line["status"] != float64(c.status) || line["sandbox"] != c.sandbox || line["owner"] != c.owner {
			t.Errorf("%s %s: line %v", c.method, c.path, line)
		}
		if _, ok := line["duration_ms"].(float64); !ok {
			t.Errorf("%s %s: line %v", c.method, c.path, line)
		}
	}
	if strings.Contains(log.String(), "canary") || strings.Contains(log.String(), testToken) {
		t.Errorf("the log shows what a client sent:\n%s", log)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(s.api.cfg.Metrics)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]int{}
	for _, family := range families {
		counts[family.GetName()] = len(family.GetMetric())
	}
	if counts["doze_api_requests_total"] < 5 || counts["doze_api_request_duration_seconds"] < 4 {
		t.Errorf("metrics %v", counts)
	}
}

func TestClientsChooseTheRequestID(t *testing.T) {
	s := newServer(t, Limits{})
	if got := s.do("GET", "/node", nil, "X-Request-Id", "build-7.1_a"); got.header.Get("X-Request-Id") != "build-7.1_a" {
		t.Errorf("header %v", got.header)
	}
	p := s.refused(problem.SandboxNotFound, "GET", "/sandbox/none", nil, "X-Request-Id", "build-8")
	if p.RequestID != "build-8" {
		t.Errorf("problem %+v", p)
	}
	for _, bad := range []string{"a b", strings.Repeat("a", 65), "<b>"} {
		if got := s.do("GET", "/node", nil, "X-Request-Id", bad).header.Get("X-Request-Id"); got == bad || got == "" {
			t.Errorf("%q became %q", bad, got)
		}
	}
}

// Calls without a valid token do not use up the lines of others.
func TestRefusedCallsDoNotHideOthers(t *testing.T) {
	s := newServer(t, Limits{})
	log := s.logged()
	for range 200 {
		if got := s.do("GET", "/node", nil, "Authorization", "Bearer wrong"); got.status != http.StatusUnauthorized {
			t.Fatalf("status %d", got.status)
		}
	}
	id := s.do("GET", "/node", nil).header.Get("X-Request-Id")
	s.callLine(log, id)
	if n := strings.Count(log.String(), `"status":401`); n > 2*refusedBurst {
		t.Errorf("%d lines of refused calls", n)
	}
}
