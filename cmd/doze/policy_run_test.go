package main

import (
	"encoding/base64"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/policies"
	"github.com/doze-run/doze/policies/builtin"
)

// Modules that take no time to compile. The first is policies/examples/wat and the
// second traps immediately, both as wat2wasm makes them; the third is
// policies/examples/assemblyscript, as its `npm run build` makes it.
const (
	exampleModule = `
AGFzbQEAAAABGgRgBH9/f38Bf2ACf38AYAV/f39/fwBgAAF+AlMDDmRvemVfZWdyZXNzX3YxCnNlY3JldF9yZWYAAA5kb3plX2Vn
cmVzc192MQRkZW55AAEMaHR0cF9oYW5kbGVyEHNldF9oZWFkZXJfdmFsdWUAAgMDAgMBBQQBAQEBBgcBfwBBgAELBy0DBm1lbW9y
eQIADmhhbmRsZV9yZXF1ZXN0AAMPaGFuZGxlX3Jlc3BvbnNlAAQKNQIwAQF/QQBBBSMAQcAAEAAhACAAQQBIBEBBIEEgEAFCAA8L
QQBBEEEJIwAgABACQgELAgALCz4DAEEACwV0b2tlbgBBEAsJWC1BcGktS2V5AEEgCyB0aGUgcnVsZSBnaXZlcyBubyBzZWNyZXQg
InRva2VuIg==`
	trapModule = `
AGFzbQEAAAABCgJgAAF+YAJ/fwADAwIAAQUEAQEBAQctAwZtZW1vcnkCAA5oYW5kbGVfcmVxdWVzdAAAD2hhbmRsZV9yZXNwb25z
ZQABCggCAwAACwIACw==`
	scriptModule = `
AGFzbQEAAAABKAdgAn9/AGACf38Bf2ABfwF/YAAAYAV/f39/fwBgBH9/f38Bf2AAAX4CUwMMaHR0cF9oYW5kbGVyEHNldF9oZWFk
ZXJfdmFsdWUABA5kb3plX2VncmVzc192MQpzZWNyZXRfcmVmAAUOZG96ZV9lZ3Jlc3NfdjEEZGVueQAAAwYFAQIDAAYFAwEAAQYa
BX8BQQALfwFBAAt/AUEAC38BQQALfwFBAAsHLQMOaGFuZGxlX3JlcXVlc3QABw9oYW5kbGVfcmVzcG9uc2UABgZtZW1vcnkCAAgB
BQwBBgqfBgWtAQEFfyAAQez///8DSwRAAAsgAEEQaiIDQfz///8DSwRAAAsjAEEEaiICIANBE2pBcHFBBGsiA2oiBD8AIgVBEHRB
D2pBcHEiBksEQCAFIAQgBmtB//8DakGAgHxxQRB2IgYgBSAGShtAAEEASARAIAZAAEEASARAAAsLCyMAIAQkACADNgIAIAJBBGsi
A0EANgIEIANBADYCCCADIAE2AgwgAyAANgIQIAJBEGoL4QMBBn9BBEEEEAMiA0EANgIAIAAiAUEUaygCECABaiEEA0AgASAESQRA
IAEvAQAiBUGAAUkEfyACQQFqBSAFQYAQSQR/IAJBAmoFIAVBgPgDcUGAsANGIAFBAmogBElxBEAgAS8BAkGA+ANxQYC4A0YEQCAC
QQRqIQIgAUEEaiEBDAULCyACQQNqCwshAiABQQJqIQEMAQsLIAJBARADIQIgACIBQRRrKAIQQX5xIAFqIQUgAiEAA0AgASAFSQRA
IAEvAQAiBEGAAUkEfyAAIAQ6AAAgAEEBagUgBEGAEEkEfyAAIARBBnZBwAFyIARBP3FBgAFyQQh0cjsBACAAQQJqBSAEQYDwA3FB
gLADRgRAIARBgLgDSSABQQJqIAVJcQRAIAEvAQIiBkGA+ANxQYC4A0YEQCAAIARB/wdxQQp0QYCABGogBkH/B3FyIgRBP3FBgAFy
QRh0IARBBnZBP3FBgAFyQRB0ciAEQQx2QT9xQYABckEIdHIgBEESdkHwAXJyNgIAIABBBGohACABQQRqIQEMBgsLCyAAIARBDHZB
4AFyIARBBnZBP3FBgAFyQQh0cjsBACAAIARBP3FBgAFyOgACIABBA2oLCyEAIAFBAmohAQwBCwsgAyACNgIAIAMLMwEBf0G8CSQA
QaAIEAQkAUHACBAEJAJB8AgQBCQDQcAAQQEQAyIAQQBBwAD8CwAgACQECwIAC1QBAn8jASgCACIAIABBFGsoAhAjBCMEQRRrKAIQ
EAEiAEEASARAIwMoAgAiACAAQRRrKAIQEAJCAA8LQQAjAigCACIBIAFBFGsoAhAjBCAAEABCAQsLmQEGAEGMCAsBHABBmAgLEQIA
AAAKAAAAdABvAGsAZQBuAEGsCAsBLABBuAgLGQIAAAASAAAAWAAtAEEAcABpAC0ASwBlAHkAQdwICwFcAEHoCAtHAgAAAEAAAAB0
AGgAZQAgAHIAdQBsAGUAIABnAGkAdgBlAHMAIABuAG8AIABzAGUAYwByAGUAdAAgACIAdABvAGsAZQBuACI=`
)

