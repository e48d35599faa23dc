package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
)

func (a *app) egressCommand() *cobra.Command {
	cmd := group("egress", "Rules for requests of sandboxes, and their flows",
		"Rules for the network traffic that leaves sandboxes, and the flows of that traffic.")
	cmd.AddCommand(a.rulesCommand(), a.flowsCommand(), a.explainCommand(), a.presetsCommand(), a.authorityCommand())
	return cmd
}

func (a *app) flowsCommand() *cobra.Command {
	var follow bool
	var filter client.FlowFilter
	var of egressSubject
	tail := 0
	cmd := &cobra.Command{
		Use:   "flows SANDBOX|--proxy",
		Short: "Print what a sandbox sent, and what became of it",
		Long: `Print what a sandbox sent, and what became of it, oldest first. The latest 1,000 are
kept. This does not wake it.

With --proxy it is what your programs outside of sandboxes sent through the node's proxy.`,
		Example:           "  doze egress flows shop -f --verdict deny\n  doze egress flows --proxy",
		Args:              of.wants(0),
		ValidArgsFunction: of.complete(a),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			sandbox, _ := of.split(args)
			if follow {
				return a.followFlows(ctx, node, sandbox, filter, tail)
			}
			flows, err := node.Flows(ctx, sandbox, filter, 0)
			if err != nil {
				return err
			}
			flows = lastOf(flows, tail)
			if a.json {
				return a.printJSON(map[string]any{"flows": flows})
			}
			return a.printFlows(flows)
		}),
	}
	of.flag(cmd)
	f := cmd.Flags()
	f.BoolVarP(&follow, "follow", "f", false, "print new flows until the sandbox is destroyed, with --proxy until Ctrl-C")
	f.IntVarP(&tail, "tail", "n", 0, "start with this many of the latest flows; 0 for all")
	f.StringVar(&filter.Host, "host", "", "only flows to this host; *.example.com selects the hosts below example.com")
	choice := func(target *string, name, what string, values ...string) {
		f.StringVar(target, name, "", what)
		cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
	choice((*string)(&filter.Verdict), "verdict", "only flows with this verdict: allow, deny, respond or error", "allow", "deny", "respond", "error")
	choice((*string)(&filter.Kind), "kind", "only dns, connection or request", "dns", "connection", "request")
	return cmd
}

// lastOf is the end of a list, so many long; 0 is all of it.
func lastOf(flows []types.Flow, n int) []types.Flow {
	if n <= 0 || len(flows) <= n {
		return flows
	}
	return flows[len(flows)-n:]
}

func (a *app) printFlows(flows []types.Flow) error {
	for _, flow := range flows {
		if err := a.printFlow(flow); err != nil {
			return err
		}
	}
	return nil
}

// followFlows prints each flow once, and goes on when the node comes back.
func (a *app) followFlows(ctx context.Context, node *client.Client, sandbox string, filter client.FlowFilter, tail int) error {
	if sandbox != "" {
		// By id from here on: another sandbox may get the name.
		sb, err := node.Get(ctx, sandbox)
		if err != nil {
			return err
		}
		sandbox = sb.ID
	}
	print := a.printFlow
	if a.json {
		print = func(f types.Flow) error { return a.printLine(f) }
	}
	var last uint64
	if tail > 0 {
		kept, err := node.Flows(ctx, sandbox, filter, 0)
		if err != nil {
			return err
		}
		if older := len(kept) - tail; older > 0 {
			last = kept[older-1].Seq
		}
	}
	return followFrom(ctx, last, func(f types.Flow) uint64 { return f.Seq }, print, func(after uint64, each func(types.Flow) error) error {
		return node.FollowFlows(ctx, sandbox, filter, after, each)
	})
}

