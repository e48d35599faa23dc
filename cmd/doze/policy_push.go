package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

func (a *app) pushPolicyCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "push NAME FILE",
		Short: "Push a policy to the node, or replace it",
		Long: `Push a policy to the node, or replace it. FILE is a WASM module. Requests in progress
finish with the previous module; later ones use the new module.`,
		Example: "  doze policy push sign sign.wasm",
		Args:    wants(2, 2),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 0 {
				return a.complete(policyNames)(cmd, args, word)
			}
			return []string{"wasm"}, cobra.ShellCompDirectiveFilterFileExt
		},
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			done := a.waiting(args[0] + ": push")
			policy, err := pushFile(ctx, node, args[0], args[1])
			done()
			a.warn(policy.Warnings)
			return a.print(err, policy, "%s  %s, %s", policy.Name, shortDigest(policy.Digest), size(policy.Size))
		}),
	}
}

// pushFile pushes a module.
func pushFile(ctx context.Context, node *client.Client, name, file string) (types.Policy, error) {
	f, err := os.Open(file)
	if err != nil {
		return types.Policy{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return types.Policy{}, err
	case !info.Mode().IsRegular():
		return types.Policy{}, fmt.Errorf("%s is not a file; name a WASM module", file)
	case info.Size() > client.MaxPolicy:
		return types.Policy{}, fmt.Errorf("%s has %s; a policy has at most %s", file, size(info.Size()), size(client.MaxPolicy))
	}
	return node.PushPolicy(ctx, name, f)
}

// shortDigest is enough of a digest to distinguish modules.
func shortDigest(digest string) string {
	kind, hex, _ := strings.Cut(digest, ":")
	return kind + ":" + hex[:min(len(hex), 12)]
}

func (a *app) listPoliciesCommand() *cobra.Command {
	heads := []any{"NAME", "DIGEST", "SIZE", "CHANGED", "RULES"}
	return listCommand(a, "policies", "List policies, and the rules that use them", (*client.Client).Policies, heads, func(p types.Policy) []any {
		changed := ago(p.UpdatedAt)
		if p.BuiltIn {
			changed = "built in"
		}
		return []any{p.Name, shortDigest(p.Digest), size(p.Size), changed, cmp.Or(strings.Join(p.UsedBy, " "), "-")}
	})
}

// policyNames lists the policies that were pushed.
func policyNames(ctx context.Context, node *client.Client, _ []string) []string {
	policies, _ := node.Policies(ctx)
	policies = slices.DeleteFunc(policies, func(p types.Policy) bool { return p.BuiltIn })
	return texts(policies, func(p types.Policy) string { return p.Name })
}
