package policy

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/testkit"
)

// scripted returns a policy that runs the commands in lines.
func scripted(t testing.TB, h *Host, lines ...string) *Policy {
	t.Helper()
	return configure(t, compile(t, h, "script", guest(t, script)), commands(t, lines...))
}

// commands returns the configuration of the guest script.
func commands(t testing.TB, lines ...string) string {
	t.Helper()
	text, err := json.Marshal(lines)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func expectNotes(t *testing.T, x *result, want ...string) {
	t.Helper()
	if x.Denied != nil {
		t.Fatalf("denied: %+v", *x.Denied)
	}
	testkit.Diff(t, "the notes", x.Notes, want)
}

func TestThePolicySeesTheRequest(t *testing.T) {
	h := newHost(t, nil)
	r := request("PUT", "/a%2Fb?q=1")
	r.Header = http.Header{"X-One": {"1", "2"}, "Accept": {"*/*"}}
	_, x := exchange(scripted(t, h, "request get-method", "request get-uri", "request names 0",
		"request get 0 x-ONE", "request get 0 host", "request get 0 x-none", "request host"), r, nil)
	expectNotes(t, x, "PUT", "/a%2Fb?q=1", "accept,host,x-one,", "1,2,", "api.example.com,", "", "api.example.com")
}

func TestPoliciesCannotChangeTheDestination(t *testing.T) {
	h := newHost(t, nil)
	p := scripted(t, h, "request method POST", "request uri //evil.example.com/x%2Fy?z=%26", "request set 0 authorization Bearer-x",
		"request add 0 x-one 2", "request remove 0 cookie", "request set 0 content-length 5")
	r := request("GET", "/")
	r.Header = http.Header{"Cookie": {"a=b"}, "X-One": {"1"}, "Authorization": {"mine"}}
	called := false
	_, x := exchange(p, r, func(_ http.ResponseWriter, r *http.Request) {
		called = true
		if got := r.Method + " " + r.URL.String() + " " + r.Host; got != "POST https://api.example.com//evil.example.com/x%2Fy?z=%26 api.example.com" {
			t.Errorf("got %s", got)
		}
		if got := fmt.Sprint(r.Header); got != "map[Authorization:[Bearer-x] X-One:[1 2]]" {
			t.Errorf("got %s", got)
		}
	})
	if !called || x.Denied != nil {
		t.Fatalf("called %v, denied %+v", called, x.Denied)
	}
}

func TestResponseHandlersSeeTheRequestAsTheirPolicySentIt(t *testing.T) {
	h := newHost(t, nil)
	p := scripted(t, h, "request set 0 authorization mine", "request set 2 x-sum mine", "request uri /mine", "request method POST",
		"response get 0 authorization", "response get 2 x-sum", "response get-uri", "response get-method", "response names 0")
	later := scripted(t, h, "request set 0 authorization others", "request set 0 x-more others", "request method PUT")
	x := run(httptest.NewRecorder(), request("GET", "/"), Info{}, []Step{{Policy: p}, {Policy: later}}, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.Method != "PUT" || r.Header.Get("Authorization") != "others" || r.Trailer.Get("X-Sum") != "mine" {
			t.Errorf("got %s, %v, %v", r.Method, r.Header, r.Trailer)
		}
		// In place, as secrets are inserted.
		r.Header["Authorization"][0], r.Trailer["X-Sum"][0], r.URL.Path = "secret", "secret", "/secret"
	}))
	expectNotes(t, x, "mine,", "mine,", "/mine", "POST", "authorization,host,")
}

func TestARejectedChangeDeniesTheRequest(t *testing.T) {
	h := newHost(t, nil)
	for name, lines := range map[string][]string{
		"waits for the response": {"start enable 1", "request set 0 x-mine 1", "request write 0 mine", "response note seen", "failed note seen"},
		"is done":                {"start enable 65537", "request set 0 x-mine 1", "request write 0 mine"},
	} {
		first, p := scripted(t, h, "failed note failed"), scripted(t, h, lines...)
		w, r := httptest.NewRecorder(), request("POST", "/")
		c := NewChain(w, r, Info{})
		defer c.Close()
		before := Snapshot(r)
		if c.Request(Step{Policy: first}) || c.Request(Step{Policy: p}) {
			t.Fatalf("%s: the request was stopped", name)
		}
		if before.Header.Get("X-Mine") != "" || r.Header.Get("X-Mine") != "1" || string(c.Wrote()) != "mine" {
			t.Errorf("%s: before %v, after %v, wrote %q", name, before.Header, r.Header, c.Wrote())
		}
		c.Reject("not so")
		d, cut := c.Response(false)
		if cut || d == nil || d.Policy != "script" || d.Code != problem.PolicyFailed || d.Reason != "the policy was stopped: not so" {
			t.Errorf("%s: got %+v, cut %v", name, d, cut)
		}
		if !slices.Equal(c.Notes, []string{"failed"}) {
			t.Errorf("%s: notes are %q", name, c.Notes)
		}
		if len(first.slots) != 0 || len(p.slots) != 0 {
			t.Errorf("%s: an instance is in use", name)
		}
	}
}

