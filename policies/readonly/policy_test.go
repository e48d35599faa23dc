package main

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/policies/sdk/sdktest"
)

func TestOnlyReadsPass(t *testing.T) {
	const git = `{"also":[{"methods":["POST"],"paths":["/*/*/git-upload-pack","/search/**"]}]}`
	const repo = `{"paths":["/repos/shop/**","/user"]}`
	tests := []struct {
		name, config, method, path, denied string
	}{
		{"GET", "", "GET", "/a", ""},
		{"HEAD", "", "HEAD", "/a", ""},
		{"OPTIONS", "", "OPTIONS", "/a", ""},
		{"any path where none is listed", "", "GET", "/a/../b;c//%2f", ""},
		{"POST", "", "POST", "/a", "POST is not allowed here"},
		{"DELETE", "", "DELETE", "/a", "DELETE is not allowed here"},
		{"a method in lower case", "", "get", "/a", "get is not allowed here"},
		{"configured methods", `{"methods":["PROPFIND"]}`, "PROPFIND", "/", ""},
		{"configured methods replace", `{"methods":["PROPFIND"]}`, "GET", "/", "not allowed here"},
		{"git fetches", git, "POST", "/a/b.git/git-upload-pack", ""},
		{"git pushes", git, "POST", "/a/b.git/git-receive-pack", "not allowed for this path"},
		{"a star does not match a slash", git, "POST", "/a/b/c/git-upload-pack", "not allowed for this path"},
		{"two stars are anything", git, "POST", "/search/a/b", ""},
		{"a listed path", repo, "GET", "/repos/shop/issues/1", ""},
		{"an exact path", repo, "GET", "/user?x=/repos/shop/", ""},
		{"below an exact path", repo, "GET", "/user/emails", "not allowed for this path"},
		{"an escape is decoded", repo, "GET", "/%75ser", ""},
		{"dots", repo, "GET", "/repos/shop/../other", "several ways"},
		{"escaped dots", repo, "GET", "/repos/shop/%2e%2e/other", "several ways"},
		{"an escaped slash", repo, "GET", "/repos/shop/..%2fother", "several ways"},
		{"a backslash", repo, "GET", "/repos/shop/%5c..%5cother", "several ways"},
		{"escaped twice", repo, "GET", "/repos/shop/%252e%252e/x", "several ways"},
		{"an empty part", repo, "GET", "/repos/shop//x", "several ways"},
		{"parameters", repo, "GET", "/repos/shop/..;/x", "several ways"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := sdktest.New(t, tt.config).Send(sdktest.Request(tt.method, "https://api.example.com"+tt.path, ""))
			if got.Denied != (tt.denied != "") || !strings.Contains(got.Reason, tt.denied) {
				t.Errorf("denied %v, %q, want %q", got.Denied, got.Reason, tt.denied)
			}
		})
	}
}

func TestMethodOverridesAreDenied(t *testing.T) {
	p := sdktest.New(t, "")
	for _, header := range overrides {
		r := sdktest.Get("https://api.example.com/")
		r.Header.Set(header, "DELETE")
		if got := p.Send(r); !got.Denied {
			t.Errorf("%s went through", header)
		}
	}
}

func TestGlobs(t *testing.T) {
	for _, tt := range []struct {
		glob, path string
		want       bool
	}{
		{"/a", "/a", true}, {"/a", "/ab", false}, {"/a*", "/ab", true}, {"/a*", "/a", true}, {"/a*", "/a/b", false},
		{"/*/b", "/a/b", true}, {"/*/b", "/a/a/b", false}, {"/**/b", "/a/a/b", true}, {"/**", "/", true},
		{"**", "/x/y", true}, {"**.git", "/x/y.git", true}, {"/a**b", "/a/x/b", true}, {"/***", "/a/b", true},
		{"/*a*b", "/xaxb", true}, {"/*a*b", "/xaxbx", false}, {"", "/", false},
	} {
		if got := matches(tt.glob, tt.path); got != tt.want {
			t.Errorf("%q, %q: got %v", tt.glob, tt.path, got)
		}
	}
}

func TestInvalidConfigurationsAreRefused(t *testing.T) {
	for config, want := range map[string]string{
		`{"methods":["get"]}`:             "upper case",
		`{"paths":["repos/**"]}`:          "begin with /",
		`{"also":[{"paths":["/"]}]}`:      "need methods and paths",
		`{"also":[{"methods":["POST"]}]}`: "need methods and paths",
		`{"allow":[]}`:                    "but methods, paths, also",
	} {
		if _, err := sdktest.Start(config); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", config, err, want)
		}
	}
}

func TestUpgradesAreDenied(t *testing.T) {
	r := sdktest.Get("https://api.example.com/")
	r.Header.Set("Upgrade", "websocket")
	if got := sdktest.New(t, "").Send(r); !got.Denied || !strings.Contains(got.Reason, "change of protocol") {
		t.Errorf("denied %v, %q", got.Denied, got.Reason)
	}
}
