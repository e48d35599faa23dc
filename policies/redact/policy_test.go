package main

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/policies/sdk/sdktest"
)

// send is what arrives of a body.
func send(t *testing.T, config, body string) sdktest.Result {
	t.Helper()
	return sdktest.New(t, config).Send(sdktest.Request("POST", "https://api.example.com/", body))
}

func TestFinders(t *testing.T) {
	key := "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----"
	for _, tt := range []struct{ find, body, want string }{
		{"email", `{"to":"a.b+c@mail.example.com","n":1}`, `{"to":"[redacted email]","n":1}`},
		{"email", "x@y.io, <z@w.example>.", "[redacted email], <[redacted email]>."},
		{"email", "a@b @c.de d@ e@f. @ g@h.1", "a@b @c.de d@ e@f. @ g@h.1"},
		{"email", "@@@a@b.cd@@", "@@@[redacted email]@@"},
		{"card", "pay 4111 1111 1111 1111 now", "pay [redacted card] now"},
		{"card", "4111-1111-1111-1111,5500000000000004", "[redacted card],[redacted card]"},
		{"card", "4111111111111112 411111111111111", "4111111111111112 411111111111111"},
		{"card", "x4111111111111111 4111111111111111x 41111111111111110000", "x4111111111111111 4111111111111111x 41111111111111110000"},
		{"card", "1 4111 1111 1111 1111", "1 [redacted card]"},
		{"card", "0000000000000000", "0000000000000000"},
		{"private-key", "a " + key + " b", "a [redacted private-key] b"},
		{"private-key", `{"k":"` + strings.ReplaceAll(key, "\n", `\n`) + `\n"}`, `{"k":"[redacted private-key]\n"}`},
		{"private-key", "-----BEGIN PRIVATE KEY-----\nMIIE", "[redacted private-key]"},
		{"private-key", "-----BEGIN CERTIFICATE-----\nMIIE\n-----END CERTIFICATE-----" + key, "-----BEGIN CERTIFICATE-----\nMIIE\n-----END CERTIFICATE-----[redacted private-key]"},
		{"private-key", "-----BEGIN PUBLIC KEY-----", "-----BEGIN PUBLIC KEY-----"},
		{"aws-key", "id=AKIAIOSFODNN7EXAMPLE&ASIAIOSFODNN7EXAMPLE", "id=[redacted aws-key]&[redacted aws-key]"},
		{"aws-key", "AKIAIOSFODNN7EXAMPLEX XAKIAIOSFODNN7EXAMPLE AKIA", "AKIAIOSFODNN7EXAMPLEX XAKIAIOSFODNN7EXAMPLE AKIA"},
		{"token", `"ghp_0123456789012345678901234567890123456"`, `"[redacted token]"`},
		{"token", "sk-short and task-01234567890123456789", "sk-short and task-01234567890123456789"},
		{"token", "sk-ant-api03-01234567890123456789 xoxb-01234567890123456789", "[redacted token] [redacted token]"},
	} {
		if got := send(t, `{"find":["`+tt.find+`"]}`, tt.body); got.Body != tt.want {
			t.Errorf("%s in %q: got %q (%s), want %q", tt.find, tt.body, got.Body, got.Reason, tt.want)
		}
	}
}

func TestPatterns(t *testing.T) {
	got := send(t, `{"find":["email"],"patterns":[{"name":"ticket","match":"\\bSECRET-[0-9]+"}]}`, "SECRET-12 a@b.cd SECRET-3 xSECRET-4")
	if got.Body != "[redacted ticket] [redacted email] [redacted ticket] xSECRET-4" {
		t.Errorf("got %q", got.Body)
	}
	if strings.Join(got.Notes, "|") != "redacted 1 email, 2 ticket" {
		t.Errorf("noted %q", got.Notes)
	}
}

func TestABodyWithoutFindingsIsLeftAlone(t *testing.T) {
	body := strings.Repeat("nothing here ", 1000)
	if got := send(t, `{"find":["email","card","private-key","aws-key","token"]}`, body); got.Body != body || len(got.Notes) > 0 {
		t.Errorf("got %d bytes, %q", len(got.Body), got.Notes)
	}
}

