package wakeproxy

import (
	"net/http"
	"strings"
	"testing"
)

func TestParseHost(t *testing.T) {
	token := "-" + testToken
	for _, test := range []struct {
		name, host string
		want       Name
		ok         bool
	}{
		{"token", "3000-k3f9x2m7q1az" + token + ".preview.example.com", Name{3000, testID, testToken}, true},
		{"public", "3000-k3f9x2m7q1az.preview.example.com", Name{3000, testID, ""}, true},
		{"upper case", "3000-K3F9X2M7Q1AZ.Preview.Example.COM", Name{3000, testID, ""}, true},
		{"port of the node", "3000-k3f9x2m7q1az.preview.example.com:8443", Name{3000, testID, ""}, true},
		{"trailing dot", "3000-k3f9x2m7q1az.preview.example.com.", Name{3000, testID, ""}, true},
		{"trailing dot and port", "3000-k3f9x2m7q1az.preview.example.com.:443", Name{3000, testID, ""}, true},
		{"second domain", "1-k3f9x2m7q1az.p.example.org", Name{1, testID, ""}, true},
		{"highest port", "65535-k3f9x2m7q1az.preview.example.com", Name{65535, testID, ""}, true},

		{"no label", "preview.example.com", Name{}, false},
		{"other domain", "3000-k3f9x2m7q1az.example.com", Name{}, false},
		{"domain as a suffix only", "3000-k3f9x2m7q1az.evilpreview.example.com", Name{}, false},
		{"two labels", "a.3000-k3f9x2m7q1az.preview.example.com", Name{}, false},
		{"port 0", "0-k3f9x2m7q1az.preview.example.com", Name{}, false},
		{"port too high", "65536-k3f9x2m7q1az.preview.example.com", Name{}, false},
		{"leading zero", "03000-k3f9x2m7q1az.preview.example.com", Name{}, false},
		{"signed port", "+3000-k3f9x2m7q1az.preview.example.com", Name{}, false},
		{"short id", "3000-k3f9x2m7q1a.preview.example.com", Name{}, false},
		{"long id", "3000-k3f9x2m7q1azz.preview.example.com", Name{}, false},
		{"id with another letter", "3000-k3f9x2m7q1a_.preview.example.com", Name{}, false},
		{"Kelvin sign", "3000-\u212a3f9x2m7q1az.preview.example.com", Name{}, false},
		{"empty token", "3000-k3f9x2m7q1az-.preview.example.com", Name{}, false},
		{"token with a hyphen", "3000-k3f9x2m7q1az-a-b.preview.example.com", Name{}, false},
		{"label over 63", "3000-k3f9x2m7q1az-" + strings.Repeat("a", 46) + ".preview.example.com", Name{}, false},
		{"two trailing dots", "3000-k3f9x2m7q1az.preview.example.com..", Name{}, false},
		{"empty port", "3000-k3f9x2m7q1az.preview.example.com:", Name{}, false},
		{"words for a port", "3000-k3f9x2m7q1az.preview.example.com:https", Name{}, false},
		{"IPv6", "[::1]:443", Name{}, false},
		{"empty", "", Name{}, false},
		{"a megabyte", strings.Repeat("a", 1<<20), Name{}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, ok := ParseHost(test.host, []string{"preview.example.com", "p.example.org"})
			if ok != test.ok || got != test.want {
				t.Errorf("ParseHost(%.80q) = %+v, %v, want %+v, %v", test.host, got, ok, test.want, test.ok)
			}
		})
	}
}

// FuzzParseHost: it never panics, and what it accepts has one canonical form.
func FuzzParseHost(f *testing.F) {
	for _, seed := range []string{previewHost(), "3000-k3f9x2m7q1az.preview.example.com:8443", "3000-K3F9X2M7Q1AZ.PREVIEW.EXAMPLE.COM.", "-", "1--.", "::", "\x00"} {
		f.Add(seed)
	}
	domains := []string{domain}
	f.Fuzz(func(t *testing.T, host string) {
		name, ok := ParseHost(host, domains)
		if !ok {
			if name != (Name{}) {
				t.Errorf("refused %q but returned %+v", host, name)
			}
			return
		}
		formatted := name.Host(domain)
		if len(strings.Split(formatted, ".")[0]) > maxLabel {
			t.Errorf("%q is not a DNS name", formatted)
		}
		again, ok := ParseHost(formatted, domains)
		if !ok || again != name || again.Host(domain) != formatted {
			t.Errorf("%q parses to %+v, formats to %q, and that parses to %+v", host, name, formatted, again)
		}
		bare, _, _ := strings.Cut(host, ":")
		if !strings.EqualFold(strings.TrimSuffix(bare, "."), formatted) {
			t.Errorf("%q has a second name %q", host, formatted)
		}
	})
}

// FuzzResponseHeader: whatever a sandbox sends, its cookies have no domain,
// and a redirect is what it was, leads to the preview, or leads where it did and
// names the preview as the address to come back to.
func FuzzResponseHeader(f *testing.F) {
	for _, seed := range [][2]string{
		{"a=b; Domain=localhost; Path=/", "http://localhost:3000/login"},
		{"domain=x;DOMAIN = .example.com", "//[::1]:3000?x#y"},
		{";;;=;domain", "http:////localhost:3000"},
		{"a=b", "https://elsewhere.example/?redirect_uri=http%3A%2F%2Flocalhost:3000%2F&x=%zz#f?redirect_uri=1"},
		{"a=b", "http://" + previewHost() + ":3000/"},
	} {
		f.Add(seed[0], seed[1], true)
		f.Add(seed[0], seed[1], false)
	}
	origin := "https://" + previewHost()
	f.Fuzz(func(t *testing.T, cookie, location string, rewrite bool) {
		x := &exchange{names: names{origin: origin, port: 3000, rewrite: rewrite}}
		header := http.Header{"Set-Cookie": {cookie}, "Location": {location}, "Doze-Wake": {cookie}}
		cleanHeader(header, x.names)
		if parsed, err := http.ParseSetCookie(header.Get("Set-Cookie")); err == nil && parsed.Domain != "" {
			t.Errorf("the cookie %q became %q", cookie, header.Get("Set-Cookie"))
		}
		got := header.Get("Location")
		target, _, _ := strings.Cut(location, "?")
		gotTarget, _, _ := strings.Cut(got, "?")
		if rest, ours := strings.CutPrefix(got, origin); gotTarget != target && (!ours || rest != "" && !strings.ContainsAny(rest[:1], "/?#")) {
			t.Errorf("%q became %q", location, got)
		}
		if header.Get("Doze-Wake") != "" {
			t.Error("Doze-Wake stays")
		}
	})
}