func TestStepsRunInOrderAndResponsesInReverse(t *testing.T) {
	h := newHost(t, nil)
	var steps []Step
	for _, n := range []string{"1", "2", "3"} {
		steps = append(steps, Step{Policy: scripted(t, h, "request note request-"+n, "request add 0 x-step "+n, "response note response-"+n)})
	}
	x := run(httptest.NewRecorder(), request("GET", "/"), Info{}, steps, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if got := r.Header["X-Step"]; !slices.Equal(got, []string{"1", "2", "3"}) {
			t.Errorf("got %v", got)
		}
	}))
	expectNotes(t, x, "request-1", "request-2", "request-3", "response-3", "response-2", "response-1")
}

func TestADenialEndsTheExchangeAndLeavesTheResponseToTheCaller(t *testing.T) {
	h := newHost(t, nil)
	first := scripted(t, h, "response note seen", "failed note failed")
	second := scripted(t, h, "request set 1 x-mine 1", "request write 1 mine", "request deny not on\tFridays", "request deny later")
	w := httptest.NewRecorder()
	x := run(w, request("GET", "/"), Info{}, []Step{{Policy: first}, {Policy: second}}, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		t.Error("the request was sent")
	}))
	if d := x.Denied; x.Cut || d == nil || *d != (Denial{Policy: "script", Reason: "not on Fridays", Code: problem.PolicyDenied}) {
		t.Fatalf("got %+v, cut %v", d, x.Cut)
	}
	if len(w.Header()) > 0 || w.Body.Len() > 0 {
		t.Errorf("written: %v %s", w.Header(), w.Body)
	}
	if !slices.Equal(x.Notes, []string{"failed"}) {
		t.Errorf("notes %q", x.Notes)
	}
}

