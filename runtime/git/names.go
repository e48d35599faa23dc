package git

import (
	"errors"
	"net/url"
	"path"
	"regexp"
	"strings"
)

const (
	// MaxURL, MaxRef and MaxName limit addresses, refs and names of remotes, in bytes.
	MaxURL  = 2048
	MaxRef  = 1024
	MaxName = 255
)

// CheckURL refuses addresses that cannot be cloned, or have credentials.
func CheckURL(address string) error {
	const want = "send an address such as https://example.com/team/shop.git"
	u, err := url.Parse(address)
	switch {
	case len(address) > MaxURL:
		return errors.New("too long; send at most 2,048 bytes")
	case strings.ContainsFunc(address, func(r rune) bool { return r <= ' ' || r == 0x7f }):
		return errors.New("has a space or a control character; write it as %XX")
	case err != nil, u.Scheme == "" && strings.Contains(address, ":"):
		return errors.New("invalid address; " + want + ", over SSH ssh://git@example.com/team/shop.git")
	case u.Fragment != "" || u.RawQuery != "" || u.Opaque != "":
		return errors.New("has a query, a fragment or no //; " + want)
	}
	switch u.Scheme {
	case "http", "https":
		if u.User != nil {
			return errors.New("has credentials, which the sandbox would see and git would store; store them as a secret (doze secret set), " +
				"and let a rule add them on the way out, with the policy basic: docs/egress.md")
		}
	case "ssh":
		if _, password := u.User.Password(); password {
			return errors.New("has a password; SSH needs a key in the sandbox. Use https with a policy, see docs/egress.md")
		}
		if strings.HasPrefix(u.User.Username(), "-") {
			return errors.New("the user begins with a hyphen; " + want)
		}
	case "file":
		if u.Host != "" || u.User != nil || !strings.HasPrefix(u.Path, "/") {
			return errors.New("names a host; write file:///srv/shop.git for a repository in the sandbox")
		}
		return nil
	default:
		return errors.New("unsupported scheme; use https, http, ssh, or file for a repository in the sandbox")
	}
	if u.Hostname() == "" || strings.HasPrefix(u.Host, "-") {
		return errors.New("has no host; " + want)
	}
	return nil
}

// DirectoryName returns the name that git gives to the directory of a clone, or "" if the
// address has none.
func DirectoryName(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return ""
	}
	name := strings.TrimSuffix(strings.TrimRight(u.Path, "/"), "/.git")
	name = strings.TrimSuffix(path.Base(name), ".git")
	if name == "." || name == ".." || name == "/" || strings.HasPrefix(name, "-") || len(name) > MaxName || strings.ContainsFunc(name, isControl) {
		return ""
	}
	return name
}

func isControl(r rune) bool { return r < ' ' || r == 0x7f }

// CheckBranch refuses what cannot be the name of a branch or tag, by the rules of
// git-check-ref-format(1).
func CheckBranch(name string) error {
	switch {
	case name == "" || len(name) > MaxRef:
		return errors.New("has no or too many bytes; send 1 to 1,024")
	case name == "@" || name == "HEAD" || strings.HasPrefix(name, "-") || strings.Contains(name, "..") || strings.Contains(name, "@{") ||
		strings.HasSuffix(name, ".") || strings.ContainsFunc(name, isControl) || strings.ContainsAny(name, " ~^:?*[\\"):
		return errors.New("not a name that git allows; see git-check-ref-format(1)")
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == "" || strings.HasPrefix(part, ".") || strings.HasSuffix(part, ".lock") {
			return errors.New("not a name that git allows; see git-check-ref-format(1)")
		}
	}
	return nil
}

// CheckRevision refuses what cannot name one commit: a branch, a tag, a hash, or such a
// name with a suffix, such as HEAD~2.
func CheckRevision(name string) error {
	if name == "" || len(name) > MaxRef || strings.HasPrefix(name, "-") || strings.Contains(name, "..") ||
		strings.ContainsFunc(name, isControl) || strings.ContainsAny(name, " :?*[\\") || strings.HasPrefix(name, "^") {
		return errors.New("does not name one commit; send a branch, a tag, a hash, or one with a suffix such as HEAD~2")
	}
	return nil
}

var hash = regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64})$`)

// CheckCommit refuses what is not the full hash of a commit.
func CheckCommit(commit string) error {
	if !hash.MatchString(commit) {
		return errors.New("not the full hash of a commit; send its 40 or 64 hexadecimal digits in lower case, as git rev-parse prints them")
	}
	return nil
}

// CheckRemote refuses what cannot be the name of a remote. Addresses are refused, too.
func CheckRemote(name string) error {
	if CheckBranch(name) != nil || len(name) > MaxName {
		return errors.New("not the name of a remote; send the name of one that the repository has, such as origin")
	}
	return nil
}

// CheckIdentity refuses what git cannot write into a commit as a name or an email address.
func CheckIdentity(text string) error {
	if strings.TrimSpace(text) == "" || len(text) > MaxName || strings.ContainsFunc(text, isControl) || strings.ContainsAny(text, "<>") {
		return errors.New("not a name or address that a commit can have; send 1 to 255 bytes without < and >")
	}
	return nil
}
