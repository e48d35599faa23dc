package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
)

func (a *app) updateCommand() *cobra.Command {
	var name string
	var labels []string
	var sleepAfter, stopAfter, ttl time.Duration
	cmd := &cobra.Command{
		Use:   "update SANDBOX",
		Short: "Change the name, labels or times of a sandbox",
		Long: `Change the name, labels or times of a sandbox. Other settings stay unchanged. This never
wakes the sandbox.`,
		Example:           "  doze update shop --ttl 24h\n  doze update shop --name store --sleep-after 5m",
		Args:              wants(1, 1),
		ValidArgsFunction: a.completeFirst,
	}
	cmd.RunE = a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
		var req types.UpdateSandboxRequest
		changed := cmd.Flags().Changed
		if changed("name") {
			req.Name = &name
		}
		if changed("label") {
			set, err := pairs("label", labels)
			if err != nil {
				return err
			}
			req.Labels = &set
		}
		for flag, to := range map[string]struct {
			value *time.Duration
			field **types.Duration
		}{
			"sleep-after": {&sleepAfter, &req.SleepAfter},
			"stop-after":  {&stopAfter, &req.StopAfter},
			"ttl":         {&ttl, &req.TTL},
		} {
			if changed(flag) {
				*to.field = (*types.Duration)(to.value)
			}
		}
		if req == (types.UpdateSandboxRequest{}) {
			return usage.Errorf("nothing to change; %s --help lists what can be changed", cmd.CommandPath())
		}
		sb, err := node.Update(ctx, args[0], req)
		if err != nil {
			return err
		}
		return a.printState(sb)
	})
	f := cmd.Flags()
	f.StringVar(&name, "name", "", "new name")
	f.StringArrayVarP(&labels, "label", "l", nil, "KEY=VALUE; replaces all labels; may be repeated")
	f.DurationVar(&sleepAfter, "sleep-after", 0, "time without use after which it falls asleep; 0s for never")
	f.DurationVar(&stopAfter, "stop-after", 0, "time asleep after which it is stopped; 0s for never")
	f.DurationVar(&ttl, "ttl", 0, "time from now after which it is destroyed with its files; 0s for never")
	return cmd
}