func TestAPolicyRespondsItself(t *testing.T) {
	h := newHost(t, nil)
	p := scripted(t, h, "request status 451", "request set 1 content-type text/x-law", "request write 1 no", "request write 1 pe",
		"request set 3 x-sum 7", "request respond")
	s := httptest.NewServer(handler(t, []Step{{Policy: p}}, noUpstream))
	defer s.Close()
	resp, err := http.Get(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	body := testkit.Body(t, resp)
	if resp.StatusCode != 451 || body != "nope" || resp.Header.Get("Content-Type") != "text/x-law" || resp.Trailer.Get("X-Sum") != "7" {
		t.Errorf("got %d %s %v %v", resp.StatusCode, body, resp.Header, resp.Trailer)
	}
	_, x := exchange(p, request("GET", "/"), nil)
	if x.RespondedBy != "script" {
		t.Errorf("%q responded", x.RespondedBy)
	}
}

func TestARequestsBodyIsBufferedForThePolicyAndSent(t *testing.T) {
	h := newHost(t, func(c *Config) { c.RequestLimit = 100 })
	send := func(p *Policy, body string) (got string, length int64, x *result) {
		r := request("POST", "/")
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
		_, x = exchange(p, r, func(_ http.ResponseWriter, r *http.Request) {
			b, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			got, length = string(b), r.ContentLength
		})
		return got, length, x
	}
	read := scripted(t, h, "start enable 1", "request read 0", "response read 0")
	got, length, x := send(read, "hello")
	expectNotes(t, x, "hello", "")
	if got != "hello" || length != 5 {
		t.Errorf("sent %q, length %d", got, length)
	}

	got, length, x = send(scripted(t, h, "request enable 1", "request upper 0", "request write 0 !"), "hello")
	expectNotes(t, x)
	if got != "HELLO!" || length != 6 {
		t.Errorf("sent %q, length %d", got, length)
	}

	_, _, x = send(read, strings.Repeat("x", 101))
	if x.Denied == nil || x.Denied.Code != problem.PolicyBodyTooLarge || !strings.Contains(x.Denied.Reason, "100 bytes") {
		t.Errorf("got %+v", x.Denied)
	}

	// The policy does not read the body, so the body is not buffered and may be longer.
	got, _, x = send(scripted(t, h, "start enable 1"), strings.Repeat("x", 1000))
	expectNotes(t, x)
	if len(got) != 1000 {
		t.Errorf("sent %d bytes", len(got))
	}

	_, _, x = send(scripted(t, h, "request length 0"), "hello")
	if x.Denied == nil || !strings.Contains(x.Denied.Reason, "without buffer_request") {
		t.Errorf("got %+v", x.Denied)
	}
	got, _, x = send(scripted(t, h, "request length 0", "request write 0 instead"), strings.Repeat("x", 1000))
	expectNotes(t, x, "1000")
	if got != "instead" {
		t.Errorf("sent %q", got)
	}
}

func TestAResponseIsBufferedForThePolicy(t *testing.T) {
	h := newHost(t, func(c *Config) { c.ResponseLimit = 100 })
	upstream := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Up", "1")
		w.Header().Set("Trailer", "X-Sum")
		w.Header().Set("Content-Length", "5")
		w.WriteHeader(http.StatusTeapot)
		_, _ = io.WriteString(w, "hello")
		w.Header().Set("X-Sum", "7")
		w.Header().Set(http.TrailerPrefix+"X-Late", "8")
	}
	get := func(lines ...string) (*http.Response, string) {
		p := scripted(t, h, lines...)
		s := httptest.NewServer(handler(t, []Step{{Policy: p}}, http.HandlerFunc(upstream)))
		defer s.Close()
		resp, err := http.Get(s.URL)
		if err != nil {
			t.Fatal(err)
		}
		return resp, testkit.Body(t, resp)
	}
	resp, body := get("start enable 6", "response upper 1", "response status 200", "response remove 1 x-up", "response set 1 x-down 2",
		"response set 3 x-sum 9")
	if resp.StatusCode != 200 || body != "HELLO" || resp.Header.Get("X-Up") != "" || resp.Header.Get("X-Down") != "2" ||
		resp.Trailer.Get("X-Sum") != "9" || resp.Trailer.Get("X-Late") != "8" {
		t.Errorf("got %d %q %v %v", resp.StatusCode, body, resp.Header, resp.Trailer)
	}
	if resp, body = get("start enable 2"); resp.StatusCode != 418 || body != "hello" || resp.Trailer.Get("X-Sum") != "7" {
		t.Errorf("got %d %q %v", resp.StatusCode, body, resp.Trailer)
	}
	if resp, body = get("start enable 2", "response deny it says hello"); resp.StatusCode != 403 || !strings.Contains(body, "it says hello") || resp.Header.Get("X-Up") != "" {
		t.Errorf("got %d %q %v", resp.StatusCode, body, resp.Header)
	}
	if resp, body = get("start enable 2", "response panic oh"); resp.StatusCode != 403 || !strings.Contains(body, "oh") {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
	upstream = func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, strings.Repeat("x", 101)) }
	if resp, body = get("start enable 2"); resp.StatusCode != 502 || !strings.Contains(body, "100 bytes") {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
	_, x := exchange(scripted(t, h, "start enable 2", "response get-status", "response names 1", "response read 1"), request("GET", "/"),
		func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Up", "1")
			w.WriteHeader(http.StatusAccepted)
			_, _ = io.WriteString(w, "done")
		})
	expectNotes(t, x, "202", "x-up,", "done")
}

func TestAFailureAfterTheResponseBeganCutsIt(t *testing.T) {
	h := newHost(t, nil)
	for _, line := range []string{"response panic late", "response deny late", "response spin"} {
		s := httptest.NewServer(handler(t, []Step{{Policy: scripted(t, h, line)}}, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "hello")
			_ = http.NewResponseController(w).Flush()
		})))
		resp, err := http.Get(s.URL)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(resp.Body); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: got %q, %v: it looks whole", line, b, err)
		}
		_ = resp.Body.Close()
		s.Close()
	}
}

