package main

import (
	"cmp"
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
	cmd := &cobra.Command{
		Use:   "egress",
		Short: "Rules for requests of sandboxes, and their flows",
		Long:  "Rules for the network traffic that leaves sandboxes, and the flows of that traffic.",
	}
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
		Short: "Print the flows of a sandbox and their verdicts",
		Long: `Print the flows of a sandbox with their verdicts, oldest first. The node stores the
latest 1,000. This never wakes the sandbox.

With --proxy, print the flows of programs outside of sandboxes through the node's proxy.`,
		Example:           "  doze egress flows shop -f --verdict deny\n  doze egress flows --proxy",
		Args:              of.wants(0),
		ValidArgsFunction: of.complete(a),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			sandbox, _ := of.split(args)
			sandbox, err := followed(ctx, node, sandbox, follow && !of.proxy)
			if err != nil {
				return err
			}
			flows, err := node.Flows(ctx, sandbox, filter, 0)
			if err != nil {
				return err
			}
			return printStream(ctx, a, "flows", last(flows, tail), follow, func(f types.Flow) uint64 { return f.Seq }, flowText,
				func(after uint64, each func(types.Flow) error) error {
					return node.FollowFlows(ctx, sandbox, filter, after, each)
				})
		}),
	}
	of.flag(cmd)
	f := cmd.Flags()
	f.BoolVarP(&follow, "follow", "f", false, "print new flows until the sandbox is destroyed, with --proxy until Ctrl-C")
	f.IntVarP(&tail, "tail", "n", 0, "start with this many of the latest flows; 0 for all")
	f.StringVar(&filter.Host, "host", "", "only flows to this host; *.example.com selects the hosts below example.com")
	choiceFlag(cmd, (*string)(&filter.Verdict), "verdict", "only flows with this verdict: allow, deny, respond or error", []types.Verdict{types.VerdictAllow, types.VerdictDeny, types.VerdictRespond, types.VerdictError})
	choiceFlag(cmd, (*string)(&filter.Kind), "kind", "only dns, connection or request", types.FlowKind("").Values())
	return cmd
}

func flowText(f types.Flow) string {
	return timeline(f.Time, f.Dropped, "%-6s  %-10s  %s", f.Verdict, f.Kind, flowDetails(f))
}

// flowDetails describes in a line what a flow was and what became of it.
func flowDetails(f types.Flow) string {
	where := cmp.Or(f.Host, f.Address)
	if f.Port != 0 {
		where = fmt.Sprintf("%s:%d", where, f.Port)
	}
	policies := texts(f.Policies, func(p types.FlowPolicy) string { return p.Name })
	d := details{strings.TrimSpace(f.Method + " " + where + f.Path)}
	d.add(f.Status != 0, "%d", f.Status)
	d.add(f.Reason != "", "%s", f.Reason)
	d.add(f.Rule != "", "by %s", f.Rule)
	d.add(len(policies) > 0, "through %s", strings.Join(policies, " "))
	d.add(len(f.Secrets) > 0, "with %s", strings.Join(f.Secrets, " "))
	d.add(len(f.Notes) > 0, "%s", strings.Join(f.Notes, "; "))
	d.add(f.BytesOut > 0, "%s out", size(f.BytesOut))
	d.add(f.BytesIn > 0, "%s in", size(f.BytesIn))
	d.add(f.DurationMS > 0, "%s", milliseconds(f.DurationMS))
	return d.String()
}

func (a *app) explainCommand() *cobra.Command {
	var headers []string
	var of egressSubject
	cmd := &cobra.Command{
		Use:   "explain SANDBOX|--proxy METHOD URL",
		Short: "Explain how the rules apply to a request",
		Long: `Explain how the rules apply to a request of a sandbox. Nothing is sent, no name is
resolved and no policy runs. For a connection without HTTP the URL is tcp://HOST:PORT.

With --proxy, explain a request of a program outside of sandboxes through the node's
proxy.`,
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
			return a.printExplanation(e)
		}),
	}
	of.flag(cmd)
	cmd.Flags().StringArrayVarP(&headers, "header", "H", nil, "header of the request, as 'NAME: VALUE'; may be repeated")
	return cmd
}

// stages are where a request is decided on, in words.
var stages = map[types.Stage]string{
	"dns":        "when its name is looked up",
	"connection": "when it connects",
	"request":    "when it is sent, intercepted",
}

func (a *app) printExplanation(e types.Explanation) error {
	if a.json {
		return a.printJSON(e)
	}
	t := newTable(a.out)
	t.row("verdict", e.Verdict)
	t.row("rule", e.Rule)
	if e.Preset != "" {
		t.row("preset", e.Preset)
	}
	t.row("reason", e.Reason)
	t.row("decided", cmp.Or(stages[e.Stage], string(e.Stage)))
	if e.AllowPrivate {
		t.row("private", "the host may be at a private address")
	}
	if e.Status != 0 {
		t.row("status", e.Status)
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
		Short: "Print the certificates of the node's certificate authority",
		Long: `Print the certificates of the node's certificate authority, in PEM. Sandboxes trust them
already; programs with a trust store of their own need them.`,
		Args: wants(0, 0),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, _ []string) error {
			pem, err := node.EgressCA(ctx)
			if err != nil {
				return err
			}
			if len(pem) == 0 {
				return errors.New("the node has no certificate authority of its own")
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
	var d details
	list := func(name string, values []string) { d.add(len(values) > 0, "%s", name+strings.Join(values, " ")) }
	list("", r.Hosts)
	list("", r.Addresses)
	list("port ", r.Ports)
	d.add(r.Scheme != "", "%s", r.Scheme)
	list("", r.Methods)
	list("", r.Paths)
	list("with ", slices.Sorted(maps.Keys(r.Headers)))
	return cmp.Or(d.String(), "everything")
}

// ruleEffect returns the action of a rule for a table.
func ruleEffect(r types.Rule) string {
	switch {
	case len(r.Policies) > 0:
		return "through " + strings.Join(texts(r.Policies, func(p types.RulePolicy) string { return p.Name }), " ")
	case r.Respond != nil:
		return "respond"
	}
	return strings.TrimSuffix(fmt.Sprintf("%s: %s", r.Action, r.Reason), ": ")
}
