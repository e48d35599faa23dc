package api

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/git"
	"github.com/doze-run/doze/runtime/sandbox"
)

// progressInterval is the minimum time between two events of one phase of a clone, except
// for the last.
const progressInterval = 100 * time.Millisecond

// gitSlots is how many calls a route counts as that reads up to 4 MiB of git's output.
const gitSlots = 4

// RepositoryPath is the part of a request's input that names a working tree.
type RepositoryPath struct {
	Path string `query:"path" required:"true" maxLength:"4096" doc:"Absolute path of the working tree"`
}

type gitStatusInput struct {
	SandboxPath
	RepositoryPath
}

type gitDiffInput struct {
	SandboxPath
	RepositoryPath
	Staged   bool     `query:"staged" doc:"Compare the staged changes with the commit; default: what is not staged"`
	From     string   `query:"from" maxLength:"1024" doc:"Branch, tag or commit to compare with the working tree, or with to"`
	To       string   `query:"to" maxLength:"1024" doc:"With from: branch, tag or commit to compare it with"`
	Files    []string `query:"file,explode" maxItems:"100" doc:"Only this file or directory, relative to path; may be repeated"`
	MaxBytes int      `query:"max_bytes" minimum:"1" maximum:"10485760" default:"1048576" doc:"Maximum number of bytes to return of the patch"`
}

type gitLogInput struct {
	SandboxPath
	RepositoryPath
	Ref   string   `query:"ref" maxLength:"1024" doc:"Branch, tag or commit; default: what is checked out"`
	Max   int      `query:"max_commits" minimum:"1" maximum:"1000" default:"50" doc:"Maximum number of commits"`
	Files []string `query:"file,explode" maxItems:"100" doc:"Only commits that change this file or directory, relative to path; may be repeated"`
}

func (a *API) registerGit() {
	registerBody(a, gitRoute(route{
		method: http.MethodPost, id: "clone", summary: "Clone a repository",
		description: "A clone that fails, is canceled or times out leaves nothing behind. Credentials are never part of the address: " +
			"rules with the policy basic add them on the way out.",
		codes:     slices.Concat(gitTransferCodes, []problem.Code{problem.PathExists, problem.StreamLimitExceeded, problem.ShellNotFound}),
		responses: map[int]*huma.Response{http.StatusOK: responseJSON[types.GitHead](a, "The commit that is checked out; or with stream: events while git runs")},
		events:    map[string]any{"progress": types.GitProgress{}, "complete": types.GitHead{}},
	}), a.gitClone)
	register(a, gitRoute(route{
		method: http.MethodGet, id: "status", summary: "Get what is checked out, and which files differ from it",
		description: "Never connects to a server.",
	}), a.gitStatus)
	register(a, gitRoute(route{method: http.MethodGet, id: "diff", summary: "Compare the working tree, the staged changes or two commits"}), a.gitDiff)
	register(a, gitRoute(route{method: http.MethodGet, id: "log", summary: "List commits, newest first"}), a.gitLog)
	register(a, gitRoute(route{
		method: http.MethodGet, id: "branches", summary: "List branches",
		description: "Never connects to a server: branches of remotes are as last fetched.",
	}), a.gitBranches)
	registerBody(a, gitRoute(route{
		method: http.MethodPost, id: "checkout", summary: "Switch to a branch, tag or commit",
		description: "Responds with the commit that is checked out then.",
		codes:       []problem.Code{problem.GitConflict},
	}), a.gitCheckout)
	registerBody(a, gitRoute(route{method: http.MethodPost, id: "add", status: http.StatusNoContent, summary: "Stage changes"}), a.gitAdd)
	registerBody(a, gitRoute(route{
		method: http.MethodPost, id: "commit", summary: "Commit the staged changes", description: "Hooks of the repository run.",
		codes: []problem.Code{problem.GitConflict, problem.GitChangesRequired, problem.GitAuthorRequired},
	}), a.gitCommit)
	registerBody(a, gitRoute(route{
		method: http.MethodPost, id: "push", summary: "Push a branch to the branch of the same name",
		description: "Rules with the policy basic add credentials.",
		codes:       slices.Concat(gitTransferCodes, []problem.Code{problem.GitConflict, problem.GitPushDenied}),
	}), a.gitPush)
	registerBody(a, gitRoute(route{
		method: http.MethodPost, id: "pull", summary: "Fetch a branch and fast-forward to it",
		description: "Never merges: diverged branches are git_conflict. Responds with the commit that is checked out then.",
		codes:       slices.Concat(gitTransferCodes, []problem.Code{problem.GitConflict}),
	}), a.gitPull)
}

