package main

import (
	"os"
	"strings"
	"testing"
)

const suiteFile = `{
	"policies": [{"name": "example.wasm", "secrets": {"token": "api"}}],
	"secrets": {"api": "@key"},
	"tests": [
		{
			"name": "adds the key",
			"request": {"method": "POST", "url": "https://api.example.com/v1?a=b", "headers": {"X-Api-Key": "own", "X-Two": ["1", "2"]}, "body": "hello"},
			"response": {"status": 201, "headers": {"X-From": "up"}, "body": "made"},
			"want": {
				"verdict": "allow", "method": "POST", "url": "https://api.example.com/v1?a=b",
				"headers": {"X-Api-Key": "{secret:api}", "X-Two": "1, 2", "Authorization": null}, "body": "hello",
				"response": {"status": 201, "headers": {"X-From": "up", "X-Api-Key": null}, "body": {"matches": "^ma.e$"}},
				"secrets": ["api"]
			}
		},
		{
			"name": "refuses without one",
			"policies": [{"name": "example.wasm"}],
			"request": {"url": "https://api.example.com/"},
			"want": {"verdict": "deny", "reason": {"contains": "no secret \"token\""}}
		},
		{"name": "fails", "policies": [{"name": "trap.wasm"}], "request": {"url": "https://api.example.com/"}, "want": {"verdict": "error"}}
	]
}`

func TestASuiteOfTestsPasses(t *testing.T) {
	r := trialRig(t, map[string]string{"tests.json": suiteFile, "key": "from a file"})
	if out := r.ok("policy", "test", "tests.json"); out != "ok    adds the key\nok    refuses without one\nok    fails\n3 of 3 tests passed\n" {
		t.Errorf("got %s", out)
	}
	got := decodeJSON[struct{ Tests []testResult }](t, r.ok("policy", "test", "tests.json", "--secret", "api=other", "--json")).Tests
	if len(got) != 3 || !got[0].OK || got[0].Last.Sent.Headers.Get("X-Api-Key") != "other" || got[2].Last.Verdict != verdictError {
		t.Errorf("got %+v", got)
	}
}

