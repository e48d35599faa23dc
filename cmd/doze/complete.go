package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

// completeWithin bounds how long a shell waits for names.
const completeWithin = 2 * time.Second

// lister lists the words that can follow args.
type lister func(ctx context.Context, node *client.Client, args []string) []string

// complete completes an argument with one of the listed words.
func (a *app) complete(list lister) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, word string) (words []string, _ cobra.ShellCompDirective) {
		ctx, cancel := context.WithTimeout(cmd.Context(), completeWithin)
		defer cancel()
		node, err := a.node()
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		for _, w := range list(ctx, node, args) {
			if strings.HasPrefix(w, word) && !slices.Contains(words, w) && isPlain(w) {
				words = append(words, w)
			}
		}
		return words, cobra.ShellCompDirectiveNoFileComp
	}
}

// isPlain reports whether a word needs no quoting in a command line. Names of processes
// come from sandboxes.
func isPlain(name string) bool {
	return strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == ""
}

// choiceFlag adds a flag that has one of some values.
func choiceFlag[T ~string](cmd *cobra.Command, target *string, name, usage string, values []T) {
	cmd.Flags().StringVar(target, name, "", usage)
	cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(textsOf(values), cobra.ShellCompDirectiveNoFileComp))
}

// textsOf returns the texts of values.
func textsOf[T ~string](values []T) []string {
	return texts(values, func(v T) string { return string(v) })
}

// sandboxNames lists the sandboxes that args do not name yet.
func sandboxNames(ctx context.Context, node *client.Client, args []string) []string {
	sandboxes, _ := node.List(ctx, client.Filter{})
	names := texts(sandboxes, func(sb types.Sandbox) string { return sb.Name })
	return slices.DeleteFunc(names, func(name string) bool { return slices.Contains(args, name) })
}

// oneSandbox lists sandboxes for the first argument.
func oneSandbox(ctx context.Context, node *client.Client, args []string) []string {
	if len(args) > 0 {
		return nil
	}
	return sandboxNames(ctx, node, args)
}

// processNames lists sandboxes, and then the processes of the named one.
func processNames(ctx context.Context, node *client.Client, args []string) []string {
	if len(args) != 1 {
		return oneSandbox(ctx, node, args)
	}
	processes, _ := node.Processes(ctx, args[0])
	return texts(processes, func(p types.Process) string { return p.Name })
}

// exposedPorts lists sandboxes, and then the ports of the named one that have previews.
func exposedPorts(ctx context.Context, node *client.Client, args []string) []string {
	if len(args) != 1 {
		return oneSandbox(ctx, node, args)
	}
	sb, _ := node.Get(ctx, args[0])
	return portNumbers(sb.Ports)
}

func portNumbers(ports []types.Port) []string {
	return texts(ports, func(p types.Port) string { return fmt.Sprint(p.Port) })
}

// completeCopy completes a file, or a sandbox with its colon.
func (a *app) completeCopy(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	switch {
	case len(args) > 1:
		return nil, cobra.ShellCompDirectiveNoFileComp
	case strings.ContainsAny(word, ":/"):
		return nil, cobra.ShellCompDirectiveDefault
	}
	names, _ := a.complete(sandboxNames)(cmd, nil, word)
	return texts(names, func(name string) string { return name + ":" }), cobra.ShellCompDirectiveNoSpace
}

var (
	completeFiles   = cobra.FixedCompletions(nil, cobra.ShellCompDirectiveDefault)
	completeFolders = cobra.FixedCompletions(nil, cobra.ShellCompDirectiveFilterDirs)
)
