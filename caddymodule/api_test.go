package caddymodule

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

func TestTheAPINeedsTheNodesToken(t *testing.T) {
	s := newSite(t)
	if res := s.api("GET", "/api/v1/node", ""); res.StatusCode != 200 {
		t.Errorf("with it: status %d", res.StatusCode)
	}
	if res := s.fetch(s.client(true), "https://"+apiHost+":"+strconv.Itoa(s.port)+"/api/v1/node"); res.StatusCode != 401 {
		t.Errorf("without: status %d", res.StatusCode)
	}
}

func TestRequestBeforeTheNodeIsOpenGetsRetryAfter(t *testing.T) {
	for name, serve := range map[string]func(http.ResponseWriter, *http.Request) error{
		"api": func(w http.ResponseWriter, r *http.Request) error {
			return (&API{ownHandler{new(App)}}).ServeHTTP(w, r, nothing)
		},
		"preview": func(w http.ResponseWriter, r *http.Request) error {
			return (&Preview{app: new(App)}).ServeHTTP(w, r, nothing)
		},
	} {
		w, r := httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), "GET", "https://"+apiHost+"/", nil)
		r.Header.Set("X-Request-Id", "build-7.1_a")
		if err := serve(w, r); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		var problem struct {
			Status    int
			Code      string
			RequestID string `json:"request_id"`
		}
		if err := json.Unmarshal(w.Body.Bytes(), &problem); err != nil || w.Code != 503 || problem.Status != 503 || problem.Code != "node_unavailable" || w.Header().Get("Retry-After") == "" {
			t.Errorf("%s: %d %s, %v", name, w.Code, w.Body, err)
		}
		if id := w.Header().Get("X-Request-Id"); id != "build-7.1_a" || problem.RequestID != id {
			t.Errorf("%s: X-Request-Id %q, request_id %q", name, id, problem.RequestID)
		}
	}
}

// metricsSite is a site that serves the metrics, and its address.
func metricsSite(t *testing.T) (site, address string) {
	address = "http://127.0.0.1:" + strconv.Itoa(testkit.FreePort(t))
	return address + " {\n\tmetrics\n}", address
}

func TestAPICallsInFlightEndWithNodeUnavailable(t *testing.T) {
	s := newSite(t)
	sb, _ := s.sandbox(hello, sandbox.Port{})
	s.stop(sb.ID)
	req, err := http.NewRequestWithContext(t.Context(), "POST", fmt.Sprintf("https://%s:%d/api/v1/sandbox/%s/wake", apiHost, s.port, sb.ID), nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+testToken)
	defer s.Engine.Block("start")()
	client, ended := s.client(true), make(chan struct{})
	var res *http.Response
	go func() {
		defer close(ended)
		res, err = send(client, req)
	}()
	s.Engine.AwaitBlocked(t, "start")
	newestApp(t).held.EndRequests()
	<-ended
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if problem := testkit.Body(t, res); res.StatusCode != 503 || !strings.Contains(problem, `"node_unavailable"`) || res.Header.Get("Retry-After") == "" {
		t.Errorf("the client got %d, %v, %s", res.StatusCode, res.Header, problem)
	}
}

func TestMetricsGoOnThroughAReload(t *testing.T) {
	s := newSite(t)
	site, metrics := metricsSite(t)
	s.mustLoad("", site)
	sb, address := s.sandbox(hello, sandbox.Port{})
	if _, err := s.Manager.Sleep(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	s.fetch(s.client(true), address)
	s.mustLoad("", site)
	got := testkit.Body(t, s.fetch(http.DefaultClient, metrics))
	for _, want := range []string{`doze_sandboxes{state="running"} 1`, `doze_wakes_total{cause="preview",kind="warm"} 1`} {
		if !strings.Contains(got, want) {
			t.Errorf("lacks %s in\n%s", want, grep(got, "doze_"))
		}
	}
}

func TestMetricsOfWakesAndOfEngineFailures(t *testing.T) {
	s := newSite(t)
	site, metrics := metricsSite(t)
	s.mustLoad("", site)
	sb, address := s.sandbox(hello, sandbox.Port{})
	visit := func(rest func(context.Context, sandbox.ID) (sandbox.Sandbox, error), status int) {
		t.Helper()
		if _, err := rest(t.Context(), sb.ID); err != nil {
			t.Fatal(err)
		}
		if res := s.fetch(s.client(true), address); res.StatusCode != status {
			t.Fatalf("status %d, want %d", res.StatusCode, status)
		}
	}
	start := time.Now()
	visit(s.Manager.Sleep, 200)
	visit(s.Manager.Stop, 200)
	visit(s.Manager.Stop, 200)
	s.Engine.Fail("start", errors.New("no more processes"))
	visit(s.Manager.Stop, 502)
	got := testkit.Body(t, s.fetch(http.DefaultClient, metrics))
	for _, want := range []string{
		`doze_wake_duration_seconds_count{kind="warm"} 1`,
		`doze_wake_duration_seconds_count{kind="cold"} 2`,
		`doze_wake_failures_total 1`,
		`doze_engine_errors_total{operation="start"} 1`,
	} {
		if !strings.Contains(got, want+"\n") {
			t.Errorf("lacks %s in\n%s", want, grep(got, "doze_"))
		}
	}
	// In seconds, the two took no longer than this test.
	sum := regexp.MustCompile(`doze_wake_duration_seconds_sum{kind="cold"} (\S+)`).FindStringSubmatch(got)
	if sum == nil {
		t.Fatalf("no sum in\n%s", grep(got, "doze_wake"))
	}
	if seconds, err := strconv.ParseFloat(sum[1], 64); err != nil || seconds <= 0 || seconds > time.Since(start).Seconds() {
		t.Errorf("two cold wakes took %s s, %v", sum[1], err)
	}
}

func grep(text, part string) string {
	var lines []string
	for line := range strings.Lines(text) {
		if strings.Contains(line, part) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}

func TestTheNodeLogsToTheNewestConfiguration(t *testing.T) {
	var first, second strings.Builder
	target := new(logTarget)
	target.set(slog.NewTextHandler(&first, nil))
	log := slog.New(logHandler{target: target}).With("sandbox", "a").WithGroup("g").With("b", 1)
	log.Info("one")
	target.set(slog.NewTextHandler(&second, nil))
	log.InfoContext(context.Background(), "two")
	if !strings.Contains(first.String(), "msg=one sandbox=a g.b=1") || strings.Contains(first.String(), "two") {
		t.Errorf("first: %s", first.String())
	}
	if !strings.Contains(second.String(), "msg=two sandbox=a g.b=1") {
		t.Errorf("second: %s", second.String())
	}
}