// A policy that does not handle responses does not intercept them.
func TestStreamsFlushAndUpgradesPassUntouched(t *testing.T) {
	h := newHost(t, nil)
	for _, lines := range [][]string{{"start enable 65536"}, {"response note done"}} {
		p := scripted(t, h, lines...)
		w := httptest.NewRecorder()
		run(w, request("GET", "/"), Info{}, []Step{{Policy: p}}, http.HandlerFunc(func(got http.ResponseWriter, _ *http.Request) {
			if got != http.ResponseWriter(w) {
				t.Errorf("%q: the writer is a %T", lines, got)
			}
		}))
		s := httptest.NewServer(handler(t, []Step{{Policy: p}}, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			conn, rw, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			_, _ = rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
			_ = rw.Flush()
			line, _ := rw.ReadString('\n')
			_, _ = rw.WriteString(line)
			_ = rw.Flush()
		})))
		conn, err := net.Dial("tcp", s.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: api.example.com\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\nping\n")
		all, _ := io.ReadAll(bufio.NewReader(conn))
		if !strings.HasPrefix(string(all), "HTTP/1.1 101") || !strings.HasSuffix(string(all), "\r\n\r\nping\n") {
			t.Errorf("got %q", all)
		}
		_ = conn.Close()
		s.Close()
	}

	r := request("GET", "/")
	r.Header = http.Header{"Connection": {"keep-alive, Upgrade"}, "Upgrade": {"websocket"}}
	_, x := exchange(scripted(t, h, "start enable 2"), r, nil)
	if x.Denied == nil || !strings.Contains(x.Denied.Reason, "changes its protocol") {
		t.Errorf("got %+v", x.Denied)
	}
}

func TestPoliciesSeeAFailedResponse(t *testing.T) {
	h := newHost(t, nil)
	p := scripted(t, h, "response note whole", "failed note failed")
	x := run(httptest.NewRecorder(), request("GET", "/"), Info{}, []Step{{Policy: p}}, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		panic(http.ErrAbortHandler)
	}))
	if !x.Cut || x.Denied != nil {
		t.Errorf("cut %v, denied %+v", x.Cut, x.Denied)
	}
	if !slices.Equal(x.Notes, []string{"failed"}) {
		t.Errorf("notes %q", x.Notes)
	}
	if len(p.slots) != 0 {
		t.Error("the instance is lost")
	}
}

func TestClosingAChainReleasesItsInstances(t *testing.T) {
	h := newHost(t, nil)
	p := scripted(t, h, "response note whole")
	c := NewChain(httptest.NewRecorder(), request("GET", "/"), Info{})
	if c.Request(Step{Policy: p}) || len(p.slots) != 1 {
		t.Fatalf("%d instances in use", len(p.slots))
	}
	c.Close()
	if len(p.slots) != 0 {
		t.Errorf("%d instances in use", len(p.slots))
	}
}

func TestPoliciesChangeTrailersOfTheRequest(t *testing.T) {
	h := newHost(t, nil)
	p := scripted(t, h, "start enable 5", "request length 0", "request names 2", "request get 2 x-sum", "request set 2 x-sum 8", "request set 2 x-more 9")
	r := request("POST", "/")
	r.Body, r.Trailer = io.NopCloser(strings.NewReader("x")), http.Header{"X-Sum": {"7"}}
	_, x := exchange(p, r, nil)
	expectNotes(t, x, "1", "x-sum,", "7,")
	if got := fmt.Sprint(r.Trailer); got != "map[X-More:[9] X-Sum:[8]]" {
		t.Errorf("got %s", got)
	}
}

// A policy's body can outlive its instance: until the upstream has received it.
func TestBodiesInMemoryAreBounded(t *testing.T) {
	h := newHost(t, func(c *Config) { c.RequestLimit = 100 })
	for name, c := range map[string]struct {
		lines  []string
		length int64 // as declared; the body has 60 bytes
		held   int64 // while the request is sent
	}{
		"read":                        {[]string{"start enable 65537", "request length 0"}, 60, 60},
		"read, of unknown length":     {[]string{"start enable 65537", "request length 0"}, -1, 60},
		"written":                     {[]string{"start enable 65536", "request write 0 x*30", "request write 0 x*30"}, 60, 60},
		"read and written":            {[]string{"start enable 65537", "request upper 0"}, 60, 120},
		"the beginning of a response": {[]string{"request write 1 x*60"}, 60, 60},
		"not read":                    {[]string{"start enable 65537"}, 60, 0},
	} {
		bodies := quota.New(120)
		sent := false
		send := func() *result {
			r := request("POST", "/")
			r.Body, r.ContentLength = io.NopCloser(strings.NewReader(strings.Repeat("x", 60))), c.length
			sent = false
			return run(httptest.NewRecorder(), r, Info{Bodies: bodies}, []Step{{Policy: scripted(t, h, c.lines...)}}, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
				if n := bodies.Used(); n != c.held {
					t.Errorf("%s: %d bytes are held", name, n)
				}
				sent = true
			}))
		}
		if x := send(); x.Denied != nil || !sent {
			t.Errorf("%s: denied %+v, sent %v", name, x.Denied, sent)
		}
		if n := bodies.Used(); n != 0 {
			t.Errorf("%s: %d bytes are held after the request", name, n)
		}
		if c.held == 0 {
			continue
		}
		_ = bodies.TryAcquire(61) // another request's
		if x := send(); x.Denied == nil || x.Denied.Code != problem.EgressLimitExceeded || sent {
			t.Errorf("%s: denied %+v, sent %v", name, x.Denied, sent)
		}
		if n := bodies.Used(); n != 61 {
			t.Errorf("%s: %d bytes are held after the denial, want 61", name, n)
		}
	}
}

