package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"

	"github.com/doze-run/doze/api/types"
)

// CloneRepository wakes the sandbox and clones a repository. With progress, which may be nil,
// the timeout of the request has no default. When ctx ends first, the node kills git and deletes
// the incomplete clone.
func (c *Client) CloneRepository(ctx context.Context, idOrName string, req types.GitCloneRequest, progress func(types.GitProgress)) (types.GitHead, error) {
	req.Stream = progress != nil
	return fetchProgress[types.GitHead](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "git", "clone"), body: req}, progress)
}

// GitStatus returns the commit that is checked out in a working tree, and the files that
// differ from it.
func (c *Client) GitStatus(ctx context.Context, idOrName, path string) (types.GitStatus, error) {
	return fetch[types.GitStatus](ctx, c, request{path: sandboxPath(idOrName, "git", "status"), query: pathQuery(path)})
}

// GitDiffOptions select the two states that GitDiff compares. The zero value compares the
// working tree with the staged changes.
type GitDiffOptions struct {
	Staged   bool     // the staged changes with the commit
	From, To string   // a branch, tag or commit with another, or with the working tree
	Files    []string // only these, relative to the working tree
	MaxBytes int      // of the patch; 0 means the node's default
}

// GitDiff compares two states of a working tree.
func (c *Client) GitDiff(ctx context.Context, idOrName, path string, o GitDiffOptions) (types.GitDiff, error) {
	query := pathQuery(path)
	if o.Staged {
		query.Set("staged", "true")
	}
	for name, value := range map[string]string{"from": o.From, "to": o.To} {
		if value != "" {
			query.Set(name, value)
		}
	}
	if o.MaxBytes > 0 {
		query.Set("max_bytes", strconv.Itoa(o.MaxBytes))
	}
	addFiles(query, o.Files)
	return fetch[types.GitDiff](ctx, c, request{path: sandboxPath(idOrName, "git", "diff"), query: query})
}

// GitLog returns the last commits of a branch, tag or commit, or of what is checked out if
// ref is empty. With files it returns the commits that change them.
func (c *Client) GitLog(ctx context.Context, idOrName, path, ref string, limit int, files ...string) (types.GitLog, error) {
	query := pathQuery(path)
	if ref != "" {
		query.Set("ref", ref)
	}
	if limit > 0 {
		query.Set("max_commits", strconv.Itoa(limit))
	}
	addFiles(query, files)
	return fetch[types.GitLog](ctx, c, request{path: sandboxPath(idOrName, "git", "log"), query: query})
}

func addFiles(query url.Values, files []string) {
	for _, file := range files {
		query.Add("file", file)
	}
}

// GitBranches returns the local branches, and the branches of remotes as last fetched.
func (c *Client) GitBranches(ctx context.Context, idOrName, path string) (types.GitBranchList, error) {
	return fetch[types.GitBranchList](ctx, c, request{path: sandboxPath(idOrName, "git", "branches"), query: pathQuery(path)})
}

// GitCheckout switches to a branch, tag or commit.
func (c *Client) GitCheckout(ctx context.Context, idOrName string, req types.GitCheckoutRequest) (types.GitHead, error) {
	return fetch[types.GitHead](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "git", "checkout"), body: req})
}

// GitAdd stages changes.
func (c *Client) GitAdd(ctx context.Context, idOrName string, req types.GitAddRequest) error {
	_, err := c.call(ctx, request{method: http.MethodPost, path: sandboxPath(idOrName, "git", "add"), body: req}, nil)
	return err
}

// GitCommit commits the staged changes.
func (c *Client) GitCommit(ctx context.Context, idOrName string, req types.GitCommitRequest) (types.GitHead, error) {
	return fetch[types.GitHead](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "git", "commit"), body: req})
}

// GitPush pushes a branch to the branch of the same name.
func (c *Client) GitPush(ctx context.Context, idOrName string, req types.GitPushRequest) (types.GitPushResult, error) {
	return fetch[types.GitPushResult](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "git", "push"), body: req})
}

// GitPull fetches a branch and fast-forwards to it.
func (c *Client) GitPull(ctx context.Context, idOrName string, req types.GitPullRequest) (types.GitHead, error) {
	return fetch[types.GitHead](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "git", "pull"), body: req})
}
