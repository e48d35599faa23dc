package git

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// cleanupTimeout limits the removal of an incomplete clone.
const cleanupTimeout = time.Minute

// Names of the directories in which git works, until a clone is complete.
const (
	clonePrefix  = ".doze-clone-"
	cloneLetters = 12 // after the prefix
)

// cloning has the names of the directories of the clones of this process: others are left of
// clones that the end of a sandbox or a node has cut off.
var cloning sync.Map

// CloneOptions are valid by CheckURL, CheckBranch and CheckCommit. At most one of Branch,
// Tag and Commit is set; with none the server's default branch is checked out.
type CloneOptions struct {
	URL                 string
	Branch, Tag, Commit string
	// Dir is absolute. It does not exist, or is an empty directory. Default: the
	// DirectoryName of URL in the image's working directory.
	Dir        string
	Depth      int // 0: the whole history
	Submodules bool
}

// Clone clones a repository, and returns what is checked out. Progress may be nil.
//
// The clone is made next to its directory and then renamed, or if the directory exists, in
// it: when Clone fails, the directory does not exist or is empty. If the sandbox or the node
// dies, files are left. The next clone into a directory next to them removes them, unless they
// are in the directory that existed.
func (g *Git) Clone(ctx context.Context, o CloneOptions, progress func(Progress)) (Head, error) {
	c := clone{git: g, CloneOptions: o, progress: progress}
	if err := c.prepare(ctx); err != nil {
		return Head{}, err
	}
	if c.dir != c.Dir {
		cloning.Store(path.Base(c.dir), true)
		defer cloning.Delete(path.Base(c.dir))
		c.removeLeftovers(ctx)
	}
	head, err := c.run(ctx)
	if err == nil && c.dir != c.Dir {
		_, err = g.guest.Move(ctx, c.dir, c.Dir, "")
		if refused, ok := errors.AsType[*guest.Error](err); ok && refused.Code == guest.CodeExists {
			err = c.targetExists("was created by another program")
		}
	}
	if err != nil {
		return Head{}, c.cleanup(ctx, err)
	}
	head.Path = c.Dir
	return head, nil
}

// clone is a clone in progress.
type clone struct {
	git *Git
	CloneOptions
	dir      string // where git works: Dir, or a directory next to it
	progress func(Progress)
}

// prepare decides where git works.
func (c *clone) prepare(ctx context.Context) error {
	if c.Dir == "" {
		workdir, err := c.workdir(ctx)
		if err != nil {
			return err
		}
		c.Dir = path.Join(workdir, DirectoryName(c.URL))
	}
	c.Dir = path.Clean(c.Dir)
	info, err := c.git.guest.Stat(ctx, c.Dir, guest.StatOptions{Follow: true})
	if refused, ok := errors.AsType[*guest.Error](err); ok && refused.Code == guest.CodeNotFound {
		c.dir = path.Join(path.Dir(c.Dir), clonePrefix+strings.ToLower(rand.Text()[:cloneLetters]))
		return nil
	}
	if err != nil {
		return err
	}
	if info.Type != "directory" {
		return c.targetExists("is not a directory")
	}
	entries, _, err := c.git.guest.List(ctx, c.Dir, guest.ListOptions{Hidden: true})
	if err == nil && len(entries) > 0 {
		err = c.targetExists("is not empty")
	}
	c.dir = c.Dir
	return err
}

// removeLeftovers removes the directories of clones that were cut off, from the directory of
// this one. One that cannot be removed does not matter to this clone.
func (c *clone) removeLeftovers(ctx context.Context) {
	folder := path.Dir(c.dir)
	entries, _, _ := c.git.guest.List(ctx, folder, guest.ListOptions{Hidden: true}) // fails if the folder does not exist
	for _, entry := range entries {
		_, used := cloning.Load(entry.Name)
		if !used && entry.Type == "directory" && strings.HasPrefix(entry.Name, clonePrefix) && len(entry.Name) == len(clonePrefix)+cloneLetters {
			removeAll(ctx, c.git.guest, path.Join(folder, entry.Name))
		}
	}
}

func (c *clone) targetExists(why string) error {
	return &Error{Reason: TargetExists, Message: fmt.Sprintf("%s exists and %s", c.Dir, why)}
}

// workdir returns the image's working directory.
func (c *clone) workdir(ctx context.Context) (string, error) {
	out, err := c.git.exec(ctx, command{limit: maxPath + 1, reads: true}, guest.Command{Command: "pwd"})
	if err != nil {
		return "", err
	}
	dir, whole := strings.CutSuffix(string(out.data), "\n")
	if !whole || !path.IsAbs(dir) || strings.ContainsRune(dir, 0) {
		return "", fmt.Errorf("%w: no working directory", ErrOutput)
	}
	return dir, nil
}