// The fields of the upstream's response count, even if the policy had set a field before.
func TestFieldsOfBufferedResponsesAreBounded(t *testing.T) {
	h := newHost(t, nil)
	p := scripted(t, h, "start enable 2", "request set 1 x-own 1", "response repeat 10 add 1 x-more {i}")
	_, x := exchange(p, request("GET", "/"), func(w http.ResponseWriter, _ *http.Request) {
		for n := range 250 {
			w.Header().Set(fmt.Sprint("X-Field-", n), "1")
		}
	})
	if x.Denied == nil || !strings.Contains(x.Denied.Reason, "more than 256 fields") {
		t.Errorf("got %+v", x.Denied)
	}
}

// Each cause has its own code, so that clients know what to change.
func TestDenialsHaveTheCodeOfTheirCause(t *testing.T) {
	h := newHost(t, func(c *Config) { c.RequestLimit, c.ResponseLimit = 100, 100 })
	send := func(body io.Reader, header ...string) *http.Request {
		r := request("POST", "/")
		r.Body, r.ContentLength = io.NopCloser(body), -1
		for i := 0; i < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		return r
	}
	long := strings.Repeat("x", 101)
	broken := iotest.ErrReader(io.ErrUnexpectedEOF)
	for name, c := range map[string]struct {
		lines   []string
		request *http.Request
		code    problem.Code
		status  int
		reason  string
	}{
		"it denies":                         {[]string{"request deny not on Fridays"}, send(http.NoBody), problem.PolicyDenied, 403, "not on Fridays"},
		"it panics":                         {[]string{"request panic"}, send(http.NoBody), problem.PolicyFailed, 403, "the policy failed"},
		"it does what it may not":           {[]string{"request method CONNECT"}, send(http.NoBody), problem.PolicyFailed, 403, "not a method"},
		"it needs a response of an upgrade": {[]string{"start enable 2"}, send(http.NoBody, "Connection", "Upgrade", "Upgrade", "websocket"), problem.PolicyFailed, 403, "changes its protocol"},
		"it reads too long a body":          {[]string{"start enable 1", "request read 0"}, send(strings.NewReader(long)), problem.PolicyBodyTooLarge, 413, "100 bytes"},
		"it writes too long a body":         {[]string{"request write 0 " + long}, send(http.NoBody), problem.PolicyBodyTooLarge, 413, "100 bytes"},
		"it writes too long a response":     {[]string{"request write 1 " + long}, send(http.NoBody), problem.PolicyResponseTooLarge, 502, "100 bytes"},
		"the response is too long":          {[]string{"start enable 2"}, send(http.NoBody), problem.PolicyResponseTooLarge, 502, "100 bytes"},
		"the body breaks off":               {[]string{"start enable 1", "request read 0"}, send(broken), problem.BodyIncomplete, 400, "could not be read"},
		"the streamed body breaks off":      {[]string{"request read 0"}, send(broken), problem.BodyIncomplete, 400, "could not be read"},
	} {
		t.Run(name, func(t *testing.T) {
			_, x := exchange(scripted(t, h, c.lines...), c.request, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, long) })
			if x.Cut || x.Denied == nil || x.Denied.Code != c.code || x.Denied.Code.Definition().Status != c.status || !strings.Contains(x.Denied.Reason, c.reason) {
				t.Errorf("got %+v, cut %v", x.Denied, x.Cut)
			}
		})
	}
}
