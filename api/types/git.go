package types

import "time"

// GitCloneRequest clones a repository. At most one of Branch, Tag and Commit is set.
type GitCloneRequest struct {
	URL        string    `json:"url" maxLength:"2048" doc:"Address without credentials: https, http, ssh, or file for a repository in the sandbox" example:"https://github.com/doze-run/doze.git"`
	Branch     string    `json:"branch,omitempty" maxLength:"1024" doc:"Branch to check out; default: the server's default branch" example:"main"`
	Tag        string    `json:"tag,omitempty" maxLength:"1024" doc:"Tag to check out, in place of a branch" example:"v1.0.0"`
	Commit     string    `json:"commit,omitempty" maxLength:"64" doc:"Full hash of the commit to check out, in place of a branch; no branch or tag has to lead to it"`
	TargetDir  string    `json:"target_dir,omitempty" maxLength:"4096" doc:"Absolute path of the new working tree, which does not exist or is an empty directory; default: the repository's name in the image's working directory" example:"/workspace/doze"`
	Depth      int       `json:"depth,omitempty" minimum:"1" maximum:"1000000" doc:"Number of commits to get of the history; default: all"`
	Submodules bool      `json:"submodules,omitempty" doc:"Clone submodules too; with depth, one commit of each"`
	Timeout    *Duration `json:"timeout,omitempty" doc:"Time after which git is killed. At most 24h; 0s: none; default: 10m without stream, none with it"`
	Stream     bool      `json:"stream,omitempty" doc:"Respond with server-sent events while git runs"`
}

// GitHead is what is checked out in a working tree.
type GitHead struct {
	Path   string `json:"path" doc:"Absolute path of the working tree" example:"/workspace/doze"`
	Branch string `json:"branch,omitempty" doc:"Branch that is checked out; missing if none is, as with a tag or a commit" example:"main"`
	Commit string `json:"commit,omitempty" doc:"Hash of the commit that is checked out; missing if the branch has none yet"`
}

// GitPhase is a phase of a transfer or checkout.
type GitPhase string

const (
	GitPhaseEnumerating GitPhase = "enumerating_objects"
	GitPhaseCounting    GitPhase = "counting_objects"
	GitPhaseCompressing GitPhase = "compressing_objects"
	GitPhaseReceiving   GitPhase = "receiving_objects"
	GitPhaseWriting     GitPhase = "writing_objects"
	GitPhaseUnpacking   GitPhase = "unpacking_objects"
	GitPhaseResolving   GitPhase = "resolving_deltas"
	GitPhaseUpdating    GitPhase = "updating_files"
	GitPhaseFiltering   GitPhase = "filtering_content"
)

// Values returns all phases.
func (GitPhase) Values() []GitPhase {
	return []GitPhase{GitPhaseEnumerating, GitPhaseCounting, GitPhaseCompressing, GitPhaseReceiving, GitPhaseWriting,
		GitPhaseUnpacking, GitPhaseResolving, GitPhaseUpdating, GitPhaseFiltering}
}

// GitProgress is the data of the event progress.
type GitProgress struct {
	Phase     GitPhase `json:"phase" doc:"What git does"`
	Done      int64    `json:"done" doc:"Number of objects or files that are done"`
	Total     int64    `json:"total,omitempty" doc:"Number of all objects or files, if it is known"`
	Bytes     int64    `json:"bytes,omitempty" doc:"Number of bytes that were received or written"`
	Submodule string   `json:"submodule,omitempty" doc:"Path of the submodule that is cloned; missing for the repository itself" example:"lib/search"`
}

// GitStatus is the state of a working tree.
type GitStatus struct {
	GitHead
	Upstream  string    `json:"upstream,omitempty" doc:"Remote branch that the branch follows" example:"origin/main"`
	Ahead     int       `json:"ahead" doc:"Number of commits that upstream does not have, as last fetched"`
	Behind    int       `json:"behind" doc:"Number of commits that only upstream has, as last fetched"`
	Clean     bool      `json:"clean" doc:"Whether no file differs from the commit"`
	Files     []GitFile `json:"files" nullable:"false" doc:"Files that differ from the commit, at most 10,000"`
	Truncated bool      `json:"truncated" doc:"Whether there are more files"`
}

// GitChange is the change of a file.
type GitChange string

const (
	GitChangeUnmodified  GitChange = "unmodified"
	GitChangeModified    GitChange = "modified"
	GitChangeTypeChanged GitChange = "type_changed"
	GitChangeAdded       GitChange = "added"
	GitChangeDeleted     GitChange = "deleted"
	GitChangeRenamed     GitChange = "renamed"
	GitChangeCopied      GitChange = "copied"
	GitChangeUnmerged    GitChange = "unmerged"
	GitChangeUntracked   GitChange = "untracked"
)

