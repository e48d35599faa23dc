package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/egress/policy"
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
line for each test, and exits with 1 if one fails. docs/policies.md has the format.

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

// add replaces the configuration of the file by the command line's, and adds its secrets.
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

// trial is the outcome of a request, with its cost.
type trial struct {
	outcome
	Cost cost `json:"cost"`
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

// measure sends the request repeatedly, with stored values of their own: the result of the
// trial is the one of a first request, also of a policy with a budget.
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

// maxPrinted bounds the printed bytes of a body.
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
