package wakeproxy_test

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/wakeproxy"
)

func TestValidateDomain(t *testing.T) {
	for domain, valid := range map[string]bool{
		"preview.example.com": true, "xn--bcher-kva.test": true, "a": true,
		"": false, "localhost": false, "127.0.0.1": false, "a..b": false, "foo_bar.test": false, "Upper.test": false, "-a.test": false, "a.test.": false,
		strings.Repeat("a", 64) + ".test": false, strings.Repeat("a.", 94) + "b": true, strings.Repeat("a.", 95) + "b": false,
	} {
		if err := wakeproxy.ValidateDomain(domain); valid != (err == nil) {
			t.Errorf("%q: %v", domain, err)
		}
	}
}

func TestDomainsContainHostsOfPreviews(t *testing.T) {
	d := wakeproxy.Domains{"preview.test", "other.test"}
	for host, want := range map[string]bool{
		"preview.test": true, "a.preview.test": true, "A.B.Preview.Test.:8443": true, "x.other.test:1": true,
		"": false, "test": false, "apreview.test": false, "preview.test.example": false, "[::1]:80": false,
	} {
		if got := d.Contains(host); got != want {
			t.Errorf("%q: %v", host, got)
		}
	}
}

func TestURLOfAnExposedPort(t *testing.T) {
	sb := sandbox.Sandbox{ID: "abcdefghijkl"}
	port := sandbox.Port{Port: 3000, Token: "secret", Access: sandbox.AccessPublic}
	if got := wakeproxy.URL("preview.test", 443, sb, port); got != "https://3000-abcdefghijkl.preview.test/" {
		t.Error(got)
	}
	port.Access = ""
	if got := wakeproxy.URL("preview.test", 8443, sb, port); got != "https://3000-abcdefghijkl-secret.preview.test:8443/" {
		t.Error(got)
	}
}
