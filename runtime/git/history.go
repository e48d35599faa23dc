package git

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"
)

const (
	// MaxCommits limits the commits of a log, MaxBranches the branches of a list.
	MaxCommits  = 1000
	MaxBranches = 5000
	// maxHistory limits the output of git log and git for-each-ref.
	maxHistory = 4 << 20
	// maxDiffFiles limits the files of a Diff.
	maxDiffFiles = 10_000
)

// DiffOptions are valid by CheckRevision.
type DiffOptions struct {
	// Staged compares the index with the commit instead of the working tree with the index.
	Staged bool
	// From is compared with To, or with the working tree.
	From, To string
	Files    []string
	// Limit of the bytes of the patch.
	Limit int
}

// Diff is the difference of two trees.
type Diff struct {
	Patch     []byte
	Truncated bool // the patch or the files
	Files     []DiffFile
}

// DiffFile is a file of a Diff.
type DiffFile struct {
	Path         string
	OriginalPath string // of a renamed file
	Binary       bool
	Added        int // lines
	Deleted      int
}

// Diff compares two states of a working tree.
func (g *Git) Diff(ctx context.Context, dir string, o DiffOptions) (Diff, error) {
	args := func(format ...string) []string {
		args := append([]string{"diff", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/", "--find-renames"}, format...)
		if o.Staged {
			args = append(args, "--cached")
		}
		if o.From != "" {
			args = append(args, o.From)
		}
		if o.To != "" {
			args = append(args, o.To)
		}
		return append(append(args, "--"), o.Files...)
	}
	out, err := g.run(ctx, command{dir: dir, limit: maxStatus, reads: true, env: literalPaths, args: args("--numstat", "-z")})
	if err != nil {
		return Diff{}, err
	}
	d, err := parseNumstat(out.data, out.truncated)
	if err != nil {
		return Diff{}, err
	}
	if out, err = g.run(ctx, command{dir: dir, limit: o.Limit, reads: true, env: literalPaths, args: args("--patch")}); err != nil {
		return Diff{}, err
	}
	d.Patch, d.Truncated = out.data, d.Truncated || out.truncated
	return d, nil
}

// parseNumstat parses the output of git diff --numstat -z: "added TAB deleted TAB path NUL", or
// "added TAB deleted TAB NUL original path NUL path NUL".
func parseNumstat(data []byte, truncated bool) (d Diff, err error) {
	r, err := newRecords("numstat", data, truncated)
	if err != nil {
		return d, err
	}
	for record, ok := r.next(); ok; record, ok = r.next() {
		if len(d.Files) == maxDiffFiles {
			d.Truncated = true
			return d, nil
		}
		parts := strings.SplitN(string(record), "\t", 3)
		if len(parts) != 3 {
			return d, fmt.Errorf("%w: record %.60q in numstat", ErrOutput, record)
		}
		f := DiffFile{Binary: parts[0] == "-" && parts[1] == "-", Path: parts[2]}
		if !f.Binary {
			var valid [2]bool
			f.Added, valid[0] = parseSigned(parts[0], "")
			f.Deleted, valid[1] = parseSigned(parts[1], "")
			if !valid[0] || !valid[1] {
				return d, fmt.Errorf("%w: record %.60q in numstat", ErrOutput, record)
			}
		}
		if f.Path == "" {
			original, _ := r.next()
			path, ok := r.next()
			if !ok {
				if truncated {
					break
				}
				return d, fmt.Errorf("%w: rename without paths in numstat", ErrOutput)
			}
			f.OriginalPath, f.Path = validPath(string(original)), string(path)
		}
		if !isPath(f.Path) {
			return d, fmt.Errorf("%w: record %.60q in numstat", ErrOutput, record)
		}
		f.Path = validPath(f.Path)
		d.Files = append(d.Files, f)
	}
	d.Truncated = truncated
	return d, nil
}

// Commit of a log.
type Commit struct {
	Hash        string
	Parents     []string
	Author      Identity
	AuthoredAt  time.Time
	Committer   Identity
	CommittedAt time.Time
	Message     string // at most maxCommitMessage bytes
}

const (
	logFormat = "%H%x00%P%x00%an%x00%ae%x00%at%x00%cn%x00%ce%x00%ct%x00%B"
	logFields = 9
	// maxParents limits the parents of a commit, whose hashes have up to 64 digits.
	maxParents = 64
	// maxIdentity limits names and addresses, and maxCommitMessage the message of a commit
	// in a log, in bytes.
	maxIdentity      = 1 << 10
	maxCommitMessage = 16 << 10
)

// Log returns the last commits of a revision, newest first; of HEAD if ref is empty. More
// reports whether there are older ones.
func (g *Git) Log(ctx context.Context, dir, ref string, limit int, files []string) (commits []Commit, more bool, err error) {
	args := []string{"log", "-z", "--no-color", "--no-show-signature", "--encoding=UTF-8", "--format=" + logFormat, fmt.Sprint("--max-count=", limit+1)}
	if ref != "" {
		args = append(args, ref)
	}
	out, err := g.run(ctx, command{dir: dir, limit: maxHistory, reads: true, env: literalPaths, args: append(append(args, "--"), files...)})
	if err != nil {
		return nil, false, err
	}
	commits, err = parseLog(out.data, out.truncated)
	if err != nil || len(commits) <= limit {
		return commits, out.truncated, err
	}
	return commits[:limit], true, nil
}

// parseLog parses the output of git log -z with logFormat. Of truncated output it returns
// the complete commits.
func parseLog(data []byte, truncated bool) ([]Commit, error) {
	r, err := newRecords("log", data, truncated)
	if err != nil {
		return nil, err
	}
	commits := []Commit{}
	for !r.empty() && len(commits) <= MaxCommits {
		var fields [logFields][]byte
		whole := true
		for i := range fields {
			fields[i], whole = r.next()
		}
		if !whole && truncated {
			break
		}
		if !whole {
			return nil, fmt.Errorf("%w: incomplete commit %.60q in log", ErrOutput, fields[0])
		}
		c, err := parseCommit(fields)
		if err != nil {
			return nil, err
		}
		commits = append(commits, c)
	}
	return commits, nil
}

func parseCommit(fields [logFields][]byte) (Commit, error) {
	invalid := fmt.Errorf("%w: commit %.60q in log", ErrOutput, fields[0])
	if len(fields[1]) > maxParents*65 { // with a space
		return Commit{}, invalid
	}
	text := func(i, limit int) string {
		b := fields[i]
		return strings.ToValidUTF8(string(b[:min(len(b), limit)]), "\uFFFD")
	}
	c := Commit{
		Hash: string(fields[0]), Parents: strings.Fields(string(fields[1])), Message: text(8, maxCommitMessage),
		Author: Identity{text(2, maxIdentity), text(3, maxIdentity)}, Committer: Identity{text(5, maxIdentity), text(6, maxIdentity)},
	}
	valid := hash.MatchString(c.Hash) && len(c.Parents) <= maxParents
	for _, parent := range c.Parents {
		valid = valid && hash.MatchString(parent)
	}
	var err [2]error
	c.AuthoredAt, err[0] = parseTime(fields[4])
	c.CommittedAt, err[1] = parseTime(fields[7])
	if !valid || err[0] != nil || err[1] != nil {
		return c, invalid
	}
	return c, nil
}

// maxTime is the end of the year 9999, the last that RFC 3339 can write.
const maxTime = 253402300799

// parseTime parses seconds since 1970. A commit may have any time: others are the limits.
func parseTime(b []byte) (time.Time, error) {
	seconds, err := strconv.ParseInt(string(b), 10, 64)
	return time.Unix(min(max(seconds, 0), maxTime), 0).UTC(), err
}

// Branch of a repository.
type Branch struct {
	Name     string // such as main, or origin/main of a remote
	Remote   bool
	Commit   string
	Upstream string
	Current  bool // it is checked out
}

const branchFormat = "%(refname)%00%(objectname)%00%(upstream)%00%(HEAD)%00%(symref)"

// Branches returns the local branches, and the branches of remotes as last fetched.
func (g *Git) Branches(ctx context.Context, dir string) (branches []Branch, more bool, err error) {
	out, err := g.run(ctx, command{dir: dir, limit: maxHistory, reads: true, args: []string{
		"for-each-ref", fmt.Sprint("--count=", MaxBranches+1), "--format=" + branchFormat, "refs/heads", "refs/remotes",
	}})
	if err != nil {
		return nil, false, err
	}
	branches, err = parseBranches(out.data, out.truncated)
	if err != nil || len(branches) <= MaxBranches {
		return branches, out.truncated, err
	}
	return branches[:MaxBranches], true, nil
}

// parseBranches parses the output of git for-each-ref with branchFormat.
func parseBranches(data []byte, truncated bool) ([]Branch, error) {
	branches := []Branch{}
	for line := range strings.Lines(string(data)) {
		record, whole := strings.CutSuffix(line, "\n")
		if !whole && truncated {
			break
		}
		f := strings.SplitN(record, "\x00", 6)
		if !whole || len(f) != 5 || !isName(f[0]) || !hash.MatchString(f[1]) || f[2] != "" && !isName(f[2]) || len(branches) > MaxBranches {
			return nil, fmt.Errorf("%w: %.60q in for-each-ref", ErrOutput, record)
		}
		if f[4] != "" {
			continue // origin/HEAD is another name of a branch
		}
		local, isLocal := strings.CutPrefix(f[0], "refs/heads/")
		remote, isRemote := strings.CutPrefix(f[0], "refs/remotes/")
		b := Branch{Name: local, Commit: f[1], Current: f[3] == "*", Upstream: shortRef(f[2])}
		switch {
		case isRemote:
			b.Name, b.Remote = remote, true
		case !isLocal:
			return nil, fmt.Errorf("%w: %.60q in for-each-ref", ErrOutput, record)
		}
		branches = append(branches, b)
	}
	return branches, nil
}

// shortRef returns the name of a branch, local or of a remote.
func shortRef(ref string) string {
	return strings.TrimPrefix(strings.TrimPrefix(ref, "refs/heads/"), "refs/remotes/")
}
