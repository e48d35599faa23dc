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
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/egress/secret/reference"
	"github.com/doze-run/doze/policies/builtin"
)

func (a *app) policyTestCommand() *cobra.Command {
	var config, memory string
	var secrets []string
	limits := a.policies
	cmd := &cobra.Command{
		Use:   "test FILE | test MODULE REQUEST",
		Short: "Run requests through policies, as the node does",
		Long: `Run requests through policies, as the node does, with its limits of memory and time.
Nothing leaves this machine.

With one argument, FILE contains tests: requests with their expected results. It prints a
line for each test, and exits with 1 if one fails. docs/egress.md has the format.

With two, it runs a recorded request through one policy, and prints what would be sent,
with its time and memory. MODULE is a .wasm file, or the name of a policy
that doze ships. REQUEST is a file with JSON (method, url, headers, body; also config,
secrets, sandbox and the host's response) or an HTTP/1.1 request. It
exits with 1 if the policy fails; a denial is not a failure.

Use secrets made for the test: their values are printed where the node would put them.`,
		Example: `  doze policy test github/tests.json
  doze policy test github.wasm request.json --secret token=example
  doze policy test github-app request.json --config '{"app":"1"}' --secret private_key=@key.pem`,
		Args: wants(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if memory != "" {
				n, err := humanize.ParseBytes(memory)
				if err != nil || n < 1<<20 || n > 1<<30 {
					return usage.Errorf("--memory-limit is %q; write 1MiB to 1GiB", memory)
				}
				limits.MemoryLimit = int(n)
			}
			if cmd.Flags().Changed("time-limit") && (limits.TimeLimit < time.Millisecond || limits.TimeLimit > time.Minute) {
				return usage.Errorf("--time-limit is %v; write 1ms to 1m", limits.TimeLimit)
			}
			if len(args) == 1 {
				if config != "" {
					return usage.Errorf("--config is for a single request; a file of tests has the configuration of each policy")
				}
				return a.testSuite(cmd.Context(), args[0], secrets, limits)
			}
			r, err := readRecorded(args[1])
			if err != nil {
				return err
			}
			if err := r.add(config, secrets); err != nil {
				return err
			}
			trial, err := newTrial(cmd.Context(), r, args[0], limits)
			if err != nil {
				return err
			}
			return a.printTest(trial, trial.print, trial.Verdict == verdictError)
		},
		ValidArgsFunction: completeFiles,
	}
	cmd.Flags().StringVar(&config, "config", "", "configuration of the policy, or @FILE (default: the configuration in REQUEST)")
	cmd.Flags().StringArrayVar(&secrets, "secret", nil, "secret, NAME=VALUE or NAME=@FILE")
	cmd.Flags().StringVar(&memory, "memory-limit", "", "memory limit of an instance, like the node's policy_memory_limit (default 16MiB)")
	cmd.Flags().DurationVar(&limits.TimeLimit, "time-limit", 0, "time limit of a call, like the node's policy_time_limit (default 50ms)")
	return cmd
}

func (a *app) testSuite(ctx context.Context, file string, secrets []string, limits runnerLimits) error {
	s, err := readSuite(file, secrets)
	if err != nil {
		return err
	}
	results, err := s.run(ctx, limits)
	if err != nil {
		return err
	}
	failed := slices.ContainsFunc(results, func(r testResult) bool { return !r.OK })
	return a.printTest(map[string]any{"tests": results}, func(w io.Writer) error { return printResults(w, results) }, failed)
}

// printTest prints a result, as text or with --json as v. It returns an exitCode if the test
// has failed.
func (a *app) printTest(v any, text func(io.Writer) error, failed bool) (err error) {
	if a.json {
		err = a.printJSON(v)
	} else {
		err = text(a.out)
	}
	if err == nil && failed {
		return exitCode(exitFailed)
	}
	return err
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
	var err error
	r.Secrets, err = withFlags(r.Secrets, secrets)
	return err
}

