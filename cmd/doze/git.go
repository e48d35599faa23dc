package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
)

func (a *app) gitCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "git",
		Short: "Work with git repositories in a sandbox",
		Long: `Work with git repositories in a sandbox, by the sandbox's own git. DIR is the absolute
path of a working tree. Credentials never enter the sandbox: egress rules with the
policy basic add them to git's requests. For all else of git there is
doze exec SANDBOX -- git -C DIR ….`,
	}
	cmd.AddCommand(a.gitCloneCommand(), a.gitStatusCommand(), a.gitDiffCommand(), a.gitLogCommand(), a.gitBranchesCommand(),
		a.gitCheckoutCommand(), a.gitCommitCommand(), a.gitPushCommand(), a.gitPullCommand())
	return cmd
}

// gitTimeout is the flag --timeout of transfers.
func gitTimeout(cmd *cobra.Command, field **types.Duration) {
	cmd.Flags().Var(optionalDuration{field}, "timeout", "time after which git is killed; 0s for never")
}

func (a *app) gitCloneCommand() *cobra.Command {
	var req types.GitCloneRequest
	cmd := &cobra.Command{
		Use:   "clone SANDBOX URL [DIR]",
		Short: "Clone a repository",
		Long: `Clone a repository into a directory of the sandbox, by default one with the repository's
name in the image's working directory. A clone that fails or is interrupted leaves
nothing behind.`,
		Example:           "  doze git clone shop https://github.com/example/shop.git\n  doze git clone --branch next --depth 1 shop https://github.com/example/shop.git /srv/shop",
		Args:              wants(2, 3),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			if req.URL = args[1]; len(args) > 2 {
				req.TargetDir = args[2]
			}
			if req.Branch != "" && req.Tag != "" || req.Commit != "" && req.Branch+req.Tag != "" {
				return usage.Errorf("--branch, --tag and --commit exclude each other; give one of them")
			}
			line := newProgress(a.err)
			head, err := node.CloneRepository(ctx, args[0], req, func(p types.GitProgress) { line.show(gitProgress(p)) })
			line.clear()
			return a.printHead(head, err)
		}),
	}
	f := cmd.Flags()
	f.StringVarP(&req.Branch, "branch", "b", "", "branch to check out (default the server's)")
	f.StringVar(&req.Tag, "tag", "", "tag to check out")
	f.StringVar(&req.Commit, "commit", "", "commit to check out, by its full hash")
	f.IntVar(&req.Depth, "depth", 0, "number of commits to get of the history (default all)")
	f.BoolVar(&req.Submodules, "submodules", false, "clone submodules too")
	gitTimeout(cmd, &req.Timeout)
	return cmd
}

// gitProgress is a line such as "receiving objects: 45% (450/1000), 1.2 MiB".
func gitProgress(p types.GitProgress) string {
	text := strings.ReplaceAll(string(p.Phase), "_", " ")
	if p.Submodule != "" {
		text = p.Submodule + ": " + text
	}
	if p.Total > 0 {
		text += fmt.Sprintf(": %d%% (%d/%d)", 100*p.Done/p.Total, p.Done, p.Total)
	} else {
		text += fmt.Sprintf(": %d", p.Done)
	}
	if p.Bytes > 0 {
		text += ", " + size(p.Bytes)
	}
	return text
}

// printHead prints a working tree: its path, branch and commit.
func (a *app) printHead(head types.GitHead, err error) error {
	return a.print(err, head, "%s  %s", head.Path, headName(head))
}

// headName describes what is checked out: "main 8f3c1f0e5a4b", or only the commit.
func headName(head types.GitHead) string {
	var d details
	d.add(head.Branch != "", "%s", head.Branch)
	d.add(head.Branch == "", "detached")
	d.add(head.Commit != "", "%s", shortHash(head.Commit))
	d.add(head.Commit == "", "no commit yet")
	return d.String()
}

// shortHash is a hash as git abbreviates it in large repositories.
func shortHash(hash string) string { return hash[:min(len(hash), 12)] }

func (a *app) gitStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "status SANDBOX DIR",
		Short:             "Print the commit that is checked out, and the files that differ from it",
		Args:              wants(2, 2),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			status, err := node.GitStatus(ctx, args[0], args[1])
			if err != nil || a.json {
				return a.print(err, status, "")
			}
			var d details
			d.add(true, "%s", headName(status.GitHead))
			d.add(status.Upstream != "", "%d ahead of and %d behind %s", status.Ahead, status.Behind, status.Upstream)
			d.add(status.Clean, "clean")
			fmt.Fprintln(a.out, clean(d.String()))
			t := newTable(a.out)
			for _, f := range status.Files {
				t.row("  "+string(changeOf(f)), f.Path, renamedFrom(f.OriginalPath))
			}
			if err := t.flush(); err != nil || !status.Truncated {
				return err
			}
			_, err = fmt.Fprintln(a.out, "  …")
			return err
		}),
	}
}

