package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/doze-run/doze/cmd/internal/jsonfile"
	"github.com/doze-run/doze/cmd/internal/usage"
)

// suite is a file of requests with what must become of each. They are sent one after
// another, so that later ones find what policies have stored.
type suite struct {
	Policies []suitePolicy     `json:"policies"`
	Secrets  map[string]string `json:"secrets"` // values, or @FILE
	Sandbox  recordedSandbox   `json:"sandbox"`
	Tests    []suiteTest       `json:"tests"`

	folder string // of the file: modules and @FILE are relative to it
}

// suitePolicy is a policy as a rule names it.
type suitePolicy struct {
	// Name is a file, or the name of a built-in policy.
	Name    string            `json:"name"`
	Config  json.RawMessage   `json:"config"`
	Secrets map[string]string `json:"secrets"`
}

type suiteTest struct {
	Name     string           `json:"name"`
	Request  recordedRequest  `json:"request"`
	Response recordedResponse `json:"response"` // of the host; 200 without a body unless given
	// Policies replace the suite's policies.
	Policies []suitePolicy    `json:"policies"`
	Sandbox  *recordedSandbox `json:"sandbox"`
	// Repeat sends the request so many times; each has to fulfil Want.
	Repeat int `json:"repeat"`
	// After lets so much time pass before, for policies.
	After duration  `json:"after"`
	Want  suiteWant `json:"want"`
}

// suiteWant is the expected result. Absent fields match any value, but a policy must not
// fail unless the verdict is error.
type suiteWant struct {
	Verdict string   `json:"verdict"`
	Reason  *matcher `json:"reason"`
	// Of the request that is sent to the host.
	Method  *matcher            `json:"method"`
	URL     *matcher            `json:"url"`
	Headers map[string]*matcher `json:"headers"` // null: there is none
	Body    *matcher            `json:"body"`
	// Response is what the sandbox gets.
	Response *wantResponse `json:"response"`
	Secrets  *[]string     `json:"secrets"` // names of those that were sent, sorted
	Notes    []matcher     `json:"notes"`   // each is one of the notes
	Log      []matcher     `json:"log"`     // each is one of the lines
}

type wantResponse struct {
	Status  int                 `json:"status"`
	Headers map[string]*matcher `json:"headers"`
	Body    *matcher            `json:"body"`
}

// matcher is a text, or {"contains": "…"}, or {"matches": "REGEXP"}. In texts
// {secret:NAME} is the value of a secret.
type matcher struct {
	equals, contains *string
	matches          *regexp.Regexp
}

func (m *matcher) UnmarshalJSON(text []byte) error {
	if err := json.Unmarshal(text, &m.equals); err == nil && m.equals != nil {
		return nil
	}
	var one struct {
		Contains *string `json:"contains"`
		Matches  *string `json:"matches"`
	}
	if err := jsonfile.Decode(text, &one); err != nil || (one.Contains == nil) == (one.Matches == nil) {
		return errors.New(`write a text, {"contains": "…"} or {"matches": "REGEXP"}`)
	}
	m.contains = one.Contains
	if one.Matches == nil {
		return nil
	}
	var err error
	m.matches, err = regexp.Compile(*one.Matches)
	return err
}

// match reports whether it matches a text, and describes the expected text.
func (m *matcher) match(text string, secrets map[string]string) (want string, ok bool) {
	switch {
	case m.matches != nil:
		return "text that matches " + m.matches.String(), m.matches.MatchString(text)
	case m.contains != nil:
		want := withSecrets(*m.contains, secrets)
		return fmt.Sprintf("text that contains %q", want), strings.Contains(text, want)
	}
	want = withSecrets(*m.equals, secrets)
	return fmt.Sprintf("%q", want), text == want
}

var secretPattern = regexp.MustCompile(`\{secret:([a-z0-9_-]{1,64})\}`)

// withSecrets puts values in the place of {secret:NAME}.
func withSecrets(text string, secrets map[string]string) string {
	return secretPattern.ReplaceAllStringFunc(text, func(found string) string {
		if value, ok := secrets[secretPattern.FindStringSubmatch(found)[1]]; ok {
			return value
		}
		return found
	})
}

// duration is text such as 90s or 24h.
type duration time.Duration

func (d *duration) UnmarshalJSON(text []byte) error {
	var s string
	if err := json.Unmarshal(text, &s); err != nil {
		return errors.New("a time is text such as 90s or 24h")
	}
	parsed, err := time.ParseDuration(s)
	if err != nil || parsed < 0 {
		return fmt.Errorf("%.40q is not a time; write 90s or 24h", s)
	}
	*d = duration(parsed)
	return nil
}

const (
	maxTests   = 1000
	maxRepeat  = 10_000
	maxRequest = 16 // policies of a request
)