// run clones into c.dir.
func (c *clone) run(ctx context.Context) (Head, error) {
	ref := c.Branch + c.Tag
	args := []string{"clone", "--progress"}
	if ref != "" {
		args = append(args, "--branch="+ref)
	}
	if c.Commit != "" {
		args = append(args, "--no-checkout")
	}
	args = append(args, c.depth()...)
	if c.Submodules {
		args = append(args, "--recurse-submodules")
		if c.Depth > 0 {
			args = append(args, "--shallow-submodules")
		}
	}
	if _, err := c.transfer(ctx, "", append(args, "--", c.URL, c.dir)...); err != nil {
		return Head{}, err
	}
	if c.Commit != "" {
		if err := c.checkoutCommit(ctx); err != nil {
			return Head{}, err
		}
	}
	head, err := c.git.head(ctx, c.dir)
	if err != nil {
		return Head{}, err
	}
	if c.Tag != "" && head.Branch != "" {
		// A branch of the same name has precedence in git clone.
		return c.checkoutTag(ctx)
	}
	if c.Branch != "" && head.Branch != c.Branch {
		return Head{}, &Error{Reason: RefNotFound, Message: fmt.Sprintf("%s is a tag and not a branch", c.Branch)}
	}
	return head, nil
}

func (c *clone) depth() []string {
	if c.Depth == 0 {
		return nil
	}
	return []string{fmt.Sprint("--depth=", c.Depth)}
}

// transfer runs git with the transports of the clone's address.
func (c *clone) transfer(ctx context.Context, dir string, args ...string) (output, error) {
	allowed := protocols
	if strings.HasPrefix(c.URL, "file:") {
		allowed = localProtocols
	}
	return c.git.run(ctx, command{dir: dir, args: args, limit: maxSmall, env: map[string]string{"GIT_ALLOW_PROTOCOL": allowed}, report: c.report})
}

// report reports progress, with the path of a submodule relative to the repository.
func (c *clone) report(p Progress) {
	if c.progress == nil {
		return
	}
	p.Submodule = strings.TrimPrefix(strings.TrimPrefix(p.Submodule, c.dir), "/")
	c.progress(p)
}

func (c *clone) checkoutCommit(ctx context.Context) error {
	_, err := c.transfer(ctx, c.dir, "cat-file", "-e", c.Commit+"^{commit}")
	if _, missing := errors.AsType[*Error](err); missing {
		_, err = c.transfer(ctx, c.dir, c.fetch(c.Commit)...)
	}
	if err != nil {
		return err
	}
	return c.checkout(ctx, c.Commit)
}

func (c *clone) checkoutTag(ctx context.Context) (Head, error) {
	tag := "refs/tags/" + c.Tag
	_, err := c.transfer(ctx, c.dir, c.fetch("+"+tag+":"+tag)...)
	if err == nil {
		err = c.checkout(ctx, tag)
	}
	if err != nil {
		return Head{}, err
	}
	return c.git.head(ctx, c.dir)
}

// checkout checks out a commit or tag, with its submodules.
func (c *clone) checkout(ctx context.Context, what string) error {
	_, err := c.transfer(ctx, c.dir, "checkout", "--progress", "--detach", what, "--")
	if err != nil || !c.Submodules {
		return err
	}
	args := []string{"submodule", "update", "--init", "--recursive", "--progress"}
	if c.Depth > 0 {
		args = append(args, "--depth=1")
	}
	_, err = c.transfer(ctx, c.dir, args...)
	return err
}

func (c *clone) fetch(refspec string) []string {
	args := append([]string{"fetch", "--progress", "--no-tags"}, c.depth()...)
	return append(args, "--", "origin", refspec)
}

// cleanup removes an incomplete clone, also when ctx has ended, and returns err.
func (c *clone) cleanup(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	failed, ok := errors.AsType[*Error](err)
	if ok && failed.Reason == TargetExists && c.dir == c.Dir {
		return err // the files are another program's
	}
	if ok {
		failed.Message = strings.ReplaceAll(failed.Message, c.dir, c.Dir)
	}
	if c.remove(ctx) != nil && ok {
		failed.Leftover = c.dir
	}
	return err
}

func (c *clone) remove(ctx context.Context) error {
	if c.dir != c.Dir {
		return removeAll(ctx, c.git.guest, c.dir)
	}
	entries, _, err := c.git.guest.List(ctx, c.dir, guest.ListOptions{Hidden: true})
	for _, entry := range entries {
		err = errors.Join(err, removeAll(ctx, c.git.guest, path.Join(c.dir, path.Base(entry.Name))))
	}
	return err
}

// removeAll removes a path that may not exist.
func removeAll(ctx context.Context, client *guest.Client, path string) error {
	err := client.Remove(ctx, path, true, "")
	if refused, ok := errors.AsType[*guest.Error](err); ok && refused.Code == guest.CodeNotFound {
		return nil
	}
	return err
}