// Values returns all changes.
func (GitChange) Values() []GitChange {
	return []GitChange{GitChangeUnmodified, GitChangeModified, GitChangeTypeChanged, GitChangeAdded, GitChangeDeleted,
		GitChangeRenamed, GitChangeCopied, GitChangeUnmerged, GitChangeUntracked}
}

// GitConflict describes both sides of an unmerged file.
type GitConflict string

const (
	GitConflictBothDeleted   GitConflict = "both_deleted"
	GitConflictAddedByUs     GitConflict = "added_by_us"
	GitConflictDeletedByThem GitConflict = "deleted_by_them"
	GitConflictAddedByThem   GitConflict = "added_by_them"
	GitConflictDeletedByUs   GitConflict = "deleted_by_us"
	GitConflictBothAdded     GitConflict = "both_added"
	GitConflictBothModified  GitConflict = "both_modified"
)

// Values returns all conflicts.
func (GitConflict) Values() []GitConflict {
	return []GitConflict{GitConflictBothDeleted, GitConflictAddedByUs, GitConflictDeletedByThem, GitConflictAddedByThem,
		GitConflictDeletedByUs, GitConflictBothAdded, GitConflictBothModified}
}

// GitFile is a file that differs from the commit.
type GitFile struct {
	Path         string      `json:"path" doc:"Path relative to the top of the working tree" example:"src/app.js"`
	OriginalPath string      `json:"original_path,omitempty" doc:"Path before the file was renamed or copied"`
	Index        GitChange   `json:"index" doc:"Change that is staged"`
	Worktree     GitChange   `json:"worktree" doc:"Change that is not staged"`
	Conflict     GitConflict `json:"conflict,omitempty" doc:"Of an unmerged file: what both sides did"`
	Submodule    bool        `json:"submodule,omitempty" doc:"Whether it is a submodule"`
}

// GitCheckoutRequest switches to a branch, tag or commit.
type GitCheckoutRequest struct {
	Path       string `json:"path" maxLength:"4096" doc:"Absolute path of the working tree" example:"/workspace/doze"`
	Ref        string `json:"ref" maxLength:"1024" doc:"Branch, tag or commit; a branch that only one remote has is created locally" example:"main"`
	Create     bool   `json:"create,omitempty" doc:"Create the branch ref"`
	StartPoint string `json:"start_point,omitempty" maxLength:"1024" doc:"With create: branch, tag or commit at which the branch starts; default: what is checked out" example:"origin/main"`
	Force      bool   `json:"force,omitempty" doc:"Discard changes that are not committed, if they are in the way"`
}

// GitAddRequest stages changes.
type GitAddRequest struct {
	Path  string   `json:"path" maxLength:"4096" doc:"Absolute path of the working tree" example:"/workspace/doze"`
	Files []string `json:"files,omitempty" nullable:"false" maxItems:"1000" doc:"Files or directories, relative to path; default: all changes, including new and deleted files" example:"[\"src/app.js\"]"`
}

// GitIdentity is a person or program that makes commits.
type GitIdentity struct {
	Name  string `json:"name" minLength:"1" maxLength:"255" doc:"Name" example:"Shop agent"`
	Email string `json:"email" minLength:"1" maxLength:"255" doc:"Email address" example:"agent@example.com"`
}

// GitCommitRequest commits changes.
type GitCommitRequest struct {
	Path       string       `json:"path" maxLength:"4096" doc:"Absolute path of the working tree" example:"/workspace/doze"`
	Message    string       `json:"message" minLength:"1" maxLength:"65536" doc:"Message" example:"Add the cart"`
	All        bool         `json:"all,omitempty" doc:"Stage all changes first, including new and deleted files"`
	Files      []string     `json:"files,omitempty" nullable:"false" maxItems:"1000" doc:"Files or directories to stage first, relative to path"`
	Author     *GitIdentity `json:"author,omitempty" doc:"Author and committer; default: those of git's configuration in the sandbox"`
	Amend      bool         `json:"amend,omitempty" doc:"Replace the last commit"`
	AllowEmpty bool         `json:"allow_empty,omitempty" doc:"Commit even if nothing has changed"`
}

// GitPushRequest pushes a branch to the branch of the same name.
type GitPushRequest struct {
	Path        string    `json:"path" maxLength:"4096" doc:"Absolute path of the working tree" example:"/workspace/doze"`
	Remote      string    `json:"remote,omitempty" maxLength:"255" default:"origin" doc:"Name of a remote of the repository"`
	Branch      string    `json:"branch,omitempty" maxLength:"1024" doc:"Branch to push; default: the one that is checked out" example:"main"`
	SetUpstream bool      `json:"set_upstream,omitempty" doc:"Make the remote branch the upstream of the branch"`
	Force       bool      `json:"force,omitempty" doc:"Replace commits of the remote branch that were fetched before; others stay, and the push is rejected"`
	Timeout     *Duration `json:"timeout,omitempty" doc:"Time after which git is killed. At most 24h; 0s: none; default: 10m"`
}

