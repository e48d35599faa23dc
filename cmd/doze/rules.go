package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
)

func (a *app) rulesCommand() *cobra.Command {
	var file string
	var node bool
	cmd := &cobra.Command{
		Use:   "rules [SANDBOX]",
		Short: "Print rules, or set them",
		Long: `Print your rules for all of your sandboxes, those of one sandbox, or with --node the
operator's. With --set they are replaced by those of a file, or - for the standard
input: a list, or what --json printed. That has their revision, and then they are
replaced only if nobody has changed them meanwhile.`,
		Example: `  doze egress rules --json > rules.json
  doze egress rules --set rules.json`,
		Args:              wants(0, 1),
		ValidArgsFunction: a.completeFirst,
		RunE: a.withNode(func(ctx context.Context, api *client.Client, args []string) error {
			sandbox := first(args...)
			switch {
			case node && (sandbox != "" || file != ""):
				return errors.New("--node is about the operator's rules, which are in the node's Caddyfile; give it alone")
			case node:
				return a.printNodeRules(ctx, api)
			case file != "":
				return a.setRules(ctx, api, sandbox, file)
			}
			set, err := api.Rules(ctx, sandbox)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(set)
			}
			return a.printRules(set.Rules)
		}),
	}
	cmd.Flags().StringVar(&file, "set", "", "replace them by those of this file; - for the standard input")
	cmd.Flags().BoolVar(&node, "node", false, "those of the node")
	cmd.MarkFlagFilename("set", "json")
	return cmd
}

func (a *app) printNodeRules(ctx context.Context, node *client.Client) error {
	rules, err := node.NodeRules(ctx)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(rules)
	}
	if err := a.printRules(rules.Rules); err != nil {
		return err
	}
	_, err = fmt.Fprintf(a.out, "default: %s\n", clean(rules.Default))
	return err
}

func (a *app) printRules(list json.RawMessage) error {
	var rules []client.Rule
	if err := json.Unmarshal(list, &rules); err != nil {
		return fmt.Errorf("the rules are not what this version expects: %w", err)
	}
	t := newTable(a.out, "NAME", "EFFECT", "WHAT")
	for _, r := range rules {
		t.row(r.Name, ruleEffect(r), ruleDetails(r))
	}
	return t.end()
}

// maxRules is more than the API takes, so that it says how much that is.
const maxRules = 2 << 20

func (a *app) setRules(ctx context.Context, node *client.Client, sandbox, file string) error {
	in := a.in
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		defer f.Close()
		in = f
	}
	text, err := io.ReadAll(io.LimitReader(in, maxRules))
	if err != nil {
		return fmt.Errorf("reading the rules: %w", err)
	}
	rules, revision, err := parseRules(text)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	set, err := node.SetRules(ctx, sandbox, rules, revision)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(set)
	}
	_, err = fmt.Fprintf(a.out, "revision %d\n", set.Revision)
	return err
}

// parseRules reads a list of rules, or a set with its revision. What is in the rules
// is for the node to say.
func parseRules(text []byte) (rules json.RawMessage, revision *int64, err error) {
	const want = `write a list of rules, or {"rules": [...]}`
	if text = bytes.TrimSpace(text); len(text) == 0 {
		return nil, nil, errors.New("it is empty; " + want)
	}
	if text[0] == '[' {
		if !json.Valid(text) {
			return nil, nil, errors.New("it is no JSON; " + want)
		}
		return text, nil, nil
	}
	var set struct {
		Revision  *int64          `json:"revision"`
		UpdatedAt json.RawMessage `json:"updated_at"`
		Rules     json.RawMessage `json:"rules"`
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&set); err != nil {
		return nil, nil, fmt.Errorf("%w; %s", err, want)
	}
	if set.Rules == nil {
		return nil, nil, errors.New("it has no rules; " + want)
	}
	return set.Rules, set.Revision, nil
}
