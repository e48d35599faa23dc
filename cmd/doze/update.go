package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
)

func (a *app) updateCommand() *cobra.Command {
	var req types.UpdateSandboxRequest
	var name, persist string
	var labels, set, unset []string
	cmd := &cobra.Command{
		Use:   "update SANDBOX",
		Short: "Change the name, labels, times, persistence or environment of a sandbox",
		Long: `Change the name, labels, times, persistence or environment of a sandbox. Other
settings stay unchanged. This never wakes the sandbox.

The environment is changed last, and not if another change is refused. Commands and
processes that start later have the new one.`,
		Example:           "  doze update shop --ttl 24h\n  doze update shop --name store --sleep-after 5m\n  doze update shop --env STAGE=live --unset DEBUG",
		Args:              wants(1, 1),
		ValidArgsFunction: a.complete(oneSandbox),
	}
	cmd.RunE = a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
		if cmd.Flags().Changed("name") {
			req.Name = &name
		}
		if cmd.Flags().Changed("persist") {
			req.Persist = (*types.Persist)(&persist)
		}
		if cmd.Flags().Changed("label") {
			set, err := pairs("label", labels)
			if err != nil {
				return err
			}
			req.Labels = &set
		}
		changes, err := a.environChanges(set, unset)
		if err != nil {
			return err
		}
		if req == (types.UpdateSandboxRequest{}) && len(changes) == 0 {
			return usage.Errorf("nothing to change; %s --help lists what can be changed", cmd.CommandPath())
		}
		return a.printState(update(ctx, node, args[0], req, changes))
	})
	f := cmd.Flags()
	f.StringVar(&name, "name", "", "new name")
	f.StringArrayVarP(&labels, "label", "l", nil, "KEY=VALUE; replaces all labels; may be repeated")
	f.StringArrayVarP(&set, "env", "e", nil, "environment variable KEY=VALUE to set, or KEY with its value in this shell; may be repeated")
	f.StringArrayVar(&unset, "unset", nil, "environment variable to remove; may be repeated")
	f.Var(optionalDuration{&req.SleepAfter}, "sleep-after", "time without use after which it falls asleep; 0s for never")
	f.Var(optionalDuration{&req.StopAfter}, "stop-after", "time asleep after which it is stopped; 0s for never")
	f.Var(optionalDuration{&req.ArchiveAfter}, "archive-after", "time stopped after which its disk is moved to the object store; 0s for never")
	persistFlag(cmd, &persist, "state that a sleep keeps, from the next one on: memory, disk or none")
	f.Var(optionalDuration{&req.TTL}, "ttl", "time from now after which it is destroyed with its files; 0s for never")
	return cmd
}

// update changes the environment last, and not if the other changes are refused.
func update(ctx context.Context, node *client.Client, sandbox string, req types.UpdateSandboxRequest, env map[string]*string) (sb types.Sandbox, err error) {
	changes := req != (types.UpdateSandboxRequest{})
	if changes {
		if sb, err = node.Update(ctx, sandbox, req); err != nil {
			return sb, err
		}
		sandbox = sb.ID // not the name, which may have changed
	}
	if len(env) == 0 {
		return sb, nil
	}
	_, err = node.UpdateEnvironment(ctx, sandbox, env)
	switch {
	case err != nil && changes:
		return sb, fmt.Errorf("only the environment was not changed: %w", err)
	case err != nil:
		return sb, err
	}
	return node.Get(ctx, sandbox)
}

// environChanges returns the variables to set and, as nil, those to remove.
func (a *app) environChanges(set, unset []string) (map[string]*string, error) {
	values, err := a.environ(set)
	if err != nil {
		return nil, err
	}
	changes := make(map[string]*string, len(set)+len(unset))
	for name, value := range values {
		changes[name] = &value
	}
	for _, name := range unset {
		if changes[name] != nil {
			return nil, usage.Errorf("--env and --unset both name %s; give one of them", name)
		}
		changes[name] = nil
	}
	return changes, nil
}
