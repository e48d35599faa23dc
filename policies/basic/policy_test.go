package main

import (
	"encoding/base64"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/policies/sdk/sdktest"
)

func TestCredentialsAreTheRules(t *testing.T) {
	p := sdktest.New(t, `{"user":"deploy"}`)
	p.Secrets["password"] = "pass:word/ü"
	want := []string{"Basic " + base64.StdEncoding.EncodeToString([]byte("deploy:pass:word/ü"))}
	for name, own := range map[string][]string{
		"client without credentials": nil,
		"client with its own":        {"Basic eDp5"},
		"client with several":        {"Bearer x", "Basic eDp5"},
	} {
		t.Run(name, func(t *testing.T) {
			r := sdktest.Get("https://git.example.com/a/b.git/info/refs?service=git-upload-pack")
			r.Header["Authorization"] = own
			got := p.Send(r)
			if !slices.Equal(got.Header["Authorization"], want) {
				t.Errorf("sent %q, want %q", got.Header["Authorization"], want)
			}
			if got.URI != "/a/b.git/info/refs?service=git-upload-pack" {
				t.Errorf("the URI became %q", got.URI)
			}
		})
	}
}

func TestTheUserIsRequired(t *testing.T) {
	for config, want := range map[string]string{
		"":               `"user" is missing`,
		`{"user":"a:b"}`: "colon",
		`{"usr":"a"}`:    `there is no "usr" here, but user`,
		`{"user":1}`:     "number",
	} {
		if _, err := sdktest.Start(config); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", config, err, want)
		}
	}
}

func TestRequestsWithoutTheSecretAreDenied(t *testing.T) {
	got := sdktest.New(t, `{"user":"deploy"}`).Send(sdktest.Get("https://git.example.com/"))
	if !got.Denied || got.Method != "" {
		t.Errorf("got %+v", got)
	}
}
