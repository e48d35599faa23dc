package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/reference"
	"github.com/doze-run/doze/policies/builtin"
)

func (a *app) policyTestCommand() *cobra.Command {
	var config string
	var secrets []string
	cmd := &cobra.Command{
		Use:   "test MODULE REQUEST",
		Short: "Run a recorded request through a policy, as the node does",
		Long: `Run a recorded request through a policy, as the node does, and print what would be
sent and what it costs in time and memory. Nothing leaves this machine.

MODULE is a .wasm file, or the name of a policy that doze ships. REQUEST is a file with
JSON (method, url, headers, body; also config, secrets, sandbox and the host's response)
or with a request as it is in HTTP/1.1. Values of secrets are for the test: they are
printed where the node would put them.

Exits with 1 if the policy fails; to deny is no failure.`,
		Example: `  doze policy test github.wasm request.json --secret token=example
  doze policy test github-app request.json --config '{"app":"1"}' --secret private_key=@key.pem`,
		Args: wants(2, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := readRecorded(args[1])
			if err != nil {
				return err
			}
			if err := r.add(config, secrets); err != nil {
				return err
			}
			name, wasm, err := readModule(args[0])
			if err != nil {
				return err
			}
			trial, err := newTrial(cmd.Context(), r, name, wasm)
			if err != nil {
				return err
			}
			if a.json {
				err = a.printJSON(trial)
			} else {
				err = trial.print(a.out)
			}
			if err == nil && trial.Verdict == verdictFailed {
				return exitCode(exitFailed)
			}
			return err
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveDefault
		},
	}
	cmd.Flags().StringVar(&config, "config", "", "the policy's configuration, or @FILE (default: that of REQUEST)")
	cmd.Flags().StringArrayVar(&secrets, "secret", nil, "a secret by the policy's name for it, NAME=VALUE or NAME=@FILE")
	return cmd
}

// add takes what the command line says over what the file does.
func (r *recorded) add(config string, secrets []string) error {
	if config != "" {
		text, err := valueOrFile(config)
		if err != nil {
			return err
		}
		r.Config = json.RawMessage(text)
	}
	all := map[string]string{}
	maps.Copy(all, r.Secrets)
	for _, s := range secrets {
		name, value, ok := strings.Cut(s, "=")
		if !ok || name == "" {
			return errors.New("--secret is NAME=VALUE or NAME=@FILE")
		}
		value, err := valueOrFile(value)
		if err != nil {
			return err
		}
		all[name] = value
	}
	r.Secrets = all
	return nil
}

// valueOrFile is the text itself, or what is in the file after an @.
func valueOrFile(text string) (string, error) {
	file, ok := strings.CutPrefix(text, "@")
	if !ok {
		return text, nil
	}
	content, err := os.ReadFile(file)
	return string(content), err
}

// readModule reads a file, or takes a policy that doze ships.
func readModule(module string) (name string, wasm []byte, err error) {
	if !strings.ContainsAny(module, "./") && slices.Contains(builtin.Names(), module) {
		wasm, err = builtin.Module(module)
		return module, wasm, err
	}
	wasm, err = os.ReadFile(module)
	return strings.TrimSuffix(filepath.Base(module), ".wasm"), wasm, err
}

// Verdicts of a trial.
const (
	verdictSent     = "sent"
	verdictAnswered = "answered"
	verdictDenied   = "denied"
	verdictFailed   = "failed"
)

// trial is what became of a request.
type trial struct {
	Verdict string   `json:"verdict"`
	Reason  string   `json:"reason,omitempty"`
	Detail  string   `json:"detail,omitempty"` // of a failure
	Sent    *message `json:"sent,omitempty"`
	// Response is what the sandbox gets, unless it was denied.
	Response *message `json:"response,omitempty"`
	Secrets  []string `json:"secrets,omitempty"` // that are in what was sent
	Notes    []string `json:"notes,omitempty"`
	Log      []string `json:"log,omitempty"`
	Cost     cost     `json:"cost"`
}

// message is a request or a response.
type message struct {
	Method  string      `json:"method,omitempty"`
	URL     string      `json:"url,omitempty"`
	Status  int         `json:"status,omitempty"`
	Headers http.Header `json:"headers"`
	Body    string      `json:"body,omitempty"`
}

// cost of a policy. That of a request is with what the node does for it.
type cost struct {
	ModuleBytes int     `json:"module_bytes"`
	CompileMS   float64 `json:"compile_ms"` // once
	StartMS     float64 `json:"start_ms"`   // of an instance, one for many requests
	Requests    int     `json:"requests"`   // that were measured
	MedianUS    float64 `json:"median_us"`
	P99US       float64 `json:"p99_us"`
	// MemoryBytes that the instance has after these requests, of WebAssembly; 0 if
	// each of them ended it.
	MemoryBytes int `json:"memory_bytes"`
}

