package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/jsonfile"
	"github.com/doze-run/doze/cmd/internal/usage"
)

func (a *app) rulesCommand() *cobra.Command {
	var file, def string
	var node bool
	cmd := &cobra.Command{
		Use:   "rules [SANDBOX]",
		Short: "Print rules, or set them",
		Long: `Print your rules for all of your sandboxes, the rules of one sandbox, or with --node the
operator's. With --set they are replaced by the rules in a file, or - for standard
input: a list, or the output of --json. That output contains the revision, so the rules
are replaced only if they have not changed since.

With --default deny, requests that match no rule are refused: the owner's default
applies after the rules of the owner and of the sandbox, a sandbox's after the
sandbox's. With --default inherit, the preceding rules decide.`,
		Example: `  doze egress rules --json > rules.json
  doze egress rules --set rules.json
  doze egress rules shop --default deny`,
		Args:              wants(0, 1),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, api *client.Client, args []string) error {
			sandbox := cmp.Or(args...)
			switch {
			case node && (sandbox != "" || file != "" || def != ""):
				return usage.Errorf("--node prints the operator's rules, which are in the node's Caddyfile; give it alone")
			case node:
				set, err := api.NodeRules(ctx)
				return a.printRules(err, set, set.Rules, set.Default)
			case file != "" || def != "":
				return a.updateRules(ctx, api, sandbox, file, def)
			}
			set, err := api.Rules(ctx, sandbox)
			a.warn(set.Warnings)
			return a.printRules(err, set, set.Rules, set.Default)
		}),
	}
	cmd.Flags().StringVar(&file, "set", "", "replace the rules by the rules in this file; - for standard input")
	cmd.Flags().BoolVar(&node, "node", false, "print the rules of the node")
	choiceFlag(cmd, &def, "default", "set the verdict of requests that match no rule: inherit or deny", []types.RuleDefault{types.RuleDefaultInherit, types.RuleDefaultDeny})
	cmd.MarkFlagFilename("set", "json")
	return cmd
}

func (a *app) presetsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "presets [NAME]",
		Short: "List presets, which rules refer to as hosts",
		Long: `List presets: named lists of hosts. Those with the source built_in come with doze:
code hosts, model APIs and installers. Those with the source node are defined by the
node's operator, such as package registries. A rule refers to one as a host:
"hosts": ["preset:github"]. With NAME, print the hosts of that preset.`,
		Example: "  doze egress presets\n  doze egress presets github",
		Args:    wants(0, 1),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			presets, err := node.Presets(ctx)
			if err != nil {
				return err
			}
			if len(args) == 0 {
				return printTable(a, "presets", presets, []any{"NAME", "SOURCE", "HOSTS", "WHAT"}, func(p types.Preset) []any {
					return []any{p.Name, p.Source, len(p.Hosts), p.Description}
				})
			}
			i := slices.IndexFunc(presets, func(p types.Preset) bool { return p.Name == strings.TrimPrefix(args[0], "preset:") })
			if i < 0 {
				return fmt.Errorf("preset %.80q does not exist; `doze egress presets` lists them", args[0])
			}
			if a.json {
				return a.printJSON(presets[i])
			}
			for _, host := range presets[i].Hosts {
				fmt.Fprintln(a.out, clean(host))
			}
			return nil
		}),
	}
}

// printRules returns err, or else prints the rules of a set, or with --json the set.
func (a *app) printRules(err error, set any, list json.RawMessage, def string) error {
	switch {
	case err != nil:
		return err
	case a.json:
		return a.printJSON(set)
	}
	var rules []types.Rule
	if err := json.Unmarshal(list, &rules); err != nil {
		return fmt.Errorf("unexpected form of rules: %w", err)
	}
	t := newTable(a.out, "NAME", "EFFECT", "WHAT")
	for _, r := range rules {
		t.row(r.Name, ruleEffect(r), ruleDetails(r))
	}
	if err := t.flush(); err != nil {
		return err
	}
	_, err = fmt.Fprintf(a.out, "default: %s\n", clean(def))
	return err
}

// maxRules is more than the API accepts, whose error then has its limit.
const maxRules = 2 << 20

// updateRules replaces the rules with those in a file, - for the standard input. Without a
// file it leaves them as they are. def is the new default, unless it is empty.
func (a *app) updateRules(ctx context.Context, node *client.Client, sandbox, file, def string) error {
	var update client.RulesUpdate
	if file == "" {
		set, err := node.Rules(ctx, sandbox)
		if err != nil {
			return err
		}
		update = client.RulesUpdate{Rules: set.Rules, IfRevision: &set.Revision}
	} else {
		path := file
		if file == "-" {
			path = "" // the standard input
		}
		text, err := a.readInput("the rules", path, maxRules)
		if err != nil {
			return err
		}
		if update, err = parseRules(text); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	update.Default = cmp.Or(def, update.Default)
	set, err := node.SetRules(ctx, sandbox, update)
	a.warn(set.Warnings)
	return a.print(err, set, "revision %d", set.Revision)
}

// warn prints what the API warns of.
func (a *app) warn(warnings []types.Warning) {
	for _, w := range warnings {
		fmt.Fprintf(a.err, "doze: warning: %s: %s; %s\n", clean(strings.TrimPrefix(w.Location, "body.")), clean(w.Message), clean(w.Hint))
	}
}

// parseRules parses a list of rules, or a set with its revision. The node checks the rules
// themselves.
func parseRules(text []byte) (client.RulesUpdate, error) {
	const want = `write a list of rules, or {"rules": [...]}`
	trimmed := bytes.TrimLeft(text, " \t\r\n")
	if len(trimmed) == 0 {
		return client.RulesUpdate{}, errors.New("empty; " + want)
	}
	if trimmed[0] == '[' {
		var rules json.RawMessage
		err := jsonfile.Decode(text, &rules)
		return client.RulesUpdate{Rules: rules}, err
	}
	var set struct {
		Revision  *int64          `json:"revision"`
		UpdatedAt json.RawMessage `json:"updated_at"`
		Default   string          `json:"default"`
		Rules     json.RawMessage `json:"rules"`
		Warnings  json.RawMessage `json:"warnings"`
	}
	if err := jsonfile.Decode(text, &set); err != nil {
		return client.RulesUpdate{}, fmt.Errorf("%w; %s", err, want)
	}
	if set.Rules == nil {
		return client.RulesUpdate{}, errors.New("no rules; " + want)
	}
	return client.RulesUpdate{Default: set.Default, Rules: set.Rules, IfRevision: set.Revision}, nil
}
