package main

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/policies/sdk/sdktest"
)

func TestTheParameterReplacesTheClientsOwn(t *testing.T) {
	p := sdktest.New(t, `{"name":"api key"}`)
	p.Secrets["value"] = "s3&cr=t ü"
	const want = "api+key=s3%26cr%3Dt%20%C3%BC"
	for sent, uri := range map[string]string{
		"/a":                       "/a?" + want,
		"/a?":                      "/a?" + want,
		"/a%2Fb?q=%41&x":           "/a%2Fb?q=%41&x&" + want,
		"/?api+key=own":            "/?" + want,
		"/?api%20key=own&q=1":      "/?q=1&" + want,
		"/?%61pi%20key&q&api+key=": "/?q&" + want,
		"/?q=api+key":              "/?q=api+key&" + want,
		"/?API+key=x":              "/?API+key=x&" + want,
		"/?bad%zz=1":               "/?bad%zz=1&" + want,
	} {
		if got := p.Send(sdktest.Get("https://maps.example.com" + sent)); got.URI != uri {
			t.Errorf("%s became %q (%s), want %q", sent, got.URI, got.Reason, uri)
		}
	}
}

func TestTheNameIsRequired(t *testing.T) {
	if _, err := sdktest.Start(`{}`); err == nil || !strings.Contains(err.Error(), "missing") {
		t.Errorf("got %v", err)
	}
}