// How long requests are measured for, and how many at most.
const (
	measureFor      = 300 * time.Millisecond
	measureRequests = 10_000
)

// newTrial runs a request through a module.
func newTrial(ctx context.Context, r *recorded, name string, wasm []byte) (*trial, error) {
	var log bytes.Buffer
	host, err := policy.NewHost(policy.Config{Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: textOnly}))})
	if err != nil {
		return nil, err
	}
	defer host.Close()
	t := &trial{Cost: cost{ModuleBytes: len(wasm)}}
	began := time.Now()
	module, err := host.Compile(ctx, name, wasm)
	if err != nil {
		return nil, err
	}
	defer module.Release()
	t.Cost.CompileMS = ms(time.Since(began))
	began = time.Now()
	p, err := module.Configure(ctx, r.Config)
	if start := (*policy.StartError)(nil); errors.As(err, &start) {
		t.Verdict, t.Reason, t.Detail = verdictFailed, err.Error(), start.Detail
		t.addLog(log.String())
		return t, nil
	}
	if err != nil {
		return nil, err
	}
	defer p.Release()
	t.Cost.StartMS = ms(time.Since(began))
	if err := t.run(ctx, r, p, "test"); err != nil {
		return nil, err
	}
	t.addLog(log.String())
	err = t.measure(ctx, r, p)
	t.Cost.MemoryBytes = p.Memory() // one request at a time: of one instance
	return t, err
}

// addLog takes what the policy has written so far.
func (t *trial) addLog(lines string) {
	for line := range strings.Lines(lines) {
		t.Log = append(t.Log, strings.TrimSpace(line))
	}
}

// textOnly leaves of a policy's line in the log what it wrote.
func textOnly(_ []string, attr slog.Attr) slog.Attr {
	if attr.Key == slog.TimeKey || attr.Key == "policy" || attr.Key == "sandbox" || attr.Key == "flow" {
		return slog.Attr{}
	}
	return attr
}

// run is one exchange. What policies keep is apart for each namespace.
func (t *trial) run(ctx context.Context, r *recorded, p *policy.Policy, namespace string) error {
	request, err := r.request()
	if err != nil {
		return err
	}
	x := &policy.Exchange{
		Host: strings.ToLower(request.URL.Hostname()),
		Sandbox: policy.Sandbox{
			ID: cmp.Or(r.Sandbox.ID, "k3f9x2m7q1az"), Name: cmp.Or(r.Sandbox.Name, "test"),
			Owner: cmp.Or(r.Sandbox.Owner, "tester"), Labels: r.Sandbox.Labels,
		},
	}
	source := &testSecrets{set: reference.NewSet(r.secret)}
	response := httptest.NewRecorder()
	var renderErr error
	upstream := http.HandlerFunc(func(w http.ResponseWriter, sent *http.Request) {
		if t.Sent, t.Secrets, renderErr = source.render(sent); renderErr != nil {
			return
		}
		maps.Copy(w.Header(), http.Header(r.Response.Headers))
		w.WriteHeader(r.Response.Status)
		io.WriteString(w, r.Response.Body)
	})
	denial, err := policy.Serve(response, request.WithContext(ctx), x, []policy.Step{{Policy: p, Secrets: source, Namespace: namespace}}, upstream)
	t.Notes = x.Notes
	switch {
	case renderErr != nil:
		t.Verdict, t.Reason = verdictFailed, renderErr.Error()
	case denial != nil:
		t.Verdict, t.Reason, t.Detail = verdictDenied, denial.Reason, denial.Detail
		if denial.Detail != "" {
			t.Verdict = verdictFailed
		}
		if source.err != nil {
			t.Detail = strings.TrimSpace(source.err.Error() + "\n" + t.Detail)
		}
	case err != nil:
		return err
	default:
		t.Verdict = verdictSent
		if x.Answered != "" {
			t.Verdict = verdictAnswered
		}
		t.Response = &message{Status: response.Code, Headers: response.Header(), Body: response.Body.String()}
	}
	return nil
}

func (r *recorded) secret(name string) ([]byte, error) {
	value, ok := r.Secrets[name]
	if !ok {
		return nil, policy.ErrUnknown
	}
	return []byte(value), nil
}

