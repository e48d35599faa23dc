package sdktest_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
	"github.com/doze-run/doze/policies/sdk/sdktest"
	"github.com/doze-run/doze/policies/sdk/sdktest/testdata/script"
)

func init() {
	abi.Loaded = abi.Module{Start: script.Start, HandleRequest: script.HandleRequest, HandleResponse: script.HandleResponse}
}

// The node's own host must pass the same table: see cmd/doze.
func TestProbes(t *testing.T) {
	for _, p := range script.Probes() {
		t.Run(p.Name, func(t *testing.T) {
			verdict, got := send(p)
			if verdict != p.Want || p.Reason != "" && got.Reason != p.Reason {
				t.Errorf("%s %q, want %s %q", verdict, got.Reason, p.Want, p.Reason)
			}
			if p.Want == "error" || p.Want == "invalid" {
				return
			}
			if !slices.Equal(got.Notes, p.Notes) {
				t.Errorf("notes are %.80q, want %.80q", got.Notes, p.Notes)
			}
			if sent := got.Method + " " + got.URI; p.Sent != "" && sent != p.Sent {
				t.Errorf("sent %s, want %s", sent, p.Sent)
			}
			if p.SentBody != "" && got.Body != p.SentBody {
				t.Errorf("sent the body %.80q, want %.80q", got.Body, p.SentBody)
			}
			for name, want := range p.Headers {
				if value := strings.Join(got.Header.Values(name), ", "); value != want {
					t.Errorf("sent %s: %.80q, want %.80q", name, value, want)
				}
			}
			for name, want := range p.GotHeaders {
				if value := got.Response.Header.Get(name); value != want {
					t.Errorf("got %s: %.80q, want %.80q", name, value, want)
				}
			}
			if p.Got != "" {
				if response := fmt.Sprint(got.Response.StatusCode, " ", got.ResponseBody); response != p.Got {
					t.Errorf("got %.80q, want %.80q", response, p.Got)
				}
			}
		})
	}
}

// send runs a probe. The verdict is "invalid" if the policy does not start, and "error" if
// the node would stop it.
func send(p script.Probe) (verdict string, got sdktest.Result) {
	verdict = "invalid"
	defer func() { _ = recover() }()
	config, err := json.Marshal(p.Script)
	if err != nil {
		panic(err)
	}
	policy, err := sdktest.Start(string(config))
	if err != nil {
		return verdict, got
	}
	for name, value := range script.Secrets {
		policy.Secrets[name] = value
	}
	policy.Upstream = func(*http.Request) *http.Response {
		return &http.Response{StatusCode: 200, Header: http.Header{script.UpstreamHeader: {"yes"}}, Body: io.NopCloser(strings.NewReader(script.UpstreamBody))}
	}
	verdict = "error"
	got = policy.Send(sdktest.Request("POST", script.URL, p.Body))
	switch {
	case got.Denied && got.Reason == p.Reason:
		verdict = "deny"
	case got.Denied: // for a reason that is not the policy's mistake
	case got.Method == "":
		verdict = "respond"
	default:
		verdict = "allow"
	}
	return verdict, got
}
