package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/egress/secret/reference"
	"github.com/doze-run/doze/policies/builtin"
)

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

// message is a request or a response.
type message struct {
	Method  string      `json:"method,omitempty"`
	URL     string      `json:"url,omitempty"`
	Status  int         `json:"status,omitempty"`
	Headers http.Header `json:"headers"`
	Body    string      `json:"body,omitempty"`
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
