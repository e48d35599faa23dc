package main

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/policies/sdk/sdktest"
)

const api = "https://api.model.example/v1/messages"

// passed sends so many POST requests with that body, and returns how many went through.
func passed(p *sdktest.Policy, n int, url, body string) (passed int, reason string) {
	for range n {
		if got := p.Send(sdktest.Request("POST", url, body)); got.Denied {
			reason = got.Reason
		} else {
			passed++
		}
	}
	return passed, reason
}

func TestRequestsOfAWindowAreCounted(t *testing.T) {
	p := sdktest.New(t, `{"window":"1h","requests":3}`)
	n, reason := passed(p, 5, api, "{}")
	if n != 3 || reason != "budget: 3 of 3 requests in 1h are used, and this request needs 1" {
		t.Errorf("%d went through, then %q", n, reason)
	}
	if got := p.Send(sdktest.Get(api)); got.Denied {
		t.Errorf("a GET was counted: %s", got.Reason)
	}
	p.Now = p.Now.Add(time.Hour - time.Millisecond)
	if n, _ := passed(p, 1, api, "{}"); n != 0 {
		t.Error("the window ended early")
	}
	p.Now = p.Now.Add(time.Millisecond)
	if n, _ := passed(p, 5, api, "{}"); n != 3 {
		t.Errorf("%d went through in the next window", n)
	}
}

func TestBudgetsAreSeparateBySandboxAndHost(t *testing.T) {
	p := sdktest.New(t, `{"window":"1h","requests":1}`)
	for _, id := range []string{"a", "b"} {
		p.Sandbox.ID = id
		for _, host := range []string{"https://one.example/", "https://two.example/"} {
			if n, _ := passed(p, 2, host, ""); n != 1 {
				t.Errorf("sandbox %s, %s: %d went through", id, host, n)
			}
		}
	}
}

func TestANamedBudgetIsShared(t *testing.T) {
	p := sdktest.New(t, `{"name":"models","window":"1h","requests":1}`)
	one, _ := passed(p, 1, "https://one.example/", "")
	two, _ := passed(p, 1, "https://two.example/", "")
	if one+two != 1 {
		t.Errorf("%d went through", one+two)
	}
}

func TestBytesOfBodiesAreCounted(t *testing.T) {
	p := sdktest.New(t, `{"window":"1h","request_bytes":100}`)
	if n, reason := passed(p, 1, api, strings.Repeat("x", 101)); n != 0 || !strings.Contains(reason, "0 of 100 bytes") {
		t.Errorf("%d went through, %q", n, reason)
	}
	if n, _ := passed(p, 3, api, strings.Repeat("x", 40)); n != 2 {
		t.Errorf("%d of 40 bytes went through", n)
	}
	if n, _ := passed(p, 3, api, strings.Repeat("x", 20)); n != 1 {
		t.Errorf("%d of 20 bytes went through after them", n)
	}
}

// The client declares the length of its body, and need not send it.
func TestADeclaredLengthWithoutABodyBreaksNoBudget(t *testing.T) {
	p := sdktest.New(t, `{"window":"1h","request_bytes":100}`)
	passed(p, 1, api, strings.Repeat("x", 60))
	for range 3 {
		r := sdktest.Request("POST", api, "x")
		r.ContentLength = math.MaxInt64
		if got := p.Send(r); !got.Denied || !strings.Contains(got.Reason, "60 of 100 bytes sent in 1h are used, and this request needs 9223372036854775807") {
			t.Errorf("denied %v, %q", got.Denied, got.Reason)
		}
	}
	if n, _ := passed(p, 3, api, strings.Repeat("x", 20)); n != 2 {
		t.Errorf("%d of 20 bytes went through after 60", n)
	}
}