// withFlags adds secrets of the command line.
func withFlags(secrets map[string]string, flags []string) (map[string]string, error) {
	all := map[string]string{}
	maps.Copy(all, secrets)
	for _, s := range flags {
		name, value, ok := strings.Cut(s, "=")
		if !ok || name == "" {
			return nil, usage.Errorf("--secret is NAME=VALUE or NAME=@FILE")
		}
		value, err := valueOrFile(value)
		if err != nil {
			return nil, err
		}
		all[name] = value
	}
	return all, nil
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

// Verdicts of a request.
const (
	verdictAllow   = "allow"
	verdictRespond = "respond" // by a policy
	verdictDeny    = "deny"
	verdictError   = "error"   // a policy failed
	verdictInvalid = "invalid" // a policy does not accept its configuration
)

// outcome is what became of a request.
type outcome struct {
	Verdict string   `json:"verdict"`
	Reason  string   `json:"reason,omitempty"`
	Detail  string   `json:"detail,omitempty"` // of a failure
	Sent    *message `json:"sent,omitempty"`
	// Response is what the sandbox gets, unless it was denied.
	Response *message `json:"response,omitempty"`
	Secrets  []string `json:"secrets,omitempty"` // that are in what was sent
	Notes    []string `json:"notes,omitempty"`
	Log      []string `json:"log,omitempty"` // lines such as "info: text"
}

// summary is the verdict with its reason.
func (o *outcome) summary() string {
	return strings.TrimSuffix(o.Verdict+": "+o.Reason, ": ")
}

// trial is what became of a request, and what that costs.
type trial struct {
	outcome
	Cost cost `json:"cost"`
}

// message is a request or a response.
type message struct {
	Method  string      `json:"method,omitempty"`
	URL     string      `json:"url,omitempty"`
	Status  int         `json:"status,omitempty"`
	Headers http.Header `json:"headers"`
	Body    string      `json:"body,omitempty"`
}

// cost of a policy. The cost of a request includes the node's work for it.
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

	memoryLimit int
}

// How long requests are measured for, and how many at most.
const (
	measureFor      = 300 * time.Millisecond
	measureRequests = 10_000
)

// newTrial runs a request through a module.
func newTrial(ctx context.Context, r *recorded, path string, limits runnerLimits) (*trial, error) {
	runner, err := newRunner(limits)
	if err != nil {
		return nil, err
	}
	defer runner.close()
	t := &trial{}
	began := time.Now()
	module, err := runner.module(ctx, path)
	if err != nil {
		return nil, err
	}
	t.Cost.CompileMS = ms(time.Since(began))
	t.Cost.ModuleBytes = module.size
	began = time.Now()
	chain, err := runner.configure(ctx, []step{{module: module, config: r.Config}})
	if _, ok := errors.AsType[*policy.StartError](err); ok {
		t.outcome = *runner.startFailure(verdictError, err)
		return t, nil
	}
	if err != nil {
		return nil, err
	}
	defer chain.release()
	t.Cost.StartMS = ms(time.Since(began))
	o, err := chain.send(ctx, r, "test")
	if err != nil {
		return nil, err
	}
	t.outcome = *o
	err = t.measure(ctx, r, chain)
	t.Cost.memoryLimit = runner.limits.MemoryLimit
	t.Cost.MemoryBytes = chain.steps[0].Policy.Memory() // one request at a time: of one instance
	return t, err
}

