//go:build integration

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

func TestDeclaredServerRespondsAfterStop(t *testing.T) {
	n := commonNode(t)
	b := n.newWebBox(t)
	c := n.browser(t, "h2")
	before, _ := b.get(c, "/started", http.StatusOK)
	b.stop()
	// The guest ended it and reported its exit.
	if list := b.processes(); len(list) != 1 || list[0].State != "exited" || list[0].Signal != "SIGTERM" || list[0].ExitCode == nil {
		t.Errorf("stopped, its processes: %+v", list)
	}
	after, header := b.get(c, "/started", http.StatusOK)
	if before == after {
		t.Error("the server was never stopped")
	}
	if header.Get("Doze-Wake") != "cold" {
		t.Errorf("headers %v", header)
	}
	if woke := b.awaitEvents("woke", 1); len(woke) != 1 || woke[0].Kind != "cold" {
		t.Errorf("it woke by %+v", woke)
	}
	// The pid of the one before may be the new one's.
	if list := b.processes(); list[len(list)-1].Name != "web" || list[len(list)-1].State != types.ProcessStateRunning {
		t.Errorf("its processes: %+v", list)
	}
}

func TestBrowserGetsAWaitingPageWhileAServerStarts(t *testing.T) {
	n := commonNode(t)
	b := n.newSlowBox(t)
	b.write("/srv/slow", nil)
	b.stop()

	c := n.browser(t, "h2")
	req, err := http.NewRequestWithContext(t.Context(), "GET", b.url, nil)
	b.must(err)
	req.Header.Set("Accept", "text/html")
	req.Header.Set("Sec-Fetch-Mode", "navigate")
	resp, err := c.Do(req)
	b.must(err)
	resp.Body.Close()
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" ||
		resp.Header.Get("Cache-Control") != "no-store" || !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/html") {
		t.Errorf("the browser got %s, %v", resp.Status, resp.Header)
	}
	b.exec("rm /srv/slow")
	if text, _, err := fetch(t.Context(), c, b.url, http.StatusOK); err != nil || text != "hello" {
		t.Errorf("a client other than a browser waited and got %q, %v", text, err)
	}
	resp, err = c.Do(req)
	b.must(err)
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("the browser's second try got %s", resp.Status)
	}
}

func TestVisitorsSeeWhyAServerCrashed(t *testing.T) {
	n := commonNode(t)
	b := n.newWebBox(t)
	b.write("/srv/server.js", []byte("throw new Error('a broken <build>')"))
	b.stop()
	c := n.browser(t, "h2")
	text, _ := b.get(c, "/", http.StatusBadGateway)
	for _, want := range []string{"process_exited", "process web exited with code 1", "a broken \\u003cbuild\\u003e"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in %s", want, text)
		}
	}
	b.write("/srv/server.js", webServer)
	b.stop()
	b.get(c, "/", http.StatusOK)
}

func TestPortThatNeverWakes(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	b.serve(types.ExposePortRequest{Wake: "never"})
	c := n.browser(t, "h2")
	b.get(c, "/", http.StatusOK)
	for _, rest := range []struct {
		state types.State
		enter func()
	}{{types.StateAsleep, b.sleep}, {types.StateStopped, b.stop}} {
		rest.enter()
		text, header := b.get(c, "/", http.StatusGone)
		if header.Get("Content-Type") != "application/problem+json" || !strings.Contains(text, "sandbox_not_running") {
			t.Errorf("%s: %s, %v", rest.state, text, header)
		}
		if state := b.state(); state != rest.state {
			t.Errorf("it was %s and is %s", rest.state, state)
		}
	}
}

func TestPreviewsAndTheAPIShareNoHost(t *testing.T) {
	n := commonNode(t)
	b := n.newWebBox(t)
	c := n.browser(t, "h1")
	preview, err := url.Parse(b.url)
	b.must(err)
	ask := func(host, path string) (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), "GET", "https://"+host+path, nil)
		b.must(err)
		req.Header.Set("Authorization", "Bearer "+n.Token)
		resp, err := c.Do(req)
		b.must(err)
		defer resp.Body.Close()
		return resp.StatusCode, resp.Header.Get("Content-Type")
	}
	if status, kind := ask(preview.Host, "/api/v1/node"); status != http.StatusNotFound || kind != "" {
		t.Errorf("the API's path on a preview is the sandbox's own: got %d %s", status, kind)
	}
	domain := preview.Host[strings.Index(preview.Host, ".")+1:]
	if status, _ := ask("www."+domain, "/api/v1/openapi.json"); status != http.StatusNotFound {
		t.Errorf("the API's path under the preview domain: %d", status)
	}
	for _, host := range []string{"127.0.0.1", "localhost", "api.doze.localhost"} {
		host = fmt.Sprint(host, ":", n.Port)
		if status, _ := ask(host, "/started"); status != http.StatusNotFound {
			t.Errorf("the preview's path on the API at %s: %d", host, status)
		}
		if status, _ := ask(host, "/api/v1/node"); status != http.StatusOK {
			t.Errorf("the API at %s: %d", host, status)
		}
	}
}

