package git

import (
	"net/url"
	"slices"
	"strings"
)

// Reason is the kind of a failure of git.
type Reason int

const (
	Failed               Reason = iota // any other
	NotInstalled                       // the sandbox has no git
	TimedOut                           // git was killed because of the timeout
	AuthenticationFailed               // the server wants other credentials
	RepositoryNotFound                 // the address leads to no repository
	NetworkFailed                      // the server cannot be reached, or failed
	RefNotFound                        // unknown branch, tag or commit
	PathNotFound                       // git knows no file with the path
	TargetExists                       // the directory to clone into is not empty
	NotRepository                      // the directory is not in a working tree
	DiskFull                           // no space left in the sandbox
	IdentityMissing                    // a commit has neither name nor address
	NothingToCommit                    // no change is staged
	Conflict                           // local changes or branches are in the way
	PushConflict                       // the remote branch has other commits
	PushDenied                         // the server refused to update a branch
	Locked                             // another git process changes the repository
)

// Error is a failure of git. Its texts come from the sandbox: they are printable, and
// limited in size.
type Error struct {
	Reason  Reason
	Message string // git's own errors
	// URL that git could not access, if its message has one, or else the remote's for a push
	// or pull.
	URL string
	// Push is whether git was to push.
	Push bool
	// Leftover is a path at which an incomplete clone remains.
	Leftover string
}

func (e *Error) Error() string {
	if e.Message == "" {
		switch e.Reason {
		case NotInstalled:
			return "the sandbox has no git"
		case TimedOut:
			return "git was killed because it exceeded its timeout"
		}
	}
	return "git: " + e.Message
}

// maxMessage limits Error.Message.
const maxMessage = 1000

// reasons are compared in this order with each line of git's messages. A reason applies
// if a line has all parts of one of its texts, separated by " … ".
var reasons = []struct {
	reason Reason
	texts  []string
}{
	{DiskFull, []string{"No space left on device", "Disk quota exceeded"}},
	{NotRepository, []string{"not a git repository", "must be run in a work tree"}},
	{Locked, []string{".lock': File exists", "Another git process seems to be running"}},
	{TargetExists, []string{"already exists and is not an empty directory"}},
	{IdentityMissing, []string{"identity unknown", "empty ident name", "unable to auto-detect email", "no email was given", "no name was given"}},
	{AuthenticationFailed, []string{
		"Authentication failed for", "could not read Username", "could not read Password",
		"The requested URL returned error: 401", "The requested URL returned error: 403", "The requested URL returned error: 407",
		"Permission denied (", "Host key verification failed",
	}},
	{RepositoryNotFound, []string{"repository ' … ' not found", "repository ' … ' does not exist", "does not appear to be a git repository",
		"The requested URL returned error: 404", "No configured push destination", "No remote repository specified"}},
	{RefNotFound, []string{
		"Remote branch … not found in upstream", "couldn't find remote ref", "invalid reference:", "not a valid object name", "Not a valid object name",
		"bad revision", "unknown revision", "bad object", "not our ref", "unadvertised object", "is not a commit", "not a tree",
		"src refspec … does not match any", "You are not currently on a branch", "no tracking information", "has no upstream branch",
		"did not match any file(s) known to git",
	}},
	{PathNotFound, []string{"pathspec … did not match any files", "is outside repository", "is beyond a symbolic link"}},
	{NothingToCommit, []string{"nothing to commit", "nothing added to commit", "no changes added to commit"}},
	{Conflict, []string{
		"would be overwritten by", "would lose untracked files", "CONFLICT (", "Not possible to fast-forward", "have diverging branches",
		"unmerged files", "you need to resolve your current index first", "A branch named ' … ' already exists", "a branch named ' … ' already exists",
	}},
	{PushDenied, []string{"[remote rejected]"}},
	{PushConflict, []string{"[rejected]"}},
	{NetworkFailed, []string{
		"Could not resolve host", "Failed to connect", "Couldn't connect", "Connection refused", "Connection reset", "Connection timed out",
		"Operation timed out", "Network is unreachable", "No route to host", "SSL", "TLS", "certificate", "gnutls",
		"The requested URL returned error:", "RPC failed", "early EOF", "unexpected disconnect", "hung up unexpectedly", "Empty reply from server",
		"transfer closed", "unable to access", "Could not read from remote repository", "Could not resolve hostname", "expected flush after",
		"invalid server response", "unable to get remote",
	}},
}

// newError returns the error for git's messages, and for what it wrote to stdout, where
// some commands explain why they do nothing.
func newError(lines []string, stdout string) *Error {
	e := &Error{}
	// Text of the server cannot choose the reason.
	own := slices.DeleteFunc(slices.Clone(lines), func(line string) bool { return strings.HasPrefix(line, "remote: ") })
	for line := range strings.Lines(stdout) {
		own = append(own, strings.TrimSpace(clean(line)))
	}
	e.Reason = reasonOf(own)
	e.URL = addressIn(own)
	var errors []string
	for _, line := range lines {
		if hasAnyPrefix(line, "fatal: ", "error: ", "remote: ", "ERROR: ", "! [") {
			errors = append(errors, strings.TrimPrefix(strings.TrimPrefix(line, "fatal: "), "error: "))
		}
	}
	if len(errors) == 0 {
		errors = slices.DeleteFunc(own, func(line string) bool { return line == "" })
	}
	// The last lines are the most specific.
	size, first := 0, len(errors)
	for first > 0 && size+len(errors[first-1]) <= maxMessage {
		first--
		size += len(errors[first]) + len("; ")
	}
	if first == len(errors) && first > 0 {
		e.Message = strings.ToValidUTF8(errors[first-1][:maxMessage], "")
		return e
	}
	e.Message = strings.Join(errors[first:], "; ")
	return e
}

func hasAnyPrefix(s string, prefixes ...string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(s, p) })
}

func reasonOf(lines []string) Reason {
	for _, r := range reasons {
		for _, text := range r.texts {
			first, second, _ := strings.Cut(text, " … ")
			for _, line := range lines {
				if i := strings.Index(line, first); i >= 0 && strings.Contains(line[i+len(first):], second) {
					return r.reason
				}
			}
		}
	}
	return Failed
}

// addressIn returns the address of a server in git's messages, such as
//
//	unable to access 'https://example.com/shop.git/': The requested URL returned error: 403
func addressIn(lines []string) string {
	for _, line := range lines {
		for part := range strings.SplitSeq(line, "'") {
			if !hasAnyPrefix(part, "https://", "http://") {
				continue
			}
			if u, err := url.Parse(part); err == nil && u.Host != "" && u.User == nil {
				return part
			}
		}
	}
	return ""
}