// GitPullRequest fast-forwards the branch that is checked out.
type GitPullRequest struct {
	Path    string    `json:"path" maxLength:"4096" doc:"Absolute path of the working tree" example:"/workspace/doze"`
	Remote  string    `json:"remote,omitempty" maxLength:"255" doc:"Name of a remote of the repository; default: the upstream's"`
	Branch  string    `json:"branch,omitempty" maxLength:"1024" doc:"With remote: the remote's branch; default: the upstream" example:"main"`
	Timeout *Duration `json:"timeout,omitempty" doc:"Time after which git is killed. At most 24h; 0s: none; default: 10m"`
}

// GitPushStatus is what a push did to a ref.
type GitPushStatus string

const (
	GitPushStatusUpdated  GitPushStatus = "updated"
	GitPushStatusForced   GitPushStatus = "forced"
	GitPushStatusCreated  GitPushStatus = "created"
	GitPushStatusDeleted  GitPushStatus = "deleted"
	GitPushStatusUpToDate GitPushStatus = "up_to_date"
)

// Values returns all states.
func (GitPushStatus) Values() []GitPushStatus {
	return []GitPushStatus{GitPushStatusUpdated, GitPushStatusForced, GitPushStatusCreated, GitPushStatusDeleted, GitPushStatusUpToDate}
}

// GitPushResult is what a push did.
type GitPushResult struct {
	Remote string         `json:"remote" doc:"Name of the remote"`
	Refs   []GitPushedRef `json:"refs" nullable:"false" doc:"Refs of the remote"`
}

// GitPushedRef is a ref of a remote after a push.
type GitPushedRef struct {
	Ref     string        `json:"ref" doc:"Name of the ref" example:"refs/heads/main"`
	Status  GitPushStatus `json:"status" doc:"What the push did to it"`
	Summary string        `json:"summary" doc:"Git's description, such as the commits before and after"`
}

// GitDiff is the difference of two states.
type GitDiff struct {
	Patch         string        `json:"patch" doc:"The difference in unified format"`
	PatchEncoding Encoding      `json:"patch_encoding,omitempty" enum:"base64" doc:"base64 if patch is not UTF-8 or has NUL bytes; missing otherwise"`
	Files         []GitDiffFile `json:"files" nullable:"false" doc:"Files that differ, at most 10,000"`
	Truncated     bool          `json:"truncated" doc:"Whether there is more than max_bytes of patch, or more files"`
}

// GitDiffFile is a file that differs.
type GitDiffFile struct {
	Path         string `json:"path" doc:"Path relative to the top of the working tree" example:"src/app.js"`
	OriginalPath string `json:"original_path,omitempty" doc:"Path before the file was renamed"`
	Binary       bool   `json:"binary,omitempty" doc:"Whether git regards it as binary"`
	LinesAdded   int    `json:"lines_added" doc:"Number of added lines"`
	LinesDeleted int    `json:"lines_deleted" doc:"Number of deleted lines"`
}

// GitLog is the history of a revision.
type GitLog struct {
	Commits   []GitCommit `json:"commits" nullable:"false" doc:"Commits, newest first"`
	Truncated bool        `json:"truncated" doc:"Whether there are older commits"`
}

// GitCommit is a commit.
type GitCommit struct {
	Commit      string      `json:"commit" doc:"Hash"`
	Parents     []string    `json:"parents" nullable:"false" doc:"Hashes of the parents"`
	Author      GitIdentity `json:"author" doc:"Author"`
	AuthoredAt  time.Time   `json:"authored_at" doc:"When it was written"`
	Committer   GitIdentity `json:"committer" doc:"Committer"`
	CommittedAt time.Time   `json:"committed_at" doc:"When it was committed"`
	Message     string      `json:"message" doc:"Message, at most its first 16 KiB"`
}

// GitBranchList is the branches of a repository.
type GitBranchList struct {
	Branches  []GitBranch `json:"branches" nullable:"false" doc:"Local branches, and branches of remotes as last fetched; at most 5,000"`
	Truncated bool        `json:"truncated" doc:"Whether there are more branches"`
}

// GitBranch is a branch.
type GitBranch struct {
	Name     string `json:"name" doc:"Name, such as main, or origin/main of a remote" example:"main"`
	Remote   bool   `json:"remote" doc:"Whether it is a remote's"`
	Current  bool   `json:"current" doc:"Whether it is checked out"`
	Commit   string `json:"commit" doc:"Hash of its last commit"`
	Upstream string `json:"upstream,omitempty" doc:"Remote branch that it follows" example:"origin/main"`
}