// gitRoute completes a route whose id is the last part of its path.
func gitRoute(rt route) route {
	rt.path, rt.id, rt.tag = "/sandbox/{id}/git/"+rt.id, "git-"+rt.id, "git"
	rt.description = strings.TrimSpace("Wakes the sandbox. " + rt.description)
	rt.codes = slices.Concat(gitCodes, rt.codes)
	return rt
}

// gitTimeout returns the timeout of a request; byDefault is the default.
func gitTimeout(timeout *types.Duration, byDefault time.Duration) (time.Duration, error) {
	if timeout == nil {
		return byDefault, nil
	}
	if time.Duration(*timeout) > maxExecTimeout {
		return 0, invalid("body.timeout", "longer than 24h", "use at most 24h, or run git as a background process: POST …/process")
	}
	return time.Duration(*timeout), nil
}

// checkGit returns the fault of the first field that is set and that its check refuses.
func checkGit(fields ...gitField) error {
	for _, f := range fields {
		if f.value == "" {
			continue
		}
		if err := f.check(f.value); err != nil {
			message, want, _ := strings.Cut(err.Error(), "; ")
			return invalid(f.location, message, want)
		}
	}
	return nil
}

type gitField struct {
	location, value string
	check           func(string) error
}

// checkFiles refuses paths that git cannot have, before the sandbox is woken for them.
func checkFiles(location string, files []string) error {
	total := 0
	for i, file := range files {
		if total += len(file); file == "" || len(file) > maxPath || strings.ContainsRune(file, 0) || total > maxJSON {
			return invalid(location+"["+strconv.Itoa(i)+"]", "not a path", "send 1 to 4,096 bytes without a NUL byte, relative to path")
		}
	}
	return nil
}

// cloneOptionsOf checks and converts a request to clone.
func cloneOptionsOf(b *types.GitCloneRequest) (git.CloneOptions, error) {
	o := git.CloneOptions{URL: b.URL, Branch: b.Branch, Tag: b.Tag, Commit: b.Commit, Dir: b.TargetDir, Depth: b.Depth, Submodules: b.Submodules}
	err := checkGit(gitField{"body.url", cmp.Or(b.URL, "-"), git.CheckURL}, gitField{"body.branch", b.Branch, git.CheckBranch},
		gitField{"body.tag", b.Tag, git.CheckBranch}, gitField{"body.commit", b.Commit, git.CheckCommit})
	if err != nil {
		return o, err
	}
	if b.Branch != "" && b.Tag != "" || b.Branch != "" && b.Commit != "" || b.Tag != "" && b.Commit != "" {
		return o, invalid("body", "more than one of branch, tag and commit", "send at most one of them")
	}
	if b.TargetDir == "" {
		if git.DirectoryName(b.URL) == "" {
			return o, invalid("body.target_dir", "missing, and the address ends with no name for a directory", "send an absolute path such as /workspace/shop")
		}
		return o, nil
	}
	return o, checkPath("body.target_dir", b.TargetDir)
}