// changeOf describes the change of a file in one word, or two if a part of it is staged.
func changeOf(f types.GitFile) string {
	switch {
	case f.Conflict != "":
		return "unmerged (" + string(f.Conflict) + ")"
	case f.Index == f.Worktree:
		return string(f.Index)
	case f.Worktree == types.GitChangeUnmodified:
		return string(f.Index) + " (staged)"
	case f.Index == types.GitChangeUnmodified:
		return string(f.Worktree)
	}
	return fmt.Sprintf("%s (staged), %s", f.Index, f.Worktree)
}

func renamedFrom(path string) string {
	if path == "" {
		return ""
	}
	return "from " + path
}

func (a *app) gitDiffCommand() *cobra.Command {
	var o client.GitDiffOptions
	cmd := &cobra.Command{
		Use:   "diff SANDBOX DIR [FILE...]",
		Short: "Print changes that are not committed, or between two commits",
		Long: `Print the changes that are not staged; with --staged those that are, with --from the
changes since a branch, tag or commit, and with --to, too, those between both. The
first 10 MiB are printed.`,
		Args:              wants(2, -1),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			o.Files, o.MaxBytes = args[2:], 10<<20
			diff, err := node.GitDiff(ctx, args[0], args[1], o)
			if err != nil || a.json {
				return a.print(err, diff, "")
			}
			patch, err := diff.PatchEncoding.Decode(diff.Patch)
			if err != nil {
				return err
			}
			if isTerminal(a.out) {
				err = indent(a.out, "", string(patch))
			} else {
				_, err = a.out.Write(patch)
			}
			if err == nil && diff.Truncated {
				err = fmt.Errorf("the difference is larger than 10 MiB; name files, or use doze exec %s -- git -C %s diff", args[0], args[1])
			}
			return err
		}),
	}
	f := cmd.Flags()
	f.BoolVar(&o.Staged, "staged", false, "the staged changes")
	f.StringVar(&o.From, "from", "", "branch, tag or commit to compare with the working tree")
	f.StringVar(&o.To, "to", "", "with --from: branch, tag or commit to compare it with")
	return cmd
}

func (a *app) gitLogCommand() *cobra.Command {
	var ref string
	var limit int
	cmd := &cobra.Command{
		Use:               "log SANDBOX DIR [FILE...]",
		Short:             "List commits, newest first",
		Args:              wants(2, -1),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			history, err := node.GitLog(ctx, args[0], args[1], ref, limit, args[2:]...)
			if err != nil || a.json {
				return a.print(err, history, "")
			}
			return printTable(a, "commits", history.Commits, []any{"COMMIT", "DATE", "AUTHOR", "MESSAGE"}, func(c types.GitCommit) []any {
				subject, _, _ := strings.Cut(c.Message, "\n")
				return []any{shortHash(c.Commit), c.CommittedAt.Local().Format(time.DateOnly), c.Author.Name, subject}
			})
		}),
	}
	cmd.Flags().StringVar(&ref, "ref", "", "branch, tag or commit (default the one that is checked out)")
	cmd.Flags().IntVarP(&limit, "limit", "n", 20, "number of commits, at most 1000")
	return cmd
}

func (a *app) gitBranchesCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "branches SANDBOX DIR",
		Short:             "List branches, and branches of remotes as last fetched",
		Args:              wants(2, 2),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			list, err := node.GitBranches(ctx, args[0], args[1])
			if err != nil || a.json {
				return a.print(err, list, "")
			}
			return printTable(a, "branches", list.Branches, []any{"BRANCH", "COMMIT", "UPSTREAM", "CURRENT"}, func(b types.GitBranch) []any {
				current := ""
				if b.Current {
					current = "yes"
				}
				return []any{b.Name, shortHash(b.Commit), b.Upstream, current}
			})
		}),
	}
}

