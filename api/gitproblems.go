package api

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/git"
	"github.com/doze-run/doze/runtime/sandbox"
)

// gitCodes are the codes of all routes for git. Routes that connect to a server have
// gitTransferCodes, too.
var (
	gitCodes = slices.Concat(wakeCodes, []problem.Code{problem.GitNotInstalled, problem.GitTimeout, problem.GitFailed, problem.GitPathInvalid,
		problem.GitRefNotFound, problem.GitBusy, problem.PathNotFound, problem.PathNotDirectory, problem.PathNotPermitted, problem.CommandNotExecutable,
		problem.SandboxDiskFull, problem.RequestTooLarge, problem.ProcessLimitExceeded, problem.CallLimitExceeded})
	gitTransferCodes = []problem.Code{problem.GitAuthenticationFailed, problem.GitRepositoryNotFound, problem.GitNetworkFailed, problem.EgressDenied}
)

// gitProblems are the codes of the failures of git, each with a remedy.
var gitProblems = map[git.Reason]struct {
	code   problem.Code
	remedy string
}{
	git.Failed:               {problem.GitFailed, ""},
	git.NotInstalled:         {problem.GitNotInstalled, "install the package git of its distribution, or use the image base"},
	git.TimedOut:             {problem.GitTimeout, "use a longer timeout, or a smaller depth"},
	git.AuthenticationFailed: {problem.GitAuthenticationFailed, "let a rule add the credential with the policy basic, and check that the repository exists"},
	git.RepositoryNotFound:   {problem.GitRepositoryNotFound, "check the address, and that the credential may read it"},
	git.NetworkFailed:        {problem.GitNetworkFailed, "try again; the sandbox's flows have the connections"},
	git.RefNotFound:          {problem.GitRefNotFound, "check the name, and whether it was fetched"},
	git.PathNotFound:         {problem.PathNotFound, "paths are relative to path"},
	git.TargetExists:         {problem.PathExists, "use another target_dir, or delete this one first"},
	git.NotRepository:        {problem.GitPathInvalid, "send the path of a working tree"},
	git.DiskFull:             {problem.SandboxDiskFull, "free disk space in the sandbox"},
	git.IdentityMissing:      {problem.GitAuthorRequired, "send author, or configure user.name and user.email"},
	git.NothingToCommit:      {problem.GitChangesRequired, "use all or files to stage changes"},
	git.Conflict:             {problem.GitConflict, "commit or discard the changes, and try again"},
	git.PushConflict:         {problem.GitConflict, "pull first, or use force"},
	git.PushDenied:           {problem.GitPushDenied, "push another branch, or ask the server's administrator"},
	git.Locked:               {problem.GitBusy, "try again; delete the lock file if no git process runs"},
}

// fromGit returns the error of a call of git as a problem. The address is the server's,
// unless git's message names another.
func (a *API) fromGit(ctx context.Context, id sandbox.ID, err error, address string) error {
	failed, ok := errors.AsType[*git.Error](err)
	if !ok {
		return fromGuest(err)
	}
	switch failed.Reason {
	case git.AuthenticationFailed, git.NetworkFailed, git.RepositoryNotFound:
		service := "git-upload-pack"
		if failed.Push {
			service = "git-receive-pack"
		}
		if p := a.deniedGit(ctx, id, cmp.Or(failed.URL, address), service); p != nil {
			return p
		}
	}
	p := gitProblems[failed.Reason]
	detail := validText(failed.Error(), maxGuestMessage)
	if p.remedy != "" {
		detail += "; " + p.remedy
	}
	if failed.Leftover != "" {
		detail += "; failed to delete the incomplete clone in " + failed.Leftover
	}
	return problem.New(p.code, detail)
}

// deniedGit returns the problem of rules that deny the requests of a service of git to an
// address, or nil.
// https://git-scm.com/docs/http-protocol has the requests.
func (a *API) deniedGit(ctx context.Context, id sandbox.ID, address, service string) *problem.Problem {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || isLoopback(u.Hostname()) {
		return nil
	}
	u.User = nil
	for _, request := range []struct{ method, path string }{{http.MethodGet, "info/refs?service=" + service}, {http.MethodPost, service}} {
		e, err := a.cfg.Egress.Explain(ctx, id, request.method, strings.TrimSuffix(u.String(), "/")+"/"+request.path, nil)
		if err == nil && e.Verdict == rule.VerdictDeny {
			return problem.Newf(problem.EgressDenied, "rules deny git's requests to %s: %s; allow the host with a rule", u.Hostname(), e.Reason).
				WithFlow(u.Hostname(), e.Rule, "")
		}
	}
	return nil
}

// isLoopback reports whether a host is the sandbox itself, which rules do not apply to.
func isLoopback(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}
