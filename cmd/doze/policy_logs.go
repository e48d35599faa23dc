package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

func (a *app) policyLogsCommand() *cobra.Command {
	var follow bool
	var level string
	tail := 0
	cmd := &cobra.Command{
		Use:   "logs NAME",
		Short: "Print what a policy wrote",
		Long: `Print what a policy wrote, oldest first, each line with the flow and the sandbox in whose
request it was written. "doze egress flows SANDBOX --json" has the same flows. The latest
1,000 lines are kept until the node restarts.`,
		Example:           "  doze policy logs sign -f --level warn",
		Args:              wants(1, 1),
		ValidArgsFunction: a.completePolicy,
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			kept, err := node.PolicyLogs(ctx, args[0], level, 0)
			if err != nil {
				return err
			}
			if tail > 0 && len(kept) > tail {
				kept = kept[len(kept)-tail:]
			}
			if follow {
				return a.followPolicyLogs(ctx, node, args[0], level, kept)
			}
			if a.json {
				return a.printJSON(map[string]any{"lines": kept})
			}
			for _, line := range kept {
				if err := a.printPolicyLine(line); err != nil {
					return err
				}
			}
			return nil
		}),
	}
	f := cmd.Flags()
	f.BoolVarP(&follow, "follow", "f", false, "go on until the policy is deleted")
	f.IntVarP(&tail, "tail", "n", 0, "begin with this many of the latest lines; 0 for all")
	f.StringVar(&level, "level", "", "only lines of this level and above: debug, info, warn or error")
	cmd.RegisterFlagCompletionFunc("level", cobra.FixedCompletions([]string{"debug", "info", "warn", "error"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// followPolicyLogs prints each line once, and goes on when the node comes back.
func (a *app) followPolicyLogs(ctx context.Context, node *client.Client, name, level string, kept []types.PolicyLine) error {
	print := a.printPolicyLine
	if a.json {
		print = func(l types.PolicyLine) error { return a.printLine(l) }
	}
	var last uint64
	for _, line := range kept {
		if err := print(line); err != nil {
			return err
		}
		last = line.Seq
	}
	return followFrom(ctx, last, func(l types.PolicyLine) uint64 { return l.Seq }, print, func(after uint64, each func(types.PolicyLine) error) error {
		return node.FollowPolicyLogs(ctx, name, level, after, each)
	})
}

func (a *app) printPolicyLine(l types.PolicyLine) error {
	if l.Dropped > 0 {
		if _, err := fmt.Fprintf(a.out, "… %d more that came too fast\n", l.Dropped); err != nil {
			return err
		}
	}
	from := l.SandboxName
	if from == "" {
		from = l.Sandbox
	}
	_, err := fmt.Fprintln(a.out, strings.TrimRight(fmt.Sprintf("%s  %-5s  %-10s  %s  %s", l.Time.Local().Format("2006-01-02 15:04:05.000"),
		clean(l.Level), orDash(clean(l.Flow)), orDash(clean(from)), clean(l.Text)), " "))
	return err
}