func (a *API) gitClone(ctx context.Context, in *sandboxExchange, body *types.GitCloneRequest) (*huma.StreamResponse, error) {
	options, err := cloneOptionsOf(body)
	if err != nil {
		return nil, err
	}
	byDefault, limit := bufferedTimeout, &a.calls
	if body.Stream {
		byDefault, limit = 0, &a.streams
	}
	timeout, err := gitTimeout(body.Timeout, byDefault)
	if err != nil {
		return nil, err
	}
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	if err := limit.acquire(ctx, 1); err != nil {
		return nil, err
	}
	lease, err := a.cfg.Sandboxes.Acquire(ctx, sb.ID, sandbox.CauseExec)
	if err != nil {
		return nil, err
	}
	clone := func(ctx context.Context, progress func(git.Progress)) (types.GitHead, error) {
		head, err := git.New(lease.Guest(), timeout).Clone(ctx, options, progress)
		return types.GitHead(head), a.fromGit(ctx, sb.ID, err, options.URL)
	}
	if body.Stream {
		return &huma.StreamResponse{Body: func(huma.Context) {
			defer lease.Release()
			a.serveEvents(in.Exchange, func(s *eventStream) {
				progress := progressStream{s: s}
				head, err := clone(s.ctx, progress.send)
				if err != nil {
					s.fail(err)
					return
				}
				s.send("complete", "", head)
			})
		}}, nil
	}
	defer lease.Release()
	head, err := clone(ctx, nil)
	if err != nil {
		return nil, err
	}
	return jsonResponse(in.Exchange, head), nil
}

// progressStream sends progress as events, not more than a client can show.
type progressStream struct {
	s    *eventStream
	last git.Progress
	sent time.Time
}

func (p *progressStream) send(progress git.Progress) {
	finished := progress.Total > 0 && progress.Done == progress.Total
	if progress.Phase == p.last.Phase && progress.Submodule == p.last.Submodule && !finished && time.Since(p.sent) < progressInterval {
		return
	}
	p.last, p.sent = progress, time.Now()
	p.s.send("progress", "", types.GitProgress{
		Phase: types.GitPhase(progress.Phase), Done: progress.Done, Total: progress.Total, Bytes: progress.Bytes,
		Submodule: validText(progress.Submodule, maxPath),
	})
}

// withGit wakes the sandbox, runs do with its git, and responds with the result. The request
// counts as slots calls.
func withGit[T any](ctx context.Context, a *API, idOrName string, slots int64, timeout time.Duration, do func(*git.Git) (T, error)) (*output[T], error) {
	sb, err := a.lookup(ctx, idOrName)
	if err != nil {
		return nil, err
	}
	if err := a.calls.acquire(ctx, slots); err != nil {
		return nil, err
	}
	lease, err := a.cfg.Sandboxes.Acquire(ctx, sb.ID, sandbox.CauseExec)
	if err != nil {
		return nil, err
	}
	defer lease.Release()
	result, err := do(git.New(lease.Guest(), timeout))
	return &output[T]{result}, a.fromGit(ctx, sb.ID, err, "")
}

func (a *API) gitStatus(ctx context.Context, in *gitStatusInput) (*output[types.GitStatus], error) {
	if err := checkPath("query.path", in.Path); err != nil {
		return nil, err
	}
	return withGit(ctx, a, in.ID, gitSlots, bufferedTimeout, func(g *git.Git) (types.GitStatus, error) {
		s, err := g.Status(ctx, in.Path)
		return types.GitStatus{
			GitHead: types.GitHead(s.Head), Upstream: s.Upstream, Ahead: s.Ahead, Behind: s.Behind,
			Clean: len(s.Files) == 0, Files: listOf(s.Files, gitFileOf), Truncated: s.Truncated,
		}, err
	})
}

func gitFileOf(f git.File) types.GitFile {
	return types.GitFile{
		Path: f.Path, OriginalPath: f.OriginalPath, Index: types.GitChange(f.Index), Worktree: types.GitChange(f.Worktree),
		Conflict: types.GitConflict(f.Conflict), Submodule: f.Submodule,
	}
}

