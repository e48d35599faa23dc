package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/policies/sdk/sdktest"
)

func TestTheTokenReplacesTheClientsOwn(t *testing.T) {
	p := sdktest.New(t, "")
	p.Secrets["token"] = "s3cret"
	r := sdktest.Get("https://api.example.com/user")
	r.Header["Authorization"] = []string{"Bearer placeholder", "Basic more"}
	if got := p.Send(r); !slices.Equal(got.Header["Authorization"], []string{"Bearer s3cret"}) {
		t.Errorf("sent %v, denied %q", got.Header, got.Reason)
	}
}

func TestTheSchemeIsConfigured(t *testing.T) {
	p := sdktest.New(t, `{"scheme":"token"}`)
	p.Secrets["token"] = "s3cret"
	if got := p.Send(sdktest.Get("https://api.example.com/")).Header.Get("Authorization"); got != "token s3cret" {
		t.Errorf("sent %q", got)
	}
}

func TestASchemeIsOneWord(t *testing.T) {
	for _, scheme := range []string{`a b`, `a\r\nx: y`, `\u00e4`} {
		if _, err := sdktest.Start(`{"scheme":"` + scheme + `"}`); err == nil || !strings.Contains(err.Error(), "one word") {
			t.Errorf("%s: got %v", scheme, err)
		}
	}
}

func TestRequestsWithoutTheSecretAreDenied(t *testing.T) {
	got := sdktest.New(t, "").Send(sdktest.Get("https://api.example.com/"))
	if !got.Denied || got.Method != "" {
		t.Errorf("got %+v", got)
	}
}