func TestInvalidLengthsAreDenied(t *testing.T) {
	p := sdktest.New(t, `{"window":"1h","request_bytes":100}`)
	passed(p, 1, api, strings.Repeat("x", 100))
	for _, length := range []string{"-100", "1e3", "99999999999999999999"} {
		r := sdktest.Request("POST", api, "")
		r.Header.Set("Content-Length", length)
		if got := p.Send(r); got.Reason != "budget: invalid Content-Length" {
			t.Errorf("length %s: denied %v, %q", length, got.Denied, got.Reason)
		}
	}
	if n, _ := passed(p, 1, api, "x"); n != 0 {
		t.Error("a negative length was refunded")
	}
}

func TestUpgradesAreDenied(t *testing.T) {
	p := sdktest.New(t, `{"window":"1h","requests":1}`)
	for protocol, want := range map[string]bool{"websocket": true, "WebSocket, h2c": true, "h2c": false, "": false} {
		r := sdktest.Get(api)
		if protocol != "" {
			r.Header.Set("Upgrade", protocol)
		}
		if got := p.Send(r); got.Denied != want {
			t.Errorf("an upgrade to %q: denied %v, %s", protocol, got.Denied, got.Reason)
		}
	}
}

func TestABodyWithoutALengthIsCountedAndArrives(t *testing.T) {
	p := sdktest.New(t, `{"window":"1h","request_bytes":100000}`)
	body := strings.Repeat("x", 60_000)
	for i, want := range []bool{false, true} {
		r := sdktest.Request("POST", api, body)
		r.ContentLength = -1
		got := p.Send(r)
		if got.Denied != want || !want && got.Body != body {
			t.Errorf("request %d: denied %v (%s), %d bytes arrive", i, got.Denied, got.Reason, len(got.Body))
		}
	}
}

func TestARequestRefusedForItsBytesDoesNotCount(t *testing.T) {
	p := sdktest.New(t, `{"window":"1h","requests":2,"request_bytes":100}`)
	passed(p, 5, api, strings.Repeat("x", 101))
	if n, _ := passed(p, 5, api, "x"); n != 2 {
		t.Errorf("%d went through", n)
	}
}

func TestMethodsThatCount(t *testing.T) {
	p := sdktest.New(t, `{"window":"1h","requests":1,"methods":["GET"]}`)
	if n, _ := passed(p, 2, api, ""); n != 2 {
		t.Errorf("%d POST went through", n)
	}
	p.Send(sdktest.Get(api))
	for _, method := range []string{"GET", "get"} {
		if got := p.Send(sdktest.Request(method, api, "")); !got.Denied {
			t.Errorf("%s was not counted", method)
		}
	}
}

func TestRequestsAreDeniedIfCountersAreExhausted(t *testing.T) {
	p := sdktest.New(t, `{"window":"1h","requests":1}`)
	for i := range 1100 {
		p.Sandbox.ID = strings.Repeat("x", i/100) + string(rune('0'+i/10%10)) + string(rune('0'+i%10))
		if got := p.Send(sdktest.Request("POST", api, "")); got.Denied != (i >= 1024) {
			t.Fatalf("sandbox %d: denied %v, %s", i, got.Denied, got.Reason)
		}
	}
}

func TestInvalidConfigurationsAreRefused(t *testing.T) {
	for config, want := range map[string]string{
		`{"requests":1}`:                                   "window",
		`{"window":"1 hour","requests":1}`:                 "window",
		`{"window":"1ms","requests":1}`:                    "window",
		`{"window":"9000h","requests":1}`:                  "window",
		`{"window":"1h"}`:                                  "the limit",
		`{"window":"1h","requests":-1}`:                    "the limit",
		`{"window":"1h","request_bytes":2000000000000000}`: "at most 1125899906842624",
		`{"window":"1h","requests":1.5}`:                   "requests: this is a whole number",
		`{"window":"1h","request_bytes":-5,"requests":9}`:  "the limit",
	} {
		if _, err := sdktest.Start(config); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", config, err, want)
		}
	}
}
