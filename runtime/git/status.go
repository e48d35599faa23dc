package git

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	// MaxFiles limits the files of a Status.
	MaxFiles = 10_000
	// maxStatus limits the output of git status.
	maxStatus = 4 << 20
)

// Head is what is checked out in a working tree.
type Head struct {
	Path   string // as the caller named it
	Branch string // empty if HEAD is detached
	Commit string // empty if the branch has no commit
}

// Status of a working tree.
type Status struct {
	Head
	Upstream string // such as origin/main; empty without one
	// Ahead and Behind count the commits that only the branch or its upstream has.
	Ahead, Behind int
	// Files that differ from the commit, with paths relative to the top of the working tree.
	Files     []File
	Truncated bool // there are more files
}

// Change of a file.
type Change string

const (
	Unmodified  Change = "unmodified"
	Modified    Change = "modified"
	TypeChanged Change = "type_changed"
	Added       Change = "added"
	Deleted     Change = "deleted"
	Renamed     Change = "renamed"
	Copied      Change = "copied"
	Unmerged    Change = "unmerged"
	Untracked   Change = "untracked"
)

// changes by git's letters.
var changes = map[byte]Change{'.': Unmodified, 'M': Modified, 'T': TypeChanged, 'A': Added, 'D': Deleted, 'R': Renamed, 'C': Copied, 'U': Unmerged}

// File of a Status.
type File struct {
	Path         string
	OriginalPath string // of a renamed or copied file
	// Index is the staged change, Worktree the change that is not staged.
	Index, Worktree Change
	Conflict        Sides // of an unmerged file
	Submodule       bool
}

// Sides are the changes of both sides of a merge to an unmerged file.
type Sides string

const (
	BothDeleted   Sides = "both_deleted"
	AddedByUs     Sides = "added_by_us"
	DeletedByThem Sides = "deleted_by_them"
	AddedByThem   Sides = "added_by_them"
	DeletedByUs   Sides = "deleted_by_us"
	BothAdded     Sides = "both_added"
	BothModified  Sides = "both_modified"
)

// sides by git's letters.
var sides = map[string]Sides{
	"DD": BothDeleted, "AU": AddedByUs, "UD": DeletedByThem, "UA": AddedByThem, "DU": DeletedByUs, "AA": BothAdded, "UU": BothModified,
}

// Status returns the state of the working tree at a path.
func (g *Git) Status(ctx context.Context, dir string) (Status, error) {
	return g.status(ctx, dir, "--untracked-files=all")
}

// head returns what is checked out, without its changes.
func (g *Git) head(ctx context.Context, dir string) (Head, error) {
	s, err := g.status(ctx, dir, "--untracked-files=no", "--ignore-submodules=all")
	return s.Head, err
}

func (g *Git) status(ctx context.Context, dir string, options ...string) (Status, error) {
	out, err := g.run(ctx, command{
		dir: dir, limit: maxStatus, reads: true,
		args: append([]string{"-c", "status.renames=true", "status", "--porcelain=v2", "--branch", "-z", "--ahead-behind"}, options...),
	})
	if err != nil {
		return Status{}, err
	}
	s, err := parseStatus(out.data, out.truncated)
	s.Path = dir
	return s, err
}

// parseStatus parses the output of git status --porcelain=v2 --branch -z. The last entry of
// truncated output is dropped.
func parseStatus(data []byte, truncated bool) (s Status, err error) {
	r, err := newRecords("status", data, truncated)
	for err == nil {
		next, ok := r.next()
		if !ok {
			break
		}
		if len(s.Files) == MaxFiles {
			s.Truncated = true
			return s, nil
		}
		record := string(next)
		if header, ok := strings.CutPrefix(record, "# "); ok {
			err = s.parseHeader(header)
			continue
		}
		var f File
		if f, err = parseFile(record, &r); err == nil {
			s.Files = append(s.Files, f)
		}
	}
	if err != nil && !(truncated && r.empty()) {
		return Status{}, err
	}
	s.Truncated = truncated
	return s, nil
}

// parseHeader parses a line with # at its beginning. Unknown ones are ignored, as git
// demands.
func (s *Status) parseHeader(header string) error {
	name, value, _ := strings.Cut(header, " ")
	valid := true
	switch name {
	case "branch.oid":
		if value != "(initial)" {
			s.Commit, valid = value, hash.MatchString(value)
		}
	case "branch.head":
		if value != "(detached)" {
			s.Branch, valid = value, isName(value)
		}
	case "branch.upstream":
		s.Upstream, valid = value, isName(value)
	case "branch.ab":
		ahead, behind, _ := strings.Cut(value, " ")
		var aheadOK, behindOK bool
		s.Ahead, aheadOK = parseSigned(ahead, "+")
		s.Behind, behindOK = parseSigned(behind, "-")
		valid = aheadOK && behindOK
	}
	if !valid {
		return fmt.Errorf("%w: %.60q in status", ErrOutput, header)
	}
	return nil
}

// isName reports whether a name of a ref from the output of git is plausible.
func isName(name string) bool {
	return name != "" && len(name) <= MaxRef && !strings.ContainsFunc(name, isControl) && utf8.ValidString(name)
}

func parseSigned(s, sign string) (int, bool) {
	digits, ok := strings.CutPrefix(s, sign)
	n, err := strconv.ParseUint(digits, 10, 31)
	return int(n), ok && err == nil
}

// fields is the number of fields before the path, by the type of a record.
var fields = map[string]int{"1": 8, "2": 9, "u": 10}

// parseFile parses the record of a file: "1 XY sub mH mI mW hH hI path", "2 XY sub mH mI mW hH hI
// Xscore path" followed by a record with the original path, "u XY sub m1 m2 m3 mW h1 h2 h3
// path", or "? path".
func parseFile(record string, more *records) (File, error) {
	invalid := fmt.Errorf("%w: record %.60q in status", ErrOutput, record)
	kind, path, _ := strings.Cut(record, " ")
	if kind == "?" {
		if !isPath(path) {
			return File{}, invalid
		}
		return File{Path: validPath(path), Index: Untracked, Worktree: Untracked}, nil
	}
	n := fields[kind]
	parts := strings.SplitN(record, " ", n+1)
	if n == 0 || len(parts) != n+1 || len(parts[1]) != 2 || len(parts[2]) != 4 || !isPath(parts[n]) {
		return File{}, invalid
	}
	xy := parts[1]
	f := File{Path: validPath(parts[n]), Index: changes[xy[0]], Worktree: changes[xy[1]], Submodule: parts[2][0] == 'S'}
	if f.Index == "" || f.Worktree == "" {
		return File{}, invalid
	}
	switch kind {
	case "2":
		original, ok := more.next()
		if !ok || !isPath(string(original)) {
			return File{}, invalid
		}
		f.OriginalPath = validPath(string(original))
	case "u":
		f.Index, f.Worktree, f.Conflict = Unmerged, Unmerged, sides[xy]
		if f.Conflict == "" {
			return File{}, invalid
		}
	}
	return f, nil
}

// maxPath is Linux's PATH_MAX.
const maxPath = 4096

func isPath(path string) bool { return path != "" && len(path) <= maxPath }

// validPath returns a path as valid UTF-8, as the listing of a directory has it.
func validPath(path string) string { return strings.ToValidUTF8(path, "\uFFFD") }