// readSuite reads a file of tests.
func readSuite(file string, secrets []string) (*suite, error) {
	if filepath.Ext(file) == ".wasm" {
		return nil, usage.Errorf("REQUEST is missing; usage: doze policy test MODULE REQUEST")
	}
	s := &suite{folder: filepath.Dir(file)}
	if err := jsonfile.Read(file, s); err != nil {
		return nil, err
	}
	for name, value := range s.Secrets {
		if path, ok := strings.CutPrefix(value, "@"); ok && !filepath.IsAbs(path) {
			value = "@" + filepath.Join(s.folder, path)
		}
		var err error
		if s.Secrets[name], err = valueOrFile(value); err != nil {
			return nil, err
		}
	}
	var err error
	if s.Secrets, err = withFlags(s.Secrets, secrets); err != nil {
		return nil, err
	}
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return s, nil
}

func (s *suite) check() error {
	if n := len(s.Tests); n == 0 || n > maxTests {
		return fmt.Errorf("tests: %d; write 1 to %d", n, maxTests)
	}
	names := map[string]bool{}
	for i := range s.Tests {
		t := &s.Tests[i]
		where := fmt.Sprintf("tests[%d]", i)
		t.Name = cmp.Or(t.Name, where)
		if names[t.Name] {
			return fmt.Errorf("%s.name: %q is the name of an earlier one", where, t.Name)
		}
		names[t.Name] = true
		if t.Policies == nil {
			t.Policies = s.Policies
		}
		if n := len(t.Policies); n == 0 || n > maxRequest {
			return fmt.Errorf("%s: %d policies; name 1 to %d, here or for all tests", where, n, maxRequest)
		}
		if t.Repeat = cmp.Or(t.Repeat, 1); t.Repeat < 1 || t.Repeat > maxRepeat {
			return fmt.Errorf("%s.repeat: %d; write 1 to %d", where, t.Repeat, maxRepeat)
		}
		if t.Sandbox == nil {
			t.Sandbox = &s.Sandbox
		}
		r := t.recorded()
		if err := r.check(); err != nil {
			return fmt.Errorf("%s.request: %w", where, err)
		}
		t.Request, t.Response = r.recordedRequest, r.Response
		if err := t.Want.check(); err != nil {
			return fmt.Errorf("%s.want: %w", where, err)
		}
		for j, p := range t.Policies {
			for _, name := range p.Secrets {
				if _, ok := s.Secrets[name]; !ok {
					return fmt.Errorf("%s: policies[%d].secrets: there is no secret %q under secrets", where, j, name)
				}
			}
		}
	}
	return nil
}

var verdicts = []string{verdictAllow, verdictRespond, verdictDeny, verdictError, verdictInvalid}

func (w *suiteWant) check() error {
	if w.Verdict != "" && !slices.Contains(verdicts, w.Verdict) {
		return fmt.Errorf("verdict: %.40q; write one of %s", w.Verdict, strings.Join(verdicts, ", "))
	}
	if w.Secrets != nil {
		slices.Sort(*w.Secrets)
	}
	return nil
}

func (t *suiteTest) recorded() *recorded {
	return &recorded{recordedRequest: t.Request, Sandbox: *t.Sandbox, Response: t.Response}
}

// testResult is what became of one test.
type testResult struct {
	Name     string   `json:"name"`
	OK       bool     `json:"ok"`
	Failures []string `json:"failures,omitempty"`
	Requests int      `json:"requests"`
	// Last is what became of the last request.
	Last *outcome `json:"last,omitempty"`
}

// run runs all tests. An error is about the file, its modules or the machine.
func (s *suite) run(ctx context.Context, limits runnerLimits) ([]testResult, error) {
	r, err := newRunner(limits)
	if err != nil {
		return nil, err
	}
	defer r.close()
	results := make([]testResult, 0, len(s.Tests))
	for i := range s.Tests {
		result, err := s.runTest(ctx, r, &s.Tests[i])
		if err != nil {
			return nil, err
		}
		results = append(results, result)
	}
	return results, nil
}

func (s *suite) runTest(ctx context.Context, r *runner, t *suiteTest) (testResult, error) {
	result := testResult{Name: t.Name, OK: true}
	request := t.recorded()
	request.Secrets = s.Secrets
	r.offset += time.Duration(t.After)
	steps := make([]step, 0, len(t.Policies))
	for _, p := range t.Policies {
		module, err := r.module(ctx, s.modulePath(p.Name))
		if err != nil {
			return result, err
		}
		secrets := p.Secrets
		if secrets == nil {
			secrets = map[string]string{} // none, as in a rule
		}
		steps = append(steps, step{module, p.Config, secrets})
	}
	// Each test has instances of its own: variables of policies do not outlive it.
	chain, err := r.configure(ctx, steps)
	if err != nil {
		if ctx.Err() != nil {
			return result, ctx.Err()
		}
		result.Last = r.startFailure(verdictInvalid, err)
		result.fail(t.Want.differences(result.Last, s.Secrets), 0, t.Repeat)
		return result, nil
	}
	defer chain.release()
	for i := range t.Repeat {
		result.Last, err = chain.send(ctx, request, "test")
		if err != nil {
			return result, err
		}
		result.Requests++
		if result.fail(t.Want.differences(result.Last, s.Secrets), i, t.Repeat); !result.OK {
			break
		}
	}
	return result, nil
}

