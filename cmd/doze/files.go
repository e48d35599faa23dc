package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
)

func (a *app) filesCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "files",
		Short: "Find and describe files in a sandbox, and make URLs for them",
		Long: `Files in a sandbox. doze cp copies them.

A relative path in a sandbox starts at its working directory, as for doze exec.`,
	}
	cmd.AddCommand(a.findFilesCommand(), a.grepFilesCommand(), a.statFileCommand(), a.fileURLCommand())
	return cmd
}

// withPath adapts a command whose first argument is SANDBOX:PATH.
func (a *app) withPath(run func(ctx context.Context, node *client.Client, at location, args []string) error) func(*cobra.Command, []string) error {
	return a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
		at := parseLocation(args[0])
		if at.local() {
			return usage.Errorf("%q does not name a sandbox; write it like shop:/workspace/app.js", args[0])
		}
		if err := makeAbsolute(ctx, node, &at); err != nil {
			return err
		}
		return run(ctx, node, at, args[1:])
	})
}

func (a *app) findFilesCommand() *cobra.Command {
	var o client.SearchOptions
	cmd := &cobra.Command{
		Use:   "find SANDBOX:PATH",
		Short: "Find files by their names",
		Long: `Find files, directories and symbolic links by their names, below a directory. Links are
not followed; .git and node_modules are skipped.`,
		Example:           "  doze files find shop:/workspace --name '*.go'",
		Args:              wants(1, 1),
		ValidArgsFunction: a.completeCopy,
		RunE: a.withPath(func(ctx context.Context, node *client.Client, at location, _ []string) error {
			return a.search(ctx, node, at, o)
		}),
	}
	searchFlags(cmd, &o)
	return cmd
}

func (a *app) grepFilesCommand() *cobra.Command {
	var o client.SearchOptions
	cmd := &cobra.Command{
		Use:   "grep SANDBOX:PATH PATTERN",
		Short: "Find lines in files by a regular expression",
		Long: `Find lines in the text files below a directory, or in one file, by a regular expression
(RE2). Links are not followed; .git and node_modules are skipped. The sandbox's ripgrep
is used if it has one.`,
		Example:           "  doze files grep shop:/workspace 'func (Get|Set)' --name '*.go'\n  doze files grep -F -i shop:/etc 'localhost.'",
		Args:              wants(2, 2),
		ValidArgsFunction: a.completeCopy,
		RunE: a.withPath(func(ctx context.Context, node *client.Client, at location, args []string) error {
			if o.Content = args[0]; o.Content == "" {
				return usage.Errorf("the pattern is empty; doze files find lists files")
			}
			return a.search(ctx, node, at, o)
		}),
	}
	cmd.Flags().BoolVarP(&o.Literal, "literal", "F", false, "the pattern is text and not a regular expression")
	cmd.Flags().BoolVarP(&o.IgnoreCase, "ignore-case", "i", false, "ignore the case of the pattern")
	searchFlags(cmd, &o)
	return cmd
}

func searchFlags(cmd *cobra.Command, o *client.SearchOptions) {
	f := cmd.Flags()
	f.StringVar(&o.Name, "name", "", "only files whose name matches, such as '*.go'")
	f.BoolVar(&o.Hidden, "hidden", false, "include names that begin with a dot")
	f.StringArrayVar(&o.Exclude, "exclude", nil, "skip names that match, in place of .git and node_modules; may be repeated")
	f.IntVar(&o.Limit, "limit", 1000, "maximum number of results, at most 1000")
}

// search prints the results of a search, and a warning if there are more.
func (a *app) search(ctx context.Context, node *client.Client, at location, o client.SearchOptions) error {
	found, err := node.SearchFiles(ctx, at.sandbox, at.path, o)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(found)
	}
	for _, f := range found.Files {
		fmt.Fprintln(a.out, clean(f.Path))
	}
	for _, m := range found.Matches {
		fmt.Fprintf(a.out, "%s:%d:%s\n", clean(m.Path), m.Line, clean(m.Text))
	}
	switch found.Stopped {
	case types.SearchStopLimit:
		fmt.Fprintf(a.err, "doze: there are more than %d results; search a subdirectory, or with --name\n", o.Limit)
	case types.SearchStopTime:
		fmt.Fprintln(a.err, "doze: the search took too long and is incomplete; search a subdirectory, or with --name")
	}
	return nil
}

