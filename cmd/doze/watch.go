package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/display"
	"github.com/doze-run/doze/cmd/internal/usage"
)

func (a *app) watchCommand() *cobra.Command {
	var o client.WatchOptions
	var all, flat bool
	cmd := &cobra.Command{
		Use:   "watch SANDBOX PATH",
		Short: "Print the changes of files in a sandbox",
		Long: `Print the changes of a directory with all below it, or of a file, until the directory is
removed or the sandbox stops. This wakes the sandbox, but does not keep it awake: nothing
changes while it sleeps.

Patterns have * and ? within a component of a path and ** for any number of components, such
as 'src/**/*.ts'. Those without a slash match at any depth.`,
		Example:           "  doze watch shop /srv/shop\n  doze watch --include '*.go' --json shop /srv/shop",
		Args:              wants(2, 2),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			if all && o.Exclude != nil {
				return usage.Errorf("--all and --exclude exclude each other; give one of them")
			}
			sandbox, err := followed(ctx, node, args[0], true)
			if err != nil {
				return err
			}
			o.NotRecursive = flat
			if all {
				o.Exclude = []string{}
			}
			return a.watchFiles(ctx, node, sandbox, args[1], o)
		}),
	}
	cmd.Flags().StringArrayVarP(&o.Include, "include", "i", nil, "only print files that match this pattern; may be repeated")
	cmd.Flags().StringArrayVarP(&o.Exclude, "exclude", "e", nil, "neither print nor visit what matches this pattern; may be repeated (default .git and node_modules)")
	cmd.Flags().BoolVarP(&all, "all", "a", false, "exclude nothing")
	cmd.Flags().BoolVar(&flat, "no-recursive", false, "do not watch the directories below")
	return cmd
}

// watchFiles prints changes, also across restarts of the node, until the watch ends.
func (a *app) watchFiles(ctx context.Context, node *client.Client, sandbox, path string, o client.WatchOptions) error {
	var stopped *types.WatchStopped
	var unprinted error // the failure to print a change
	for {
		err := node.Watch(ctx, sandbox, path, o, func(c client.Change) error {
			first := o.After == ""
			o.After, stopped = c.Cursor(), c.Stopped
			unprinted = a.printChange(c, first)
			return unprinted
		})
		switch {
		case unprinted != nil:
			return unprinted
		case stopped != nil:
			return fmt.Errorf("the watch has ended: %s", stopped.Detail)
		}
		if again, err := awaitNode(ctx, err); !again {
			return err
		}
	}
}

// printChange prints a change on stdout, and what is not a change on stderr.
func (a *app) printChange(c client.Change, first bool) (err error) {
	switch {
	case a.json:
		err = display.JSON(a.out, c, "")
	case c.Event != nil:
		_, err = fmt.Fprintln(a.out, changeText(*c.Event))
	case c.Overflow != nil:
		_, err = fmt.Fprintf(a.err, "doze: some changes were missed: %s\n", clean(strings.TrimSpace(c.Overflow.Detail+" "+pathText(c.Overflow.Path, c.Overflow.PathEncoding))))
	case c.Watching != nil && first:
		_, err = fmt.Fprintf(a.err, "doze: watching %s, %d directories\n", clean(c.Watching.Path), c.Watching.Directories)
	}
	return err
}

func changeText(e types.FileEvent) string {
	path, slash := pathText(e.Path, e.PathEncoding), ""
	if e.IsDir && !strings.HasSuffix(path, "/") {
		slash = "/"
	}
	if e.Type == types.FileEventTypeMove {
		path = pathText(e.From, e.PathEncoding) + slash + " → " + path
	}
	return timeline(time.Now(), 0, "%-6s  %s%s", e.Type, path, slash)
}

// pathText is a path of a sandbox; clean makes it fit for a terminal.
func pathText(path string, encoding types.Encoding) string {
	raw, err := encoding.Decode(path)
	if err != nil {
		return path
	}
	return string(raw)
}