// modulePath returns the path of a file of the suite, or the name of a policy that is part of doze.
func (s *suite) modulePath(name string) string {
	if !strings.ContainsAny(name, "./") || filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(s.folder, name)
}

func (r *testResult) fail(differences []string, i, of int) {
	for _, d := range differences {
		if of > 1 {
			d = fmt.Sprintf("request %d of %d: %s", i+1, of, d)
		}
		r.OK, r.Failures = false, append(r.Failures, d)
	}
}

// differences are what does not hold of an outcome.
func (w *suiteWant) differences(o *outcome, secrets map[string]string) (list []string) {
	differ := func(what, got, want string) {
		list = append(list, fmt.Sprintf("%s: got %s, want %s", what, got, want))
	}
	compare := func(what, got string, m *matcher) {
		if m == nil {
			return
		}
		if want, ok := m.match(got, secrets); !ok {
			differ(what, fmt.Sprintf("%q", got), want)
		}
	}
	headers := func(what string, got http.Header, want map[string]*matcher) {
		for _, name := range slices.Sorted(maps.Keys(want)) {
			values := got.Values(name)
			switch m := want[name]; {
			case m == nil && len(values) > 0:
				differ(what+" "+name, fmt.Sprintf("%q", strings.Join(values, ", ")), "none")
			case m != nil && len(values) == 0:
				wanted, _ := m.match("", secrets)
				differ(what+" "+name, "none", wanted)
			case m != nil:
				compare(what+" "+name, strings.Join(values, ", "), m)
			}
		}
	}
	one := func(what string, of []string, wants []matcher) {
		for _, m := range wants {
			if !slices.ContainsFunc(of, func(text string) bool { _, ok := m.match(text, secrets); return ok }) {
				want, _ := m.match("", secrets)
				differ(what, fmt.Sprintf("%q", of), want)
			}
		}
	}
	switch {
	case w.Verdict != "" && o.Verdict != w.Verdict:
		differ("verdict", o.summary(), w.Verdict)
	case w.Verdict == "" && (o.Verdict == verdictError || o.Verdict == verdictInvalid):
		differ("verdict", o.summary(), "no failure")
	}
	compare("reason", o.Reason, w.Reason)
	switch sent := o.Sent; {
	case w.Method == nil && w.URL == nil && w.Headers == nil && w.Body == nil:
	case sent == nil:
		differ("request", "nothing sent to the host ("+o.summary()+")", "a request")
	default:
		compare("method", sent.Method, w.Method)
		compare("url", sent.URL, w.URL)
		headers("header", sent.Headers, w.Headers)
		compare("body", sent.Body, w.Body)
	}
	switch response := o.Response; {
	case w.Response == nil:
	case response == nil:
		differ("response", "none ("+o.summary()+")", "a response")
	default:
		if w.Response.Status != 0 && response.Status != w.Response.Status {
			differ("response.status", fmt.Sprint(response.Status), fmt.Sprint(w.Response.Status))
		}
		headers("response header", response.Headers, w.Response.Headers)
		compare("response.body", response.Body, w.Response.Body)
	}
	if w.Secrets != nil && !slices.Equal(o.Secrets, *w.Secrets) {
		differ("secrets", fmt.Sprintf("%q", o.Secrets), fmt.Sprintf("%q", *w.Secrets))
	}
	one("notes", o.Notes, w.Notes)
	one("log", o.Log, w.Log)
	return list
}

// printResults prints a line for each test, and what does not hold.
func printResults(w io.Writer, results []testResult) error {
	failed := 0
	for _, r := range results {
		word := "ok  "
		if !r.OK {
			word = "FAIL"
			failed++
		}
		fmt.Fprintf(w, "%s  %s\n", word, clean(r.Name))
		for _, f := range r.Failures {
			fmt.Fprintf(w, "      %s\n", clean(f))
		}
		if r.OK || r.Last == nil {
			continue
		}
		indent(w, "      ", r.Last.Detail)
		for _, line := range r.Last.Log {
			fmt.Fprintf(w, "      log: %s\n", clean(line))
		}
	}
	count, word := len(results), "passed"
	if failed > 0 {
		count, word = failed, "failed"
	}
	_, err := fmt.Fprintf(w, "%d of %d tests %s\n", count, len(results), word)
	return err
}
