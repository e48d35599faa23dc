package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/policies/sdk/sdktest"
)

func TestTheHeaderReplacesTheClientsOwn(t *testing.T) {
	p := sdktest.New(t, `{"name":"X-Api-Key","prefix":"key=\"","suffix":"\""}`)
	p.Secrets["value"] = "s3cret"
	r := sdktest.Get("https://api.example.com/")
	r.Header["X-Api-Key"] = []string{"a", "b"}
	if got := p.Send(r); !slices.Equal(got.Header["X-Api-Key"], []string{`key="s3cret"`}) {
		t.Errorf("sent %v, denied %q", got.Header, got.Reason)
	}
}

func TestInvalidConfigurationsAreRefused(t *testing.T) {
	for config, want := range map[string]string{
		`{}`:                              "missing",
		`{"name":"a b"}`:                  "not a name",
		`{"name":"Host"}`:                 "the node makes",
		`{"name":"content-LENGTH"}`:       "the node makes",
		`{"name":"a","prefix":"x\r\nb:"}`: "one line",
		`{"name":"a","suffix":"\n"}`:      "one line",
		`{"name":"a","value":"x"}`:        "but name, prefix, suffix",
	} {
		if _, err := sdktest.Start(config); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", config, err, want)
		}
	}
}