func (a *app) gitCheckoutCommand() *cobra.Command {
	var req types.GitCheckoutRequest
	cmd := &cobra.Command{
		Use:               "checkout SANDBOX DIR REF [START]",
		Short:             "Switch to a branch, tag or commit",
		Example:           "  doze git checkout shop /srv/shop v1.2\n  doze git checkout --create shop /srv/shop cart origin/main",
		Args:              wants(3, 4),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			if req.Path, req.Ref = args[1], args[2]; len(args) > 3 {
				if !req.Create {
					return usage.Errorf("START is where a new branch starts; add --create")
				}
				req.StartPoint = args[3]
			}
			head, err := node.GitCheckout(ctx, args[0], req)
			return a.printHead(head, err)
		}),
	}
	cmd.Flags().BoolVarP(&req.Create, "create", "b", false, "create the branch REF, at START or at the commit that is checked out")
	cmd.Flags().BoolVarP(&req.Force, "force", "f", false, "discard changes that are not committed")
	return cmd
}

func (a *app) gitCommitCommand() *cobra.Command {
	var req types.GitCommitRequest
	var author types.GitIdentity
	cmd := &cobra.Command{
		Use:               "commit SANDBOX DIR [FILE...]",
		Short:             "Commit the staged changes, and files that are given",
		Example:           `  doze git commit --all -m "Add the cart" --name "Shop agent" --email agent@example.com shop /srv/shop`,
		Args:              wants(2, -1),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			switch req.Path, req.Files = args[1], args[2:]; {
			case req.Message == "":
				return usage.Errorf("no message given; add -m MESSAGE")
			case (author.Name == "") != (author.Email == ""):
				return usage.Errorf("--name and --email belong together; give both")
			case req.All && len(req.Files) > 0:
				return usage.Errorf("--all and files exclude each other; give one of them")
			}
			if author != (types.GitIdentity{}) {
				req.Author = &author
			}
			head, err := node.GitCommit(ctx, args[0], req)
			return a.printHead(head, err)
		}),
	}
	f := cmd.Flags()
	f.StringVarP(&req.Message, "message", "m", "", "message of the commit")
	f.BoolVarP(&req.All, "all", "a", false, "stage all changes first, including new and deleted files")
	f.StringVar(&author.Name, "name", "", "name of the author (default git's configuration)")
	f.StringVar(&author.Email, "email", "", "email address of the author (default git's configuration)")
	f.BoolVar(&req.Amend, "amend", false, "replace the last commit")
	f.BoolVar(&req.AllowEmpty, "allow-empty", false, "commit even if nothing has changed")
	return cmd
}

// gitRemoteCommand is a command that works with a remote of the working tree DIR, and prints
// the result.
func gitRemoteCommand[T any](a *app, name, short string, run func(ctx context.Context, node *client.Client, sandbox, dir string) (T, error), print func(T, error) error) *cobra.Command {
	return &cobra.Command{
		Use:               name + " SANDBOX DIR",
		Short:             short,
		Args:              wants(2, 2),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			done := a.waiting(args[0] + ": git " + name)
			result, err := run(ctx, node, args[0], args[1])
			done()
			return print(result, err)
		}),
	}
}

func (a *app) gitPushCommand() *cobra.Command {
	var req types.GitPushRequest
	cmd := gitRemoteCommand(a, "push", "Push a branch to the branch of the same name",
		func(ctx context.Context, node *client.Client, sandbox, dir string) (types.GitPushResult, error) {
			req.Path = dir
			return node.GitPush(ctx, sandbox, req)
		}, func(result types.GitPushResult, err error) error {
			if err != nil || a.json {
				return a.print(err, result, "")
			}
			t := newTable(a.out)
			for _, ref := range result.Refs {
				t.row(result.Remote, ref.Ref, ref.Status, ref.Summary)
			}
			return t.flush()
		})
	f := cmd.Flags()
	f.StringVar(&req.Remote, "remote", "", "name of the remote (default origin)")
	f.StringVarP(&req.Branch, "branch", "b", "", "branch to push (default the one that is checked out)")
	f.BoolVarP(&req.SetUpstream, "set-upstream", "u", false, "make the remote branch the upstream of the branch")
	f.BoolVarP(&req.Force, "force", "f", false, "replace commits of the remote branch that were fetched before")
	gitTimeout(cmd, &req.Timeout)
	return cmd
}

func (a *app) gitPullCommand() *cobra.Command {
	var req types.GitPullRequest
	cmd := gitRemoteCommand(a, "pull", "Fetch a branch and fast-forward to it",
		func(ctx context.Context, node *client.Client, sandbox, dir string) (types.GitHead, error) {
			req.Path = dir
			return node.GitPull(ctx, sandbox, req)
		}, a.printHead)
	f := cmd.Flags()
	f.StringVar(&req.Remote, "remote", "", "name of the remote (default the upstream's)")
	f.StringVarP(&req.Branch, "branch", "b", "", "with --remote: the remote's branch (default the upstream)")
	gitTimeout(cmd, &req.Timeout)
	return cmd
}