// trialRig is a command line in a folder with these modules and files.
func trialRig(t *testing.T, files map[string]string) *rig {
	t.Helper()
	r := policyRig(t)
	for name, text := range map[string]string{"example.wasm": exampleModule, "trap.wasm": trapModule, "script.wasm": scriptModule} {
		wasm, err := base64.StdEncoding.DecodeString(strings.ReplaceAll(text, "\n", ""))
		if err != nil {
			t.Fatal(err)
		}
		files[name] = string(wasm)
	}
	for name, text := range files {
		if err := os.WriteFile(name, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func TestATrialShowsWhatWouldBeSent(t *testing.T) {
	r := trialRig(t, map[string]string{
		"request.json": `{"method":"POST","url":"https://api.example.com/v1?a=b","headers":{"X-Api-Key":"own","X-Two":["1","2"]},"body":"hello",
			"response":{"status":201,"headers":{"X-From":"up"},"body":"made"}}`,
		"request.http": "GET /v1 HTTP/1.1\r\nHost: api.example.com\r\nX-Api-Key: own\r\n\r\n",
		"key":          "from a file",
	})
	out := r.ok("policy", "test", "example.wasm", "request.json", "--secret", "token=s3cret")
	for _, want := range []string{
		"allow\n\n> POST https://api.example.com/v1?a=b\n", "> Host: api.example.com\n> X-Api-Key: s3cret\n> X-Two: 1\n> X-Two: 2\n> \n> hello\n",
		"< 201 Created\n< X-From: up\n< \n< made\n", "secret   token\n", "µs a request (median of ",
		"memory   64.0 KiB after these requests, of at most 16.0 MiB\n", // a page of WebAssembly
	} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in\n%s", want, out)
		}
	}
	got := decodeJSON[trial](t, r.ok("policy", "test", "example.wasm", "request.http", "--secret", "token=@key", "--json"))
	if got.Verdict != verdictAllow || got.Sent.Headers.Get("X-Api-Key") != "from a file" || got.Sent.URL != "https://api.example.com/v1" ||
		got.Response.Status != 200 || got.Cost.Requests == 0 || got.Cost.MedianUS <= 0 || got.Cost.MemoryBytes != 64<<10 {
		t.Errorf("got %+v", got)
	}
}

func TestExamplesInOtherLanguagesDoTheSame(t *testing.T) {
	r := trialRig(t, map[string]string{"request.json": `{"url":"https://api.example.com/","headers":{"X-Api-Key":"own"}}`})
	for _, module := range []string{"example.wasm", "script.wasm"} {
		if out := r.ok("policy", "test", module, "request.json", "--secret", "token=s3cret"); !strings.Contains(out, "> X-Api-Key: s3cret\n") {
			t.Errorf("%s: got %s", module, out)
		}
		if out := r.ok("policy", "test", module, "request.json"); !strings.HasPrefix(out, "deny: the rule gives no secret \"token\"\n") {
			t.Errorf("%s without the secret: got %s", module, out)
		}
	}
}

func TestATrialDistinguishesADenialFromAFailure(t *testing.T) {
	r := trialRig(t, map[string]string{"request.json": `{"url":"https://api.example.com/"}`})
	if out := r.ok("policy", "test", "example.wasm", "request.json"); !strings.HasPrefix(out, "deny: the rule gives no secret \"token\"\n") {
		t.Errorf("got %q", out)
	}
	got := r.doze("policy", "test", "trap.wasm", "request.json")
	if got.code != exitFailed || !strings.HasPrefix(got.out, "error: the policy failed") || !strings.Contains(got.out, "unreachable") ||
		strings.Contains(got.out, "memory ") { // nothing is left of an instance that failed
		t.Errorf("got %+v", got)
	}
}

func TestInvalidRunsOfPoliciesAreRefused(t *testing.T) {
	r := trialRig(t, map[string]string{
		"ok.json":      `{"url":"https://api.example.com/"}`,
		"field.json":   `{"uri":"https://api.example.com/"}`,
		"url.json":     `{"url":"/path"}`,
		"header.json":  `{"url":"https://api.example.com/","headers":{"A":1}}`,
		"status.json":  `{"url":"https://api.example.com/","response":{"status":99}}`,
		"text":         "hello",
		"no.wasm":      "hello",
		"newline.json": `{"url":"https://api.example.com/","secrets":{"token":"a\r\nb: c"}}`,
	})
	for _, tt := range []struct{ args, want string }{
		{"example.wasm none.json", "no such file"},
		{"none.wasm ok.json", "no such file"},
		{"none ok.json", "no such file"},
		{"no.wasm ok.json", "WebAssembly"},
		{"example.wasm field.json", `unknown field "uri"`},
		{"example.wasm url.json", "a scheme and a host"},
		{"example.wasm header.json", "header A is text or a list"},
		{"example.wasm status.json", "200 to 599"},
		{"example.wasm text", "neither JSON nor an HTTP/1.1 request"},
		{"example.wasm ok.json --secret token=@none", "no such file"},
		{"example.wasm ok.json --config @none", "no such file"},
	} {
		r.refused(tt.want, append([]string{"policy", "test"}, strings.Fields(tt.args)...)...)
	}
	r.misused("REQUEST is missing", "policy", "test", "example.wasm")
	r.misused("NAME=VALUE", "policy", "test", "example.wasm", "ok.json", "--secret", "token")
	got := r.doze("policy", "test", "example.wasm", "newline.json")
	if got.code != exitFailed || !strings.HasPrefix(got.out, "error: header X-Api-Key") {
		t.Errorf("a line break in a secret: %+v", got)
	}
}

func TestShippedPoliciesPassTheirTests(t *testing.T) {
	folder, err := filepath.Abs("../../policies")
	if err != nil {
		t.Fatal(err)
	}
	r := policyRig(t)
	for _, name := range policies.Names() {
		if got := r.doze("policy", "test", filepath.Join(folder, name, "tests.json")); got.code != 0 {
			t.Errorf("%s: %s%s", name, got.out, got.err)
		}
	}
}

// TestATrialOfAShippedPolicy is about one: compiling Go's modules takes seconds.
func TestATrialOfAShippedPolicy(t *testing.T) {
	if _, err := builtin.Module("basic"); errors.Is(err, builtin.ErrNotBuilt) {
		t.Fatal("run `make policies` first")
	}
	r := trialRig(t, map[string]string{
		"request.json": `{"url":"https://git.example.com/a.git/info/refs","secrets":{"password":"s3cret"}}`,
	})
	// One that does not start is reported with the reason and its output.
	got := r.doze("policy", "test", "basic", "request.json")
	if got.code != exitFailed || !strings.HasPrefix(got.out, "error: policy basic does not start: ") ||
		!strings.Contains(got.out, `config: "user" is missing`) || !strings.Contains(got.out, "\nlog      error: ") {
		t.Errorf("got %+v", got)
	}
	out := r.ok("policy", "test", "basic", "request.json", "--config", `{"user":"deploy"}`)
	if !strings.Contains(out, "> Authorization: Basic ZGVwbG95OnMzY3JldA==\n") {
		t.Errorf("got %s", out)
	}
}
