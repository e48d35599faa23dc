package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
)

// egressSubject is the subject of a command about egress: a sandbox, which its first
// argument names, or with --proxy the owner's clients of the proxy.
type egressSubject struct{ proxy bool }

func (s *egressSubject) flag(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&s.proxy, "proxy", false, "for the clients of the proxy instead of a sandbox")
}

// wants returns a check of the number of arguments after the sandbox.
func (s *egressSubject) wants(more int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if s.proxy {
			args = append([]string{"--proxy"}, args...) // where the sandbox would be
		}
		return wants(1+more, 1+more)(cmd, args)
	}
}

// complete completes the sandbox.
func (s *egressSubject) complete(a *app) cobra.CompletionFunc {
	return a.complete(func(ctx context.Context, node *client.Client, args []string) []string {
		if s.proxy {
			return nil
		}
		return oneSandbox(ctx, node, args)
	})
}

// split returns the sandbox, empty for the proxy, and the arguments after it.
func (s *egressSubject) split(args []string) (sandbox string, others []string) {
	if s.proxy {
		return "", args
	}
	return args[0], args[1:]
}
