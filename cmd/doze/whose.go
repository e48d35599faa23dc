package main

import "github.com/spf13/cobra"

// whose is what a command about egress asks for: a sandbox, which its first argument
// names, or with --proxy all of the owner's programs outside of sandboxes.
type whose struct{ proxy bool }

func (w *whose) flag(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&w.proxy, "proxy", false, "of your programs outside of sandboxes, instead of a sandbox")
}

// wants returns a check of the number of arguments, of which there are so many after
// the sandbox.
func (w *whose) wants(more int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if w.proxy {
			args = append([]string{"--proxy"}, args...) // where the sandbox would be
		}
		return wants(1+more, 1+more)(cmd, args)
	}
}

// complete completes the sandbox.
func (w *whose) complete(a *app) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		if w.proxy {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return a.completeFirst(cmd, args, word)
	}
}

// split returns the sandbox, empty for the proxy, and the arguments after it.
func (w *whose) split(args []string) (sandbox string, rest []string) {
	if w.proxy {
		return "", args
	}
	return args[0], args[1:]
}