func (a *API) gitDiff(ctx context.Context, in *gitDiffInput) (*output[types.GitDiff], error) {
	err := cmp.Or(checkPath("query.path", in.Path), checkFiles("query.file", in.Files),
		checkGit(gitField{"query.from", in.From, git.CheckRevision}, gitField{"query.to", in.To, git.CheckRevision}))
	switch {
	case err != nil:
		return nil, err
	case in.To != "" && in.From == "":
		return nil, invalid("query.to", "given without from", "send from, too")
	case in.To != "" && in.Staged:
		return nil, invalid("query.staged", "given with to", "send at most one of them")
	}
	return withGit(ctx, a, in.ID, gitSlots+execSlots(in.MaxBytes), bufferedTimeout, func(g *git.Git) (types.GitDiff, error) {
		d, err := g.Diff(ctx, in.Path, git.DiffOptions{Staged: in.Staged, From: in.From, To: in.To, Files: in.Files, Limit: in.MaxBytes})
		patch := capture{bytes: d.Patch, truncated: d.Truncated}
		diff := types.GitDiff{Files: listOf(d.Files, gitDiffFileOf), Truncated: d.Truncated}
		diff.Patch, diff.PatchEncoding = patch.text()
		return diff, err
	})
}

func gitDiffFileOf(f git.DiffFile) types.GitDiffFile {
	return types.GitDiffFile{Path: f.Path, OriginalPath: f.OriginalPath, Binary: f.Binary, LinesAdded: f.Added, LinesDeleted: f.Deleted}
}

func (a *API) gitLog(ctx context.Context, in *gitLogInput) (*output[types.GitLog], error) {
	if err := cmp.Or(checkPath("query.path", in.Path), checkFiles("query.file", in.Files), checkGit(gitField{"query.ref", in.Ref, git.CheckRevision})); err != nil {
		return nil, err
	}
	return withGit(ctx, a, in.ID, gitSlots, bufferedTimeout, func(g *git.Git) (types.GitLog, error) {
		commits, more, err := g.Log(ctx, in.Path, in.Ref, in.Max, in.Files)
		return types.GitLog{Commits: listOf(commits, gitCommitOf), Truncated: more}, err
	})
}

func gitCommitOf(c git.Commit) types.GitCommit {
	return types.GitCommit{
		Commit: c.Hash, Parents: append([]string{}, c.Parents...), Author: types.GitIdentity(c.Author), AuthoredAt: c.AuthoredAt,
		Committer: types.GitIdentity(c.Committer), CommittedAt: c.CommittedAt, Message: c.Message,
	}
}

func (a *API) gitBranches(ctx context.Context, in *gitStatusInput) (*output[types.GitBranchList], error) {
	if err := checkPath("query.path", in.Path); err != nil {
		return nil, err
	}
	return withGit(ctx, a, in.ID, gitSlots, bufferedTimeout, func(g *git.Git) (types.GitBranchList, error) {
		branches, more, err := g.Branches(ctx, in.Path)
		return types.GitBranchList{Branches: listOf(branches, gitBranchOf), Truncated: more}, err
	})
}

func gitBranchOf(b git.Branch) types.GitBranch {
	return types.GitBranch{Name: b.Name, Remote: b.Remote, Current: b.Current, Commit: b.Commit, Upstream: b.Upstream}
}

// gitHeadOf converts the result of a call that returns what is checked out.
func gitHeadOf(head git.Head, err error) (types.GitHead, error) { return types.GitHead(head), err }

func (a *API) gitCheckout(ctx context.Context, in *SandboxPath, body *types.GitCheckoutRequest) (*output[types.GitHead], error) {
	check := git.CheckRevision
	if body.Create {
		check = git.CheckBranch
	} else if body.StartPoint != "" {
		return nil, invalid("body.start_point", "given without create", "send create, too, or only ref")
	}
	err := cmp.Or(checkPath("body.path", body.Path), checkGit(gitField{"body.ref", cmp.Or(body.Ref, "-"), check}, gitField{"body.start_point", body.StartPoint, git.CheckRevision}))
	if err != nil {
		return nil, err
	}
	return withGit(ctx, a, in.ID, 1, bufferedTimeout, func(g *git.Git) (types.GitHead, error) {
		return gitHeadOf(g.Checkout(ctx, body.Path, git.CheckoutOptions{Ref: body.Ref, Create: body.Create, Start: body.StartPoint, Force: body.Force}))
	})
}