// writeInto writes a file of the current folder, which is the test's.
func writeInto(t *testing.T, name, text string) string {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// Each expectation can fail.
func TestWhatASuiteExpectsAndDoesNotGet(t *testing.T) {
	r := trialRig(t, map[string]string{"key": "from a file"})
	for _, c := range []struct{ old, new, want string }{
		{`"verdict": "allow"`, `"verdict": "deny"`, "verdict: got allow, want deny"},
		{`"method": "POST", "url": "https://api.example.com/v1?a=b",` + "\n\t\t\t\t", `"method": "GET",`, `method: got "POST", want "GET"`},
		{`"url": "https://api.example.com/v1?a=b",` + "\n\t\t\t\t", `"url": {"contains": "/v2"},`, `url: got "https://api.example.com/v1?a=b", want text that contains "/v2"`},
		{`"{secret:api}"`, `"own"`, `header X-Api-Key: got "from a file", want "own"`},
		{`"X-Two": "1, 2"`, `"X-Two": null`, `header X-Two: got "1, 2", want none`},
		{`"Authorization": null`, `"Authorization": "x"`, `header Authorization: got none, want "x"`},
		{`"body": "hello",` + "\n\t\t\t\t", `"body": "",`, `body: got "hello", want ""`},
		{`"response": {"status": 201, "headers": {"X-From": "up", "X`, `"response": {"status": 200, "headers": {"X-From": "up", "X`, "response.status: got 201, want 200"},
		{`"X-From": "up", "X-Api-Key"`, `"X-From": "down", "X-Api-Key"`, `response header X-From: got "up", want "down"`},
		{`^ma.e$`, `^M`, `response.body: got "made", want text that matches ^M`},
		{`"secrets": ["api"]` + "\n\t\t\t}", `"secrets": []}`, `secrets: got ["api"], want []`},
		{`no secret \"token\"`, `another`, `reason: got "the rule gives no secret \"token\"", want text that contains "another"`},
		{`"verdict": "deny", "reason"`, `"headers": {"A": "b"}, "reason"`, `request: got nothing sent to the host (deny: the rule gives no secret "token"), want a request`},
		{`"verdict": "deny", "reason"`, `"response": {"status": 403}, "reason"`, "response: got none (deny"},
		{`"verdict": "deny", "reason"`, `"notes": ["a"], "log": [{"contains": "b"}], "reason"`, `notes: got [], want "a"`},
		{`"want": {"verdict": "error"}`, `"want": {}`, "verdict: got error: the policy failed"},
	} {
		if !strings.Contains(suiteFile, c.old) {
			t.Fatalf("%q is not in the file", c.old)
		}
		writeInto(t, "tests.json", strings.Replace(suiteFile, c.old, c.new, 1))
		got := r.doze("policy", "test", "tests.json")
		if got.code != exitFailed || !strings.Contains(got.out, "FAIL  ") || !strings.Contains(got.out, "      "+c.want) || !strings.HasSuffix(got.out, "1 of 3 tests failed\n") {
			t.Errorf("%s: exit code %d, %s%s\nwant %s", c.new, got.code, got.out, got.err, c.want)
		}
	}
}

func TestSuitesThatAreRefused(t *testing.T) {
	r := trialRig(t, map[string]string{})
	const request = `"request":{"url":"https://a.example/"}`
	for text, want := range map[string]string{
		"{\n \"tests\": [\n}":           "tests.json: line 3, column 1: invalid JSON",
		`{"test":[]}`:                   `line 1, column 2: unknown field "test"`,
		`{"tests":[]}`:                  "tests: 0; write 1 to 1000",
		`{"tests":[{` + request + `}]}`: "tests[0]: 0 policies",
		`{"policies":[{"name":"example.wasm"}],"tests":[{"request":{"url":"/x"}}]}`:                                  "tests[0].request: \"url\" has a scheme and a host",
		`{"policies":[{"name":"example.wasm"}],"tests":[{"name":"a",` + request + `},{"name":"a",` + request + `}]}`: `tests[1].name: "a" is the name of an earlier one`,
		`{"policies":[{"name":"example.wasm"}],"tests":[{` + request + `,"repeat":-1}]}`:                             "tests[0].repeat: -1",
		`{"policies":[{"name":"example.wasm"}],"tests":[{` + request + `,"after":"soon"}]}`:                          `"soon" is not a time`,
		`{"policies":[{"name":"example.wasm"}],"tests":[{` + request + `,"want":{"verdict":"ok"}}]}`:                 "tests[0].want: verdict: \"ok\"; write one of allow, ",
		`{"policies":[{"name":"example.wasm"}],"tests":[{` + request + `,"want":{"body":{"like":"x"}}}]}`:            `write a text, {"contains"`,
		`{"policies":[{"name":"example.wasm"}],"tests":[{` + request + `,"want":{"body":{"matches":"("}}}]}`:         "missing closing )",
		`{"policies":[{"name":"example.wasm","secrets":{"token":"api"}}],"tests":[{` + request + `}]}`:               `there is no secret "api" under secrets`,
		`{"policies":[{"name":"none.wasm"}],"tests":[{` + request + `}]}`:                                            "no such file",
	} {
		r.refused(want, "policy", "test", writeInto(t, "tests.json", text))
	}
	r.misused("--config is for a single request", "policy", "test", writeInto(t, "tests.json", suiteFile), "--config", "{}")
	r.refused("no such file", "policy", "test", "none.json")
	r.misused("--memory-limit is", "policy", "test", "tests.json", "--memory-limit", "1KiB")
	for _, wrong := range []string{"0s", "1us", "2m", "-1s"} {
		r.misused("write 1ms to 1m", "policy", "test", "tests.json", "--time-limit", wrong)
	}
}

// TestASuiteHasStateAndAClock is about a shipped policy: compiling it takes seconds.
func TestASuiteHasStateAndAClock(t *testing.T) {
	r := trialRig(t, map[string]string{"tests.json": `{
		"policies": [
			{"name": "model-budget", "config": {"window": "24h", "requests": 3}},
			{"name": "example.wasm", "secrets": {"token": "api"}}
		],
		"secrets": {"api": "s3cret-value"},
		"tests": [
			{"name": "within the budget", "repeat": 3, "request": {"method": "POST", "url": "https://api.example.com/"}, "want": {"verdict": "allow", "headers": {"X-Api-Key": "{secret:api}"}}},
			{"name": "beyond", "request": {"method": "POST", "url": "https://api.example.com/"}, "want": {"verdict": "deny", "reason": {"contains": "3"}}},
			{"name": "another sandbox", "sandbox": {"id": "another00000"}, "request": {"method": "POST", "url": "https://api.example.com/"}, "want": {"verdict": "allow"}},
			{"name": "a day later", "after": "24h", "request": {"method": "POST", "url": "https://api.example.com/"}, "want": {"verdict": "allow"}},
			{"name": "no window", "policies": [{"name": "model-budget", "config": {"requests": 3}}], "request": {"url": "https://api.example.com/"}, "want": {"verdict": "invalid", "reason": {"contains": "window"}}}
		]
	}`})
	got := r.doze("policy", "test", "tests.json")
	if got.code != 0 || !strings.HasSuffix(got.out, "5 of 5 tests passed\n") {
		t.Errorf("got %d %s%s", got.code, got.out, got.err)
	}
	// The node's limits hold.
	small := r.doze("policy", "test", "tests.json", "--memory-limit", "1MiB")
	if small.code != exitFailed || !strings.Contains(small.out+small.err, "memory") {
		t.Errorf("with 1 MiB got %d %s%s", small.code, small.out, small.err)
	}
}