func (a *app) statFileCommand() *cobra.Command {
	var o client.StatOptions
	var digest bool
	cmd := &cobra.Command{
		Use:   "stat SANDBOX:PATH",
		Short: "Describe a file, directory or symbolic link",
		Long: `Describe a file, directory or symbolic link. The ETag of a file changes with each change
of the file: the API writes a file on condition that it has an ETag.`,
		Example:           "  doze files stat shop:/workspace/app.js\n  doze files stat --digest shop:/workspace/report.pdf",
		Args:              wants(1, 1),
		ValidArgsFunction: a.completeCopy,
		RunE: a.withPath(func(ctx context.Context, node *client.Client, at location, _ []string) error {
			if digest {
				o.Digest = types.DigestAlgorithmSHA256
			}
			file, err := node.Stat(ctx, at.sandbox, at.path, o)
			if err != nil || a.json {
				return a.print(err, file, "")
			}
			return a.printFile(file)
		}),
	}
	cmd.Flags().BoolVar(&o.Follow, "follow", false, "describe the file that a symbolic link leads to")
	cmd.Flags().BoolVar(&digest, "digest", false, "read the file and print its SHA-256")
	return cmd
}

func (a *app) printFile(file types.File) error {
	t := newTable(a.out)
	t.row("path", file.Path)
	t.row("type", file.Type)
	if file.Target != "" {
		t.row("target", file.Target)
	}
	t.row("size", file.Size)
	t.row("mode", file.Mode)
	t.row("owner", fmt.Sprintf("%d:%d", file.UID, file.GID))
	t.row("modified", file.ModifiedAt.Local().Format("2006-01-02 15:04:05.000000000"))
	if file.ETag != "" {
		t.row("etag", file.ETag)
	}
	if file.SHA256 != "" {
		t.row("sha256", file.SHA256)
	}
	return t.flush()
}

func (a *app) fileURLCommand() *cobra.Command {
	var req types.SignFileURLRequest
	var expiresIn time.Duration
	var write, inline bool
	cmd := &cobra.Command{
		Use:   "url SANDBOX:PATH",
		Short: "Make a URL to read or write one file without a token",
		Long: `Make a URL to read or write one file without a token, such as in a browser, until it
expires. Anyone who has the URL can use it: treat it as a secret. It ends earlier with
the sandbox and with the node's token.`,
		Example: `  doze files url shop:/workspace/report.pdf
  curl -T photo.jpg "$(doze files url --write --max-bytes 10000000 shop:/workspace/photo.jpg)"`,
		Args:              wants(1, 1),
		ValidArgsFunction: a.completeCopy,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			if flags := cmd.Flags(); !write && (flags.Changed("mode") || flags.Changed("max-bytes")) {
				return usage.Errorf("--mode and --max-bytes apply to URLs that write; add --write")
			}
			if write && inline {
				return usage.Errorf("--inline applies to URLs that read; omit --write or --inline")
			}
			return nil
		},
		RunE: a.withPath(func(ctx context.Context, node *client.Client, at location, _ []string) error {
			req.Path, req.ExpiresIn = at.path, (*types.Duration)(&expiresIn)
			if write {
				req.Operation = types.FileOperationWrite
			}
			if inline {
				req.Disposition = types.DispositionInline
			}
			signed, err := node.SignFileURL(ctx, at.sandbox, req)
			return a.print(err, signed, "%s", signed.URL)
		}),
	}
	f := cmd.Flags()
	f.BoolVar(&write, "write", false, "write the file with PUT; default: read it with GET")
	f.DurationVar(&expiresIn, "expires-in", time.Hour, "time until the URL expires, at most 168h")
	f.BoolVar(&inline, "inline", false, "have browsers display the file; default: save it")
	f.StringVar(&req.Mode, "mode", "", "permissions of the written file in octal, such as 0644")
	f.Int64Var(&req.MaxBytes, "max-bytes", 0, "largest file to accept (default unlimited)")
	return cmd
}
