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

// completeSandboxes completes any number of names of sandboxes.
func (a *app) completeSandboxes(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	var names []string
	for _, name := range a.sandboxNames(cmd.Context(), word) {
		if !slices.Contains(args, name) {
			names = append(names, name)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeFirst completes one name of a sandbox, as the first argument.
func (a *app) completeFirst(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.completeSandboxes(cmd, args, word)
}

// completeProcess completes a sandbox and then one of its processes.
func (a *app) completeProcess(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) != 1 {
		return a.completeFirst(cmd, args, word)
	}
	return a.complete(cmd, word, func(ctx context.Context, node *client.Client) (names []string) {
		processes, _ := node.Processes(ctx, args[0])
		for _, p := range processes {
			names = append(names, p.Name)
		}
		return names
	})
}

// complete completes one of what the node lists.
func (a *app) complete(cmd *cobra.Command, word string, list func(context.Context, *client.Client) []string) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), completeWithin)
	defer cancel()
	node, err := a.node()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var words []string
	for _, w := range list(ctx, node) {
		if strings.HasPrefix(w, word) && !slices.Contains(words, w) && isPlain(w) {
			words = append(words, w)
		}
	}
	return words, cobra.ShellCompDirectiveNoFileComp
}

// isPlain reports whether a word needs no quoting in a command line. Names of processes
// come from sandboxes.
func isPlain(name string) bool {
	return strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == ""
}

// completePort completes a sandbox and then one of its exposed ports.
func (a *app) completePort(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) != 1 {
		return a.completeFirst(cmd, args, word)
	}
	return a.complete(cmd, word, func(ctx context.Context, node *client.Client) (ports []string) {
		sb, _ := node.Get(ctx, args[0])
		for _, p := range sb.Ports {
			ports = append(ports, fmt.Sprint(p.Port))
		}
		return ports
	})
}

// completeNode completes what the node lists of itself.
func (a *app) completeNode(list func(types.Node) []string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
		return a.complete(cmd, word, func(ctx context.Context, api *client.Client) []string {
			node, _ := api.Node(ctx)
			return list(node)
		})
	}
}

// completeCopy completes a file, or a sandbox with its colon.
func (a *app) completeCopy(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	switch {
	case len(args) > 1:
		return nil, cobra.ShellCompDirectiveNoFileComp
	case strings.ContainsAny(word, ":/"):
		return nil, cobra.ShellCompDirectiveDefault
	}
	var names []string
	for _, name := range a.sandboxNames(cmd.Context(), word) {
		names = append(names, name+":")
	}
	return names, cobra.ShellCompDirectiveNoSpace
}

func (a *app) sandboxNames(ctx context.Context, prefix string) []string {
	ctx, cancel := context.WithTimeout(ctx, completeWithin)
	defer cancel()
	node, err := a.node()
	if err != nil {
		return nil
	}
	sandboxes, _ := node.List(ctx, client.Filter{})
	var names []string
	for _, sb := range sandboxes {
		if strings.HasPrefix(sb.Name, prefix) {
			names = append(names, sb.Name)
		}
	}
	return names
}

// completeFiles completes files, such as a Caddyfile.
func completeFiles(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return nil, cobra.ShellCompDirectiveDefault
}
