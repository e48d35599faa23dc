package main

import (
	"cmp"
	"context"

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
		Short: "Print the output of a policy",
		Long: `Print the output of a policy, oldest first. Each line has the flow and the sandbox of its
request; "doze egress flows SANDBOX --json" has the same flows. The node stores the
latest 1,000 lines until it restarts.`,
		Example:           "  doze policy logs sign -f --level warn",
		Args:              wants(1, 1),
		ValidArgsFunction: a.complete(policyNames),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			lines, err := node.PolicyLogs(ctx, args[0], level, 0)
			if err != nil {
				return err
			}
			return printStream(ctx, a, "lines", last(lines, tail), follow, func(l types.PolicyLine) uint64 { return l.Seq }, policyText,
				func(after uint64, each func(types.PolicyLine) error) error {
					return node.FollowPolicyLogs(ctx, args[0], level, after, each)
				})
		}),
	}
	f := cmd.Flags()
	f.BoolVarP(&follow, "follow", "f", false, "print new lines until the policy is deleted")
	f.IntVarP(&tail, "tail", "n", 0, "start with this many of the latest lines; 0 for all")
	choiceFlag(cmd, &level, "level", "only lines of this level and above: debug, info, warn or error", types.LogLevel("").Values())
	return cmd
}

func policyText(l types.PolicyLine) string {
	from := cmp.Or(l.SandboxName, l.Sandbox, "-")
	return timeline(l.Time, l.Dropped, "%-5s  %-10s  %s  %s", l.Level, cmp.Or(l.Flow, "-"), from, l.Text)
}
