package git

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// CheckoutOptions are valid by CheckBranch, if Create is set, or CheckRevision.
type CheckoutOptions struct {
	Ref    string // branch, tag or commit; a branch of a remote alone is created locally
	Create bool   // create the branch Ref at Start
	Start  string // default: HEAD
	Force  bool   // discard local changes
}

// Checkout switches to a branch, tag or commit.
func (g *Git) Checkout(ctx context.Context, dir string, o CheckoutOptions) (Head, error) {
	args := []string{"-c", "advice.detachedHead=false", "checkout", "--progress"}
	if o.Force {
		args = append(args, "--force")
	}
	if o.Create {
		args = append(args, "-b", o.Ref)
	}
	if ref := o.Ref; !o.Create {
		args = append(args, ref)
	} else if o.Start != "" {
		args = append(args, o.Start)
	}
	if _, err := g.run(ctx, command{dir: dir, limit: maxSmall, args: append(args, "--")}); err != nil {
		return Head{}, err
	}
	return g.head(ctx, dir)
}

// Add stages files; without files all changes, including new and deleted files.
func (g *Git) Add(ctx context.Context, dir string, files []string) error {
	c := command{dir: dir, limit: maxSmall, args: append([]string{"add", "--all", "--"}, files...), env: literalPaths}
	if len(files) == 0 {
		c.args, c.env = append(c.args, ":/"), nil // the top of the working tree
	}
	_, err := g.run(ctx, c)
	return err
}

// Identity is the author and committer of a commit.
type Identity struct{ Name, Email string }

// CommitOptions describe a commit.
type CommitOptions struct {
	Message string
	// Author replaces the identity of git's configuration, unless it is zero.
	Author     Identity
	Amend      bool // replace the last commit
	AllowEmpty bool // also without a change
}

// Commit commits the staged changes.
func (g *Git) Commit(ctx context.Context, dir string, o CommitOptions) (Head, error) {
	args := []string{"commit", "--quiet", "--file=-"}
	if o.Amend {
		args = append(args, "--amend")
	}
	if o.AllowEmpty {
		args = append(args, "--allow-empty")
	}
	var env map[string]string
	if o.Author != (Identity{}) {
		env = map[string]string{
			"GIT_AUTHOR_NAME": o.Author.Name, "GIT_AUTHOR_EMAIL": o.Author.Email,
			"GIT_COMMITTER_NAME": o.Author.Name, "GIT_COMMITTER_EMAIL": o.Author.Email,
		}
	}
	if _, err := g.run(ctx, command{dir: dir, limit: maxSmall, args: args, env: env, stdin: []byte(o.Message)}); err != nil {
		return Head{}, err
	}
	return g.head(ctx, dir)
}

// PushOptions are valid by CheckRemote and CheckBranch.
type PushOptions struct {
	Remote      string
	Branch      string // default: the branch that is checked out
	SetUpstream bool
	// Force replaces commits of the remote branch, unless it has some that were not fetched.
	Force bool
}

// PushedRef is a ref of the remote after a push.
type PushedRef struct {
	Ref     string // such as refs/heads/main
	Status  PushStatus
	Summary string // git's description
}

// PushStatus is what a push did to a ref.
type PushStatus string

const (
	PushUpdated  PushStatus = "updated"
	PushForced   PushStatus = "forced"
	PushCreated  PushStatus = "created"
	PushDeleted  PushStatus = "deleted"
	PushUpToDate PushStatus = "up_to_date"
)

// pushes by git's flags.
var pushes = map[byte]PushStatus{' ': PushUpdated, '+': PushForced, '*': PushCreated, '-': PushDeleted, '=': PushUpToDate}

// Push pushes a branch to the branch of the same name.
func (g *Git) Push(ctx context.Context, dir string, o PushOptions) ([]PushedRef, error) {
	if o.Branch == "" {
		head, err := g.head(ctx, dir)
		if err != nil {
			return nil, err
		}
		if o.Branch = head.Branch; o.Branch == "" {
			return nil, &Error{Reason: RefNotFound, Message: "no branch is checked out"}
		}
	}
	args := []string{"push", "--porcelain"}
	if o.SetUpstream {
		args = append(args, "--set-upstream")
	}
	if o.Force {
		args = append(args, "--force-with-lease")
	}
	branch := "refs/heads/" + o.Branch
	out, err := g.run(ctx, command{dir: dir, limit: maxSmall, args: append(args, "--", o.Remote, branch+":"+branch)})
	if err != nil {
		if failed, ok := errors.AsType[*Error](err); ok {
			failed.Push = true
		}
		return nil, g.withRemote(ctx, dir, err, "remote", "get-url", "--push", o.Remote)
	}
	return parsePush(out.data)
}

// withRemote adds the remote's URL, which a command prints, to the error of a connection whose
// message has none.
func (g *Git) withRemote(ctx context.Context, dir string, err error, args ...string) error {
	failed, ok := errors.AsType[*Error](err)
	if !ok || failed.URL != "" || !slices.Contains([]Reason{AuthenticationFailed, RepositoryNotFound, NetworkFailed}, failed.Reason) {
		return err
	}
	if out, err := g.run(ctx, command{dir: dir, limit: maxSmall, reads: true, args: args}); err == nil {
		failed.URL, _, _ = strings.Cut(string(out.data), "\n")
	}
	return err
}

// maxPushed limits the refs of a push.
const maxPushed = 1000

// parsePush parses the output of git push --porcelain: lines of a flag, the refs and a
// summary, separated by tabs, between "To …" and "Done".
func parsePush(data []byte) ([]PushedRef, error) {
	var refs []PushedRef
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSuffix(line, "\n")
		parts := strings.SplitN(line, "\t", 3)
		if len(parts) == 1 {
			continue // To, Done, and notes such as that an upstream was set
		}
		_, ref, ok := strings.Cut(parts[1], ":")
		if len(parts) != 3 || len(parts[0]) != 1 || !ok || !isName(ref) || len(refs) == maxPushed {
			return nil, fmt.Errorf("%w: %.60q in push", ErrOutput, line)
		}
		status := pushes[parts[0][0]]
		if status == "" { // or ! for a ref that was rejected, which is a failure of git
			return nil, fmt.Errorf("%w: %.60q in push", ErrOutput, line)
		}
		refs = append(refs, PushedRef{Ref: ref, Status: status, Summary: clean(parts[2][:min(len(parts[2]), maxMessage)])})
	}
	if len(refs) == 0 {
		return nil, fmt.Errorf("%w: push without a ref", ErrOutput)
	}
	return refs, nil
}

// Pull fetches a branch and fast-forwards the one that is checked out. With neither remote
// nor branch it is the upstream.
func (g *Git) Pull(ctx context.Context, dir, remote, branch string) (Head, error) {
	args := []string{"-c", "pull.rebase=false", "pull", "--ff-only", "--"}
	if remote != "" {
		args = append(args, remote)
	}
	if branch != "" {
		args = append(args, "refs/heads/"+branch)
	}
	if _, err := g.run(ctx, command{dir: dir, limit: maxSmall, args: args}); err != nil {
		address := []string{"ls-remote", "--get-url"} // without a remote, the upstream's
		if remote != "" {
			address = append(address, remote)
		}
		return Head{}, g.withRemote(ctx, dir, err, address...)
	}
	return g.head(ctx, dir)
}