func TestFindingsCanDeny(t *testing.T) {
	got := send(t, `{"find":["email"],"action":"deny"}`, "a@b.cd, e@f.gh")
	if !got.Denied || got.Reason != "redact: the body has 2 email" || got.Method != "" {
		t.Errorf("got %+v", got)
	}
}

func TestBodiesThatCannotBeSearchedAreDenied(t *testing.T) {
	r := sdktest.Request("POST", "https://api.example.com/", "zipped")
	r.Header.Set("Content-Encoding", "gzip")
	if got := sdktest.New(t, `{"find":["email"]}`).Send(r); !got.Denied {
		t.Error("a compressed body went through")
	}
	r.Header["Content-Encoding"] = []string{"identity", "gzip"}
	if got := sdktest.New(t, `{"find":["email"]}`).Send(r); !got.Denied {
		t.Error("a compressed body with two headers went through")
	}
	r = sdktest.Get("https://api.example.com/")
	r.Header.Set("Upgrade", "websocket")
	if got := sdktest.New(t, `{"find":["email"]}`).Send(r); !got.Denied {
		t.Error("a WebSocket went through")
	}
	if got := send(t, `{"find":["email"]}`, strings.Repeat("x", 1<<20+1)); !got.Denied {
		t.Error("a body above the limit went through")
	}
}

func TestOverlappingFindingsAreRedactedOnce(t *testing.T) {
	got := send(t, `{"find":["email"],"patterns":[{"name":"tail","match":"cd SECRET"},{"name":"x","match":"@"}]}`, "to a@b.cd SECRET @")
	if got.Body != "to [redacted email] [redacted x]" {
		t.Errorf("got %q", got.Body)
	}
}

func TestABodyFullOfFindingsIsRefused(t *testing.T) {
	if got := send(t, `{"find":["email"]}`, strings.Repeat("a@b.cd ", maxSpans)); !got.Denied || !strings.Contains(got.Reason, "too much") {
		t.Errorf("got %q", got.Reason)
	}
	if got := send(t, `{"find":["email"]}`, strings.Repeat("a@b.cd ", maxSpans-1)); got.Denied || strings.Contains(got.Body, "@") {
		t.Errorf("got %q", got.Reason)
	}
}

// FuzzFind: what is found is in order, within the body and apart, whatever that is.
func FuzzFind(f *testing.F) {
	f.Add([]byte("a@b.cd 4111 1111 1111 1111 -----BEGIN PRIVATE KEY----- AKIAIOSFODNN7EXAMPLE ghp_0123456789012345678901234567890123456"))
	f.Fuzz(func(t *testing.T, body []byte) {
		from := 0
		for _, s := range find(body, finders) {
			if s.start < from || s.end <= s.start || s.end > len(body) {
				t.Fatalf("%s after %d in %q: %d to %d", s.name, from, body, s.start, s.end)
			}
			from = s.end
		}
	})
}

// BenchmarkFind is about a body of the largest size, as an agent sends it.
func BenchmarkFind(b *testing.B) {
	body := []byte(strings.Repeat(`{"role":"user","content":"call 555 0100 or write to me @ home, id 1234-5678"},`, 1<<20/78))
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		find(body, finders)
	}
}

func TestInvalidConfigurationsAreRefused(t *testing.T) {
	for config, want := range map[string]string{
		`{}`:                                 "aws-key, card, email, private-key, token",
		`{"find":["emails"]}`:                `but there are aws-key`,
		`{"find":["email"],"action":"drop"}`: `"redact" or "deny"`,
		`{"patterns":[{"name":"a","match":"("}]}`:   `pattern "a"`,
		`{"patterns":[{"name":"a","match":"x*"}]}`:  "everywhere",
		`{"patterns":[{"match":"x"}]}`:              `"name"`,
		`{"patterns":[{"name":"\"","match":"x"}]}`:  `"name"`,
		`{"patterns":[{"name":"a","regexp":"x*"}]}`: "patterns[0]",
	} {
		if _, err := sdktest.Start(config); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", config, err, want)
		}
	}
}