// measure runs the request again and again. It counts apart from the first, so
// that a policy with a budget says in the trial what it says to a first request.
func (t *trial) measure(ctx context.Context, r *recorded, c *chain) error {
	var times []time.Duration
	for began := time.Now(); time.Since(began) < measureFor && len(times) < measureRequests && ctx.Err() == nil; {
		start := time.Now()
		if _, err := c.send(ctx, r, "measure"); err != nil {
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

// print prints a trial for people.
func (t *trial) print(w io.Writer) error {
	var b strings.Builder
	b.WriteString(clean(t.summary()) + "\n")
	indent(&b, "  ", t.Detail)
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
		fmt.Fprintf(&b, "%-8s %s after these requests, of at most %s\n", "memory", size(int64(c.MemoryBytes)), size(int64(c.memoryLimit)))
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
	indent(b, mark, body)
	if left := len(m.Body) - len(body); left > 0 {
		fmt.Fprintf(b, "%s… and %s more\n", mark, size(int64(left)))
	}
}

// startFailure is the outcome of a policy that does not take its configuration.
func (r *runner) startFailure(verdict string, err error) *outcome {
	o := &outcome{Verdict: verdict, Reason: err.Error(), Log: r.drain()}
	if start, ok := errors.AsType[*policy.StartError](err); ok {
		o.Detail = start.Detail
	}
	return o
}

// runnerLimits are the limits of policies; a zero limit is the node's default.
type runnerLimits = policy.Config

// runner runs policies as the node does.
type runner struct {
	host    *policy.Host
	limits  runnerLimits
	log     []string                // lines that policies wrote since drain, as "info: text"
	modules map[string]runnerModule // by file or shipped name
	offset  time.Duration           // of the policies' clock
}

type runnerModule struct {
	*policy.Module
	size int
}

func newRunner(limits runnerLimits) (*runner, error) {
	r := &runner{modules: map[string]runnerModule{}}
	limits.MemoryLimit = cmp.Or(limits.MemoryLimit, policy.Defaults().MemoryLimit)
	limits.Now = func() time.Time { return time.Now().Add(r.offset) }
	r.limits = limits
	var err error
	r.host, err = policy.NewHost(limits)
	return r, err
}

func (r *runner) close() {
	for _, m := range r.modules {
		m.Release()
	}
	r.host.Close()
}

// drain returns the lines that policies wrote since the last drain.
func (r *runner) drain() []string {
	lines := r.log
	r.log = nil
	return lines
}

// module compiles a file, or a policy that doze ships, once.
func (r *runner) module(ctx context.Context, path string) (runnerModule, error) {
	if m, ok := r.modules[path]; ok {
		return m, nil
	}
	name, read := strings.TrimSuffix(filepath.Base(path), ".wasm"), os.ReadFile
	if slices.Contains(builtin.Names(), path) {
		name, read = path, builtin.Module
	}
	wasm, err := read(path)
	if err != nil {
		return runnerModule{}, err
	}
	m, err := r.host.Compile(ctx, name, wasm)
	if err != nil {
		return runnerModule{}, err
	}
	// One request is under way at a time.
	m.Lines = func(line policylog.Line) { r.log = append(r.log, string(line.Level)+": "+line.Text) }
	r.modules[path] = runnerModule{m, len(wasm)}
	return r.modules[path], nil
}

// step is a policy of a chain.
type step struct {
	module runnerModule
	config json.RawMessage
	// secrets maps the names that the policy uses to names of secrets; nil: they are the
	// same.
	secrets map[string]string
}

// chain is policies that are ready to run one after another.
type chain struct {
	runner *runner
	steps  []policy.Step
	names  []map[string]string
}

// configure starts an instance of each policy.
func (r *runner) configure(ctx context.Context, steps []step) (*chain, error) {
	c := &chain{runner: r}
	for _, s := range steps {
		p, err := s.module.Configure(ctx, s.config)
		if err != nil {
			c.release()
			return nil, err
		}
		c.steps = append(c.steps, policy.Step{Policy: p})
		c.names = append(c.names, s.secrets)
	}
	return c, nil
}

func (c *chain) release() {
	for _, s := range c.steps {
		s.Policy.Release()
	}
}

// send is one exchange. Each namespace has its own stored values of policies.
func (c *chain) send(ctx context.Context, r *recorded, namespace string) (*outcome, error) {
	request, err := r.request()
	if err != nil {
		return nil, err
	}
	set := reference.NewSet(r.secret)
	steps, sources := slices.Clone(c.steps), make([]*reference.Source, len(c.steps))
	for i := range steps {
		names := c.names[i]
		if names == nil {
			names = map[string]string{}
			for name := range r.Secrets {
				names[name] = name
			}
		}
		sources[i] = set.Source("", names)
		steps[i].Secrets, steps[i].Namespace = sources[i], namespace
	}
	o := &outcome{}
	request = request.WithContext(ctx)
	response := httptest.NewRecorder()
	running := policy.NewChain(response, request, policy.Info{
		Host: strings.ToLower(request.URL.Hostname()),
		Sandbox: policy.Sandbox{
			ID: cmp.Or(r.Sandbox.ID, "k3f9x2m7q1az"), Name: cmp.Or(r.Sandbox.Name, "test"),
			Owner: cmp.Or(r.Sandbox.Owner, "tester"), Labels: r.Sandbox.Labels,
		},
	})
	defer running.Close()
	var renderErr error
	if !slices.ContainsFunc(steps, running.Request) {
		if o.Sent, o.Secrets, renderErr = render(set, request); renderErr == nil {
			w := running.Writer()
			maps.Copy(w.Header(), http.Header(r.Response.Headers).Clone())
			w.WriteHeader(r.Response.Status)
			io.WriteString(w, r.Response.Body)
		}
	}
	denial, _ := running.Response(false)
	o.Notes, o.Log = running.Notes, c.runner.drain()
	switch {
	case renderErr != nil:
		o.Verdict, o.Reason = verdictError, renderErr.Error()
	case denial != nil:
		o.Verdict, o.Reason, o.Detail = verdictDeny, denial.Reason, denial.Detail
		if denial.Detail != "" {
			o.Verdict = verdictError
		}
		for _, s := range sources {
			if s.BadArgument != nil {
				o.Detail = strings.TrimSpace(s.BadArgument.Error() + "\n" + o.Detail)
			}
		}
	default:
		o.Verdict = verdictAllow
		if running.RespondedBy != "" {
			o.Verdict = verdictRespond
		}
		o.Response = &message{Status: response.Code, Headers: response.Header(), Body: response.Body.String()}
	}
	return o, nil
}

func (r *recorded) secret(id secret.ID) ([]byte, error) {
	value, ok := r.Secrets[id.Name]
	if !ok {
		return nil, secret.ErrUnknown
	}
	return []byte(value), nil
}

// render is the request as it would leave the node.
func render(set *reference.Set, r *http.Request) (*message, []string, error) {
	used, err := set.Render(r, true)
	if err != nil {
		return nil, nil, err
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, nil, err
	}
	var names []string
	for _, id := range used {
		names = append(names, id.Name)
	}
	slices.Sort(names)
	headers := r.Header.Clone()
	headers.Set("Host", r.Host)
	return &message{Method: r.Method, URL: r.URL.String(), Headers: headers, Body: string(body)}, slices.Compact(names), nil
}
