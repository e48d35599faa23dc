package api

import (
	"cmp"
	"context"
	"net/http"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/runtime/guest"
)

// Limits of searches, in addition to the guest's.
const (
	defaultMatches = 100
	// searchGrace is how much longer than a search its results may take.
	searchGrace = 20 * time.Second
)

type searchFilesInput struct {
	SandboxPath
	FilePath
	Name       string   `query:"name" maxLength:"255" doc:"Only files whose name matches, such as *.go; with *, ? and [a-z]"`
	Content    string   `query:"content" maxLength:"1000" doc:"Find lines of text files that match this regular expression (RE2), instead of files"`
	Literal    bool     `query:"literal" doc:"content is text and not a regular expression"`
	IgnoreCase bool     `query:"ignore_case" doc:"Ignore the case of content"`
	Hidden     bool     `query:"hidden" doc:"Include names that begin with a dot"`
	Exclude    []string `query:"exclude,explode" maxItems:"32" doc:"Names of files and directories to skip, such as *.min.js; default: .git and node_modules. May be repeated"`
	MaxResults int      `query:"max_results" minimum:"1" maximum:"1000" default:"100" doc:"Maximum number of results"`
}

func (a *API) registerSearch() {
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/files/search", id: "search-files", tag: "files",
		summary: "Find files by name, or lines in them",
		description: "Wakes the sandbox. Searches a directory with its subdirectories, or one file; symbolic links are not followed. Ends after " +
			"`max_results` results or 20 s, and when the client disconnects. Lines of more than 256 KiB and binary files do not match. Ignore files such " +
			"as .gitignore have no effect. Uses the sandbox's ripgrep if it has one; then the order of the results differs from call to call.",
		codes: slices.Concat(wakeCodes, fileCodes),
	}, a.searchFiles)
}

func (a *API) searchFiles(ctx context.Context, in *searchFilesInput) (*output[types.FileSearch], error) {
	if err := checkPath("query.path", in.Path); err != nil {
		return nil, err
	}
	o, err := in.options()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, guest.SearchTimeout+searchGrace)
	defer cancel()
	return withFiles(ctx, a, in.ID, func(g *guest.Client) (*output[types.FileSearch], error) {
		found, err := g.Search(ctx, in.Path, o)
		if err != nil {
			return nil, err
		}
		return respond(types.FileSearch{Files: listOf(found.Files, fileOf), Matches: listOf(found.Matches, matchOf), Stopped: stoppedBy(found.Stopped)})
	})
}

func (in *searchFilesInput) options() (o guest.SearchOptions, err error) {
	o = guest.SearchOptions{Name: in.Name, Exclude: in.Exclude, Hidden: in.Hidden, Limit: cmp.Or(in.MaxResults, defaultMatches)}
	if in.Exclude == nil {
		o.Exclude = defaultExclude
	}
	if in.Name != "" {
		if err := checkGlob("query.name", in.Name); err != nil {
			return o, err
		}
	}
	for _, glob := range in.Exclude {
		if err := checkGlob("query.exclude", glob); err != nil {
			return o, err
		}
	}
	if in.Content == "" {
		if in.Literal || in.IgnoreCase {
			return o, invalid("query.content", "missing", "send content with literal or ignore_case")
		}
		return o, nil
	}
	o.Content = in.Content
	if in.Literal {
		o.Content = regexp.QuoteMeta(o.Content)
	}
	if in.IgnoreCase {
		o.Content = "(?i)" + o.Content
	}
	if err := checkExpression(o.Content); err != nil {
		return o, invalid("query.content", clip(err.Error()), "send a regular expression as of RE2, or literal=true")
	}
	return o, nil
}

// checkGlob refuses patterns of names that ripgrep and Go understand differently.
func checkGlob(location, glob string) error {
	_, err := path.Match(glob, "")
	if glob == "" || err != nil || strings.ContainsAny(glob, "/{}\x00") || strings.HasPrefix(glob, "!") || strings.Contains(glob, "[!") {
		return invalid(location, clip(glob)+" is not a pattern of names", "use a name with *, ? and [a-z], such as *.go, and without / { } !")
	}
	return nil
}

func matchOf(m guest.Match) types.FileMatch { return types.FileMatch(m) }

// stoppedBy returns "limit" for a value that the API does not have: the guest is not trusted.
func stoppedBy(name string) types.SearchStop {
	if s := types.SearchStop(name); name == "" || slices.Contains(s.Values(), s) {
		return s
	}
	return types.SearchStopLimit
}
