package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/policies/sdk/sdktest/testdata/script"
	"github.com/doze-run/doze/testkit"
)

// The node's host accepts and refuses the same as package sdktest, which passes the same
// table.
func TestProbesOnTheNodesHost(t *testing.T) {
	module := filepath.Join(t.TempDir(), "probe.wasm")
	build := exec.CommandContext(t.Context(), "go", "build", "-buildmode=c-shared", "-ldflags=-s -w", "-o", module, "../../policies/sdk/sdktest/testdata/script/guest")
	build.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "GOFLAGS=-buildvcs=false")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building the probes: %v\n%s", err, out)
	}
	limits := compiling
	limits.TimeLimit = testkit.Patience // a busy machine decides no probe
	r, err := newRunner(limits)
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	compiled, err := r.module(t.Context(), module)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range script.Probes() {
		t.Run(p.Name, func(t *testing.T) {
			o := sendProbe(t.Context(), t, r, compiled, p)
			if o.Verdict != p.Want || p.Reason != "" && o.Reason != p.Reason {
				t.Errorf("%s %s, want %s %q", o.summary(), o.Detail, p.Want, p.Reason)
			}
			if p.Want == verdictError || p.Want == verdictInvalid {
				return
			}
			if !slices.Equal(o.Notes, p.Notes) {
				t.Errorf("notes are %.80q, want %.80q", o.Notes, p.Notes)
			}
			if p.Sent != "" && o.Sent.Method+" "+strings.TrimPrefix(o.Sent.URL, "https://api.example.com") != p.Sent {
				t.Errorf("sent %s %s, want %s", o.Sent.Method, o.Sent.URL, p.Sent)
			}
			if p.SentBody != "" && o.Sent.Body != p.SentBody {
				t.Errorf("sent the body %.80q, want %.80q", o.Sent.Body, p.SentBody)
			}
			for name, want := range p.Headers {
				if value := strings.Join(o.Sent.Headers.Values(name), ", "); value != want {
					t.Errorf("sent %s: %.80q, want %.80q", name, value, want)
				}
			}
			for name, want := range p.GotHeaders {
				if value := o.Response.Headers.Get(name); value != want {
					t.Errorf("got %s: %.80q, want %.80q", name, value, want)
				}
			}
			if p.Got != "" {
				if response := fmt.Sprint(o.Response.Status, " ", o.Response.Body); response != p.Got {
					t.Errorf("got %.80q, want %.80q", response, p.Got)
				}
			}
		})
	}
}

func sendProbe(ctx context.Context, t *testing.T, r *runner, module runnerModule, p script.Probe) *outcome {
	t.Helper()
	config, err := json.Marshal(p.Script)
	if err != nil {
		t.Fatal(err)
	}
	c, err := r.configure(ctx, []step{{module: module, config: config}})
	if err != nil {
		return &outcome{Verdict: verdictInvalid, Reason: err.Error()}
	}
	defer c.release()
	o, err := c.send(ctx, &recorded{
		recordedRequest: recordedRequest{Method: http.MethodPost, URL: script.URL, Body: p.Body}, Secrets: script.Secrets,
		Response: recordedResponse{Status: http.StatusOK, Headers: recordedHeader{script.UpstreamHeader: {"yes"}}, Body: script.UpstreamBody},
	}, p.Name)
	if err != nil {
		t.Fatal(err)
	}
	return o
}
