package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
)

func (a *app) updateCommand() *cobra.Command {
	var req types.UpdateSandboxRequest
	var name string
	var labels []string
	cmd := &cobra.Command{
		Use:   "update SANDBOX",
		Short: "Change the name, labels or times of a sandbox",
		Long: `Change the name, labels or times of a sandbox. Other settings stay unchanged. This never
wakes the sandbox.`,
		Example:           "  doze update shop --ttl 24h\n  doze update shop --name store --sleep-after 5m",
		Args:              wants(1, 1),
		ValidArgsFunction: a.complete(oneSandbox),
	}
	cmd.RunE = a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
		if cmd.Flags().Changed("name") {
			req.Name = &name
		}
		if cmd.Flags().Changed("label") {
			set, err := pairs("label", labels)
			if err != nil {
				return err
			}
			req.Labels = &set
		}
		if req == (types.UpdateSandboxRequest{}) {
			return usage.Errorf("nothing to change; %s --help lists what can be changed", cmd.CommandPath())
		}
		return a.printState(node.Update(ctx, args[0], req))
	})
	f := cmd.Flags()
	f.StringVar(&name, "name", "", "new name")
	f.StringArrayVarP(&labels, "label", "l", nil, "KEY=VALUE; replaces all labels; may be repeated")
	f.Var(optionalDuration{&req.SleepAfter}, "sleep-after", "time without use after which it falls asleep; 0s for never")
	f.Var(optionalDuration{&req.StopAfter}, "stop-after", "time asleep after which it is stopped; 0s for never")
	f.Var(optionalDuration{&req.TTL}, "ttl", "time from now after which it is destroyed with its files; 0s for never")
	return cmd
}