// measure runs the request again and again. It counts apart from the first, so
// that a policy with a budget says in the trial what it says to a first request.
func (t *trial) measure(ctx context.Context, r *recorded, p *policy.Policy) error {
	var times []time.Duration
	for began := time.Now(); time.Since(began) < measureFor && len(times) < measureRequests && ctx.Err() == nil; {
		start := time.Now()
		if err := new(trial).run(ctx, r, p, "measure"); err != nil {
			return err
		}
		times = append(times, time.Since(start))
	}
	if len(times) > 0 {
		slices.Sort(times)
		t.Cost.Requests = len(times)
		t.Cost.MedianUS, t.Cost.P99US = us(times[len(times)/2]), us(times[len(times)*99/100])
	}
	return ctx.Err()
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
func us(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }

// testSecrets are those of a recorded request, as a policy gets at them.
type testSecrets struct {
	set *reference.Set
	err error // what a policy is told a number of only
}

func (s *testSecrets) Reference(name string) (string, error) {
	ref, err := s.set.Secret(name)
	return ref, s.told(err)
}

func (s *testSecrets) Encode(encoding int32, text string) (string, error) {
	ref, err := s.set.Encode(reference.Encoding(encoding), text)
	return ref, s.told(err)
}

func (s *testSecrets) HMAC(name, prefix string, parts [][]byte) ([]byte, error) {
	mac, err := s.set.HMAC(name, prefix, parts)
	return mac, s.told(err)
}

func (s *testSecrets) Sign(name string, algorithm int32, data []byte) ([]byte, error) {
	signature, err := s.set.Sign(name, algorithm, data)
	return signature, s.told(err)
}

// told is the error as policies know it.
func (s *testSecrets) told(err error) error {
	switch {
	case err == nil, errors.Is(err, policy.ErrUnknown):
		return err
	case errors.Is(err, reference.ErrLimit):
		return policy.ErrLimit
	}
	s.err = err
	return policy.ErrBadArgument
}

// render is the request as it would leave the node.
func (s *testSecrets) render(r *http.Request) (*message, []string, error) {
	used, err := s.set.Render(r)
	if err != nil {
		return nil, nil, err
	}
	inBody, err := s.set.RenderBody(r)
	if err != nil {
		return nil, nil, err
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, nil, err
	}
	used = append(used, inBody...)
	slices.Sort(used)
	headers := r.Header.Clone()
	headers.Set("Host", r.Host)
	return &message{Method: r.Method, URL: r.URL.String(), Headers: headers, Body: string(body)}, slices.Compact(used), nil
}

// print prints a trial for people.
func (t *trial) print(w io.Writer) error {
	var b strings.Builder
	b.WriteString(t.Verdict)
	if t.Reason != "" {
		b.WriteString(": " + clean(t.Reason))
	}
	b.WriteString("\n")
	for line := range strings.Lines(t.Detail) {
		b.WriteString("  " + clean(strings.TrimRight(line, "\n")) + "\n")
	}
	if t.Sent != nil {
		fmt.Fprintf(&b, "\n> %s %s\n", clean(t.Sent.Method), clean(t.Sent.URL))
		t.Sent.print(&b, "> ")
	}
	if t.Response != nil {
		fmt.Fprintf(&b, "\n< %d %s\n", t.Response.Status, http.StatusText(t.Response.Status))
		t.Response.print(&b, "< ")
	}
	b.WriteString("\n")
	for _, line := range []struct {
		what string
		list []string
	}{{"secret", t.Secrets}, {"note", t.Notes}, {"log", t.Log}} {
		for _, text := range line.list {
			fmt.Fprintf(&b, "%-8s %s\n", line.what, clean(text))
		}
	}
	c := t.Cost
	fmt.Fprintf(&b, "%-8s %.1f µs a request (median of %d, p99 %.1f µs); %s to compile %s once, %s to start an instance\n",
		"cost", c.MedianUS, c.Requests, c.P99US, milliseconds(c.CompileMS), size(int64(c.ModuleBytes)), milliseconds(c.StartMS))
	if c.MemoryBytes > 0 {
		fmt.Fprintf(&b, "%-8s %s after these requests, of at most %s\n", "memory", size(int64(c.MemoryBytes)), size(int64(policy.Defaults().MemoryLimit)))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// maxPrinted is how much of a body people get to see.
const maxPrinted = 2000

// print prints headers and body, each line after a mark.
func (m *message) print(b *strings.Builder, mark string) {
	for _, name := range slices.Sorted(maps.Keys(m.Headers)) {
		for _, value := range m.Headers[name] {
			fmt.Fprintf(b, "%s%s: %s\n", mark, clean(name), clean(value))
		}
	}
	if m.Body == "" {
		return
	}
	b.WriteString(mark + "\n")
	body := m.Body[:min(len(m.Body), maxPrinted)]
	for line := range strings.Lines(body) {
		b.WriteString(mark + clean(strings.TrimRight(line, "\r\n")) + "\n")
	}
	if left := len(m.Body) - len(body); left > 0 {
		fmt.Fprintf(b, "%s… and %s more\n", mark, size(int64(left)))
	}
}