func TestMetricsCoverRequests(t *testing.T) {
	n := commonNode(t)
	if status, _ := n.do(t, "GET", "/node", "", nil); status != http.StatusOK {
		t.Fatalf("the API: %d", status)
	}
	if n.metric(t, "caddy_http_requests_total") == 0 {
		t.Error("the node's own Caddyfile does not count requests")
	}
}

func TestEveryWrongPreviewIsTheSameNotFound(t *testing.T) {
	n := commonNode(t)
	b := n.newWebBox(t)
	b.sleep()
	c := n.browser(t, "h2")
	host := strings.TrimPrefix(b.url, "https://")
	label, domain, _ := strings.Cut(host, ".")
	parts := strings.Split(label, "-")
	if len(parts) != 3 || parts[1] != b.id {
		t.Fatalf("the preview's host is %s", host)
	}
	token := parts[2]
	last := map[bool]string{true: "b", false: "a"}[strings.HasSuffix(token, "a")]
	var same string
	for name, label := range map[string]string{
		"wrong token":   fmt.Sprintf("%d-%s-%s", webPort, b.id, token[:len(token)-1]+last),
		"no token":      fmt.Sprintf("%d-%s", webPort, b.id),
		"wrong port":    fmt.Sprintf("%d-%s-%s", webPort+1, b.id, token),
		"wrong sandbox": fmt.Sprintf("%d-%s-%s", webPort, "aaaaaaaaaaaa", token),
		"no preview":    "www",
	} {
		text, header, err := fetch(t.Context(), c, "https://"+label+"."+domain, http.StatusNotFound)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		text = strings.ReplaceAll(text, `"`+header.Get("X-Request-Id")+`"`, `"its id"`)
		if same == "" {
			same = text
		}
		if text != same {
			t.Errorf("%s: the response differs: %s", name, text)
		}
	}
	if state := b.state(); state != types.StateAsleep {
		t.Errorf("it was asleep and is %s", state)
	}
}

func TestServerThatNeverRespondsHoldsItsSandboxOnlyForItsVisitor(t *testing.T) {
	n := commonNode(t)
	for _, proto := range []string{"h2", "h1"} {
		t.Run(proto, func(t *testing.T) {
			b := n.newWebBox(t)
			c := n.browser(t, proto)
			ctx, leave := context.WithCancel(t.Context())
			gone := make(chan error, 1)
			go func() {
				_, _, err := fetch(ctx, c, b.url+"/never", http.StatusOK)
				gone <- err
			}()
			testkit.Eventually(t, "the server has the request", func() bool {
				text, _ := b.get(c, "/open", http.StatusOK)
				return text == "1"
			})
			if _, err := n.API.Sleep(testkit.Context(t), b.id); !problem.Has(err, problem.SandboxBusy) {
				t.Errorf("putting it to sleep under a request: %v, want busy", err)
			}
			leave()
			if err := <-gone; err == nil {
				t.Error("the server responded")
			}
			b.sleep() // as soon as the lease is released
			b.get(c, "/", http.StatusOK)
		})
	}
}

func TestForceOverridesVisitors(t *testing.T) {
	n := commonNode(t)
	b := n.newWebBox(t)
	c := n.browser(t, "h1")
	answer := make(chan error, 1)
	go func() {
		text, _, err := fetch(testkit.Context(t), c, b.url+"/held", http.StatusOK)
		if err == nil && text != "waited" {
			err = fmt.Errorf("the response is %q", text)
		}
		answer <- err
	}()
	isOpen := func() bool {
		text, _ := b.get(c, "/open", http.StatusOK)
		return text == "1"
	}
	testkit.Eventually(t, "the server has the request", isOpen)
	if sb, err := n.API.ForceSleep(testkit.Context(t), b.id); err != nil || sb.State != types.StateAsleep {
		t.Fatalf("forced to sleep it is %s, %v", sb.State, err)
	}
	b.get(c, "/free", http.StatusOK) // the request was paused and goes on
	b.must(<-answer)

	lost := make(chan error, 1)
	go func() {
		text, _, err := fetch(testkit.Context(t), c, b.url+"/never", http.StatusServiceUnavailable)
		if err == nil && !strings.Contains(text, "sandbox_stopped") {
			err = fmt.Errorf("the response is %q", text)
		}
		lost <- err
	}()
	testkit.Eventually(t, "the server has the request", isOpen)
	if sb, err := n.API.ForceStop(testkit.Context(t), b.id); err != nil || sb.State != types.StateStopped {
		t.Fatalf("forced to stop it is %s, %v", sb.State, err)
	}
	b.must(<-lost)
	b.get(c, "/", http.StatusOK)
	b.sleep() // every lease has been released
}

func TestServerThatResetsIsABadGateway(t *testing.T) {
	n := commonNode(t)
	b := n.newWebBox(t)
	c := n.browser(t, "h2")
	for range 20 {
		if text, _ := b.get(c, "/reset", http.StatusBadGateway); !strings.Contains(text, "server_disconnected") {
			t.Fatalf("got %s", text)
		}
	}
	b.get(c, "/", http.StatusOK)
	_, err := n.API.StopProcess(testkit.Context(t), b.id, b.web.ID, "")
	b.must(err)
	if text, _ := b.get(c, "/", http.StatusBadGateway); !strings.Contains(text, "port_not_listening") {
		t.Errorf("nothing listens: %s", text)
	}
	b.sleep()
}