func (a *app) printFlow(f types.Flow) error {
	if f.Dropped > 0 {
		if _, err := fmt.Fprintf(a.out, "… %d more that came too fast\n", f.Dropped); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintln(a.out, strings.TrimRight(fmt.Sprintf("%s  %-6s  %-10s  %s", f.Time.Local().Format("2006-01-02 15:04:05.000"),
		clean(f.Verdict), clean(f.Kind), clean(flowDetails(f))), " "))
	return err
}

// flowDetails says in a line what a flow was and what became of it.
func flowDetails(f types.Flow) string {
	var parts []string
	add := func(format string, value any, say bool) {
		if say {
			parts = append(parts, fmt.Sprintf(format, value))
		}
	}
	where := f.Host
	if where == "" {
		where = f.Address
	}
	if f.Port != 0 {
		where = fmt.Sprintf("%s:%d", where, f.Port)
	}
	add("%s", strings.TrimSpace(f.Method+" "+where+f.Path), true)
	add("%d", f.Status, f.Status != 0)
	add("%s", f.Reason, f.Reason != "")
	add("by %s", f.Rule, f.Rule != "")
	var policies []string
	for _, p := range f.Policies {
		policies = append(policies, p.Name)
	}
	add("through %s", strings.Join(policies, " "), len(policies) > 0)
	add("with %s", strings.Join(f.Secrets, " "), len(f.Secrets) > 0)
	add("%s", strings.Join(f.Notes, "; "), len(f.Notes) > 0)
	add("%s out", size(f.BytesOut), f.BytesOut > 0)
	add("%s in", size(f.BytesIn), f.BytesIn > 0)
	add("%s", milliseconds(f.DurationMS), f.DurationMS > 0)
	return strings.Join(parts, ", ")
}

func (a *app) explainCommand() *cobra.Command {
	var headers []string
	var of egressSubject
	cmd := &cobra.Command{
		Use:   "explain SANDBOX|--proxy METHOD URL",
		Short: "Explain how the rules apply to a request",
		Long: `Explain how the rules apply to a request of a sandbox. Nothing is sent, no name is
resolved and no policy runs. For a connection without HTTP the URL is tcp://HOST:PORT.

With --proxy it is a request of one of your programs outside of sandboxes, through the
node's proxy.`,
		Example:           "  doze egress explain shop GET https://api.github.com/user\n  doze egress explain shop CONNECT tcp://db.example.com:5432\n  doze egress explain --proxy GET https://api.github.com/user",
		Args:              of.wants(2),
		ValidArgsFunction: of.complete(a),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			sandbox, rest := of.split(args)
			req := types.ExplainRequest{Method: rest[0], URL: rest[1], Headers: map[string]string{}}
			for _, h := range headers {
				name, value, ok := strings.Cut(h, ":")
				if !ok {
					return usage.Errorf("invalid header %q; write --header 'NAME: VALUE'", h)
				}
				req.Headers[strings.TrimSpace(name)] = strings.TrimSpace(value)
			}
			e, err := node.Explain(ctx, sandbox, req)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(e)
			}
			return a.printExplanation(e)
		}),
	}
	of.flag(cmd)
	cmd.Flags().StringArrayVarP(&headers, "header", "H", nil, "a header of the request, as 'NAME: VALUE'; may be repeated")
	cmd.RegisterFlagCompletionFunc("header", cobra.NoFileCompletions)
	return cmd
}

// stages are where a request is decided on, in words.
var stages = map[types.Stage]string{
	"dns":        "when its name is asked for",
	"connection": "when it connects",
	"request":    "when it is sent, intercepted",
}

func (a *app) printExplanation(e types.Explanation) error {
	t := newTable(a.out)
	t.row("verdict", string(e.Verdict))
	t.row("rule", e.Rule)
	if e.Preset != "" {
		t.row("preset", e.Preset)
	}
	t.row("reason", e.Reason)
	stage := stages[e.Stage]
	if stage == "" {
		stage = string(e.Stage)
	}
	t.row("decided", stage)
	if e.AllowPrivate {
		t.row("private", "the host may be at a private address")
	}
	if e.Status != 0 {
		t.row("status", fmt.Sprint(e.Status))
	}
	for _, p := range e.Policies {
		t.row("policy", strings.TrimSuffix(fmt.Sprintf("%s, of %s; %s", p.Name, p.Rule, p.Error), "; "))
	}
	for _, s := range e.Secrets {
		t.row("secret", strings.TrimSuffix(s.Name+"; "+s.Error, "; "))
	}
	for _, s := range e.Placeholders {
		t.row("placeholder", strings.TrimSuffix(s.Name+"; "+s.Error, "; "))
	}
	return t.flush()
}

func (a *app) authorityCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "ca",
		Short: "Print the certificates of the node's own authority",
		Long: `Print the certificates of the node's certificate authority, in PEM. Sandboxes trust them
already; programs with a trust store of their own need them.`,
		Args:              wants(0, 0),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: a.withNode(func(ctx context.Context, node *client.Client, _ []string) error {
			pem, err := node.EgressCA(ctx)
			if err != nil {
				return err
			}
			if len(pem) == 0 {
				return errors.New("the node has no authority of its own")
			}
			if a.json {
				return a.printJSON(map[string]string{"pem": string(pem)})
			}
			_, err = a.out.Write(pem)
			return err
		}),
	}
}

// ruleDetails returns what a rule matches, for a table.
func ruleDetails(r types.Rule) string {
	var parts []string
	list := func(name string, values []string) {
		if len(values) > 0 {
			parts = append(parts, name+strings.Join(values, " "))
		}
	}
	list("", r.Hosts)
	list("", r.Addresses)
	list("port ", r.Ports)
	list("", nonEmpty(r.Scheme))
	list("", r.Methods)
	list("", r.Paths)
	list("with ", slices.Sorted(maps.Keys(r.Headers)))
	if len(parts) == 0 {
		return "everything"
	}
	return strings.Join(parts, ", ")
}

func nonEmpty(values ...string) []string {
	return slices.DeleteFunc(values, func(s string) bool { return s == "" })
}

// ruleEffect returns the action of a rule for a table.
func ruleEffect(r types.Rule) string {
	var policies []string
	for _, p := range r.Policies {
		policies = append(policies, p.Name)
	}
	switch {
	case len(policies) > 0:
		return "through " + strings.Join(policies, " ")
	case r.Respond != nil:
		return "respond"
	case r.Reason != "":
		return string(r.Action) + ": " + r.Reason
	}
	return string(r.Action)
}