func (a *API) gitAdd(ctx context.Context, in *SandboxPath, body *types.GitAddRequest) (*struct{}, error) {
	if err := cmp.Or(checkPath("body.path", body.Path), checkFiles("body.files", body.Files)); err != nil {
		return nil, err
	}
	_, err := withGit(ctx, a, in.ID, 1, bufferedTimeout, func(g *git.Git) (struct{}, error) { return struct{}{}, g.Add(ctx, body.Path, body.Files) })
	return nil, err
}

func (a *API) gitCommit(ctx context.Context, in *SandboxPath, body *types.GitCommitRequest) (*output[types.GitHead], error) {
	options := git.CommitOptions{Message: body.Message, Amend: body.Amend, AllowEmpty: body.AllowEmpty}
	err := cmp.Or(checkPath("body.path", body.Path), checkFiles("body.files", body.Files))
	if body.Author != nil {
		options.Author = git.Identity(*body.Author)
		err = cmp.Or(err, checkGit(gitField{"body.author.name", options.Author.Name, git.CheckIdentity}, gitField{"body.author.email", options.Author.Email, git.CheckIdentity}))
	}
	switch {
	case err != nil:
		return nil, err
	case body.All && len(body.Files) > 0:
		return nil, invalid("body.files", "given with all", "send at most one of them")
	case strings.TrimSpace(body.Message) == "" || strings.ContainsRune(body.Message, 0):
		return nil, invalid("body.message", "empty, or has a NUL byte", "send a text")
	}
	return withGit(ctx, a, in.ID, 1, bufferedTimeout, func(g *git.Git) (types.GitHead, error) {
		if body.All || len(body.Files) > 0 {
			if err := g.Add(ctx, body.Path, body.Files); err != nil {
				return types.GitHead{}, err
			}
		}
		return gitHeadOf(g.Commit(ctx, body.Path, options))
	})
}

func (a *API) gitPush(ctx context.Context, in *SandboxPath, body *types.GitPushRequest) (*output[types.GitPushResult], error) {
	remote := cmp.Or(body.Remote, "origin")
	timeout, err := gitTimeout(body.Timeout, bufferedTimeout)
	err = cmp.Or(err, checkPath("body.path", body.Path), checkGit(gitField{"body.remote", remote, git.CheckRemote}, gitField{"body.branch", body.Branch, git.CheckBranch}))
	if err != nil {
		return nil, err
	}
	return withGit(ctx, a, in.ID, 1, timeout, func(g *git.Git) (types.GitPushResult, error) {
		refs, err := g.Push(ctx, body.Path, git.PushOptions{Remote: remote, Branch: body.Branch, SetUpstream: body.SetUpstream, Force: body.Force})
		return types.GitPushResult{Remote: remote, Refs: listOf(refs, gitPushedRefOf)}, err
	})
}

func gitPushedRefOf(r git.PushedRef) types.GitPushedRef {
	return types.GitPushedRef{Ref: r.Ref, Status: types.GitPushStatus(r.Status), Summary: r.Summary}
}

func (a *API) gitPull(ctx context.Context, in *SandboxPath, body *types.GitPullRequest) (*output[types.GitHead], error) {
	timeout, err := gitTimeout(body.Timeout, bufferedTimeout)
	err = cmp.Or(err, checkPath("body.path", body.Path), checkGit(gitField{"body.remote", body.Remote, git.CheckRemote}, gitField{"body.branch", body.Branch, git.CheckBranch}))
	if err == nil && body.Branch != "" && body.Remote == "" {
		err = invalid("body.branch", "given without remote", "send remote, too, such as origin")
	}
	if err != nil {
		return nil, err
	}
	return withGit(ctx, a, in.ID, 1, timeout, func(g *git.Git) (types.GitHead, error) {
		return gitHeadOf(g.Pull(ctx, body.Path, body.Remote, body.Branch))
	})
}
