package guest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Limits of searches.
const (
	MaxMatches    = 1000             // results of one search
	MaxMatchText  = 512              // bytes of a line in a Match
	MaxSearchLine = 256 << 10        // bytes of a line; longer lines do not match
	SearchTimeout = 20 * time.Second // for one search
)

// Reasons to stop a search before its end.
const (
	SearchStoppedByLimit = "limit"
	SearchStoppedByTime  = "time"
)

// SearchOptions of a search. It follows no symbolic links.
type SearchOptions struct {
	Name string // pattern of names, as of path.Match; empty: any
	// Exclude has patterns of the names of files and directories to skip.
	Exclude []string
	Hidden  bool // include names that begin with a dot
	// Content is a regular expression (RE2) for lines of regular files that are text; empty:
	// find files by their names.
	Content string
	Limit   int // of results, at most MaxMatches
}

// Match is a line of a file that matches.
type Match struct {
	Path   string `json:"path"`
	Line   int    `json:"line"`   // from 1
	Column int    `json:"column"` // of the first match, in bytes, from 1
	Text   string `json:"text"`   // a part of the line with the match, if it is long
}

// NewMatch returns the match at a position of a line.
func NewMatch(path string, number, at int, line []byte) Match {
	m := Match{Path: path, Line: number, Column: at + 1}
	if len(line) > MaxMatchText {
		from := max(0, min(at-MaxMatchText/4, len(line)-MaxMatchText))
		for from > 0 && from < len(line) && !utf8.RuneStart(line[from]) {
			from--
		}
		line = line[from:min(len(line), from+MaxMatchText)]
	}
	m.Text = strings.ToValidUTF8(string(line), "\uFFFD")
	return m
}

// SearchLine is one line of a search: a result or, last, the end.
type SearchLine struct {
	File  *FileInfo  `json:"file,omitempty"`
	Match *Match     `json:"match,omitempty"`
	End   *SearchEnd `json:"end,omitempty"`
}

// SearchEnd closes a search.
type SearchEnd struct {
	Stopped string `json:"stopped,omitempty"` // by what, if it did not reach its end
}

// SearchResult has the results of a search: Files, or with SearchOptions.Content Matches.
type SearchResult struct {
	Files   []FileInfo
	Matches []Match
	Stopped string // by what, if the search did not reach its end
}

// Search finds files below a directory, or lines in them. For lines it uses the sandbox's
// ripgrep, if it has one, otherwise the guest's own search. The results of both are the same,
// except for their order.
func (c *Client) Search(ctx context.Context, folder string, o SearchOptions) (*SearchResult, error) {
	if o.Content != "" {
		result, err := c.ripgrep(ctx, folder, o)
		if refused, ok := errors.AsType[*Error](err); err == nil || !ok || refused.Code == CodeNotFound {
			return result, err
		}
	}
	q := url.Values{"path": {folder}, "limit": {strconv.Itoa(o.Limit)}, "hidden": {strconv.FormatBool(o.Hidden)}, "exclude": o.Exclude}
	if o.Name != "" {
		q.Set("name", o.Name)
	}
	if o.Content != "" {
		q.Set("content", o.Content)
	}
	a, err := c.send(ctx, request{method: http.MethodGet, stream: true, route: RouteSearch, query: q})
	if err != nil {
		return nil, err
	}
	defer a.Close()
	result := &SearchResult{}
	lines := newLines(a)
	for lines.Scan() {
		var line SearchLine
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return nil, fmt.Errorf("guest sent an unusable search: %w", err)
		}
		switch {
		case line.End != nil:
			result.Stopped = line.End.Stopped
			return result, nil
		case len(result.Files)+len(result.Matches) == o.Limit:
			return nil, errors.New("guest sent more results than requested")
		case line.File != nil && o.Content == "":
			result.Files = append(result.Files, *line.File)
		case line.Match != nil && o.Content != "":
			result.Matches = append(result.Matches, *line.Match)
		default:
			return nil, errors.New("guest sent an unusable search")
		}
	}
	return nil, cmp.Or(lines.Err(), ErrLost)
}

// ripgrep searches with the sandbox's ripgrep. An *Error means that it cannot.
func (c *Client) ripgrep(ctx context.Context, folder string, o SearchOptions) (*SearchResult, error) {
	argv := []string{"rg", "--json", "--no-config", "--no-ignore", "--no-messages", "--no-follow", "--crlf", "--hidden"}
	if !o.Hidden {
		argv[len(argv)-1] = "--no-hidden"
	}
	if o.Name != "" {
		argv = append(argv, "--glob", o.Name)
	}
	for _, glob := range o.Exclude {
		argv = append(argv, "--glob", "!"+glob)
	}
	if !o.Hidden {
		argv = append(argv, "--glob", "!.*") // a hidden file that a pattern of names matches is searched otherwise
	}
	stream, err := c.Exec(ctx, ExecRequest{Command: Command{Argv: append(argv, "--regexp", o.Content, "--", "."), Cwd: folder}, Timeout: SearchTimeout})
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	parser := ripgrepOutput{folder: folder, limit: o.Limit}
	for {
		ev, err := stream.Next()
		if err != nil {
			return nil, err
		}
		switch ev.Kind {
		case FrameStdout:
			if err := parser.write(ev.Data); err != nil {
				if err == io.EOF {
					err = nil
				}
				return &parser.result, err // stops ripgrep
			}
		case FrameComplete:
			switch {
			case ev.Result.TimedOut:
				parser.result.Stopped = SearchStoppedByTime
			case ev.Result.ExitCode > 1 && len(parser.result.Matches) == 0:
				return nil, errRipgrep
			}
			return &parser.result, nil
		}
	}
}

// maxRipgrepLine bounds a line of JSON, with a line of text and its matches. A byte of text
// takes up to six.
const maxRipgrepLine = 8 * MaxSearchLine

// ripgrepOutput parses the JSON of ripgrep (https://docs.rs/grep-printer), which a hostile
// program of that name may have written.
type ripgrepOutput struct {
	folder string
	limit  int
	result SearchResult
	line   []byte // incomplete
	skip   bool   // the rest of a line that is too long
}

// errRipgrep is returned when ripgrep fails, or the program of that name is another one.
var errRipgrep = &Error{Code: CodeInternal, Message: "ripgrep failed"}

// write parses more output. It returns io.EOF when there are more results than the limit, and
// errRipgrep when the output is not ripgrep's.
func (p *ripgrepOutput) write(data []byte) error {
	for len(data) > 0 {
		part, rest, ended := cutLine(data)
		data = rest
		if p.skip = p.skip || len(p.line)+len(part) > maxRipgrepLine; p.skip {
			p.line = p.line[:0]
		} else {
			p.line = append(p.line, part...)
		}
		if !ended {
			return nil
		}
		if !p.skip {
			if err := p.parse(p.line); err != nil {
				return err
			}
		}
		p.line, p.skip = p.line[:0], false
	}
	return nil
}

func cutLine(data []byte) (line, rest []byte, ended bool) {
	for i, b := range data {
		if b == '\n' {
			return data[:i], data[i+1:], true
		}
	}
	return data, nil, false
}

// ripgrepText is text, or bytes that are not UTF-8 in base64.
type ripgrepText struct {
	Text  *string `json:"text"`
	Bytes []byte  `json:"bytes"`
}

func (t ripgrepText) content() []byte {
	if t.Text != nil {
		return []byte(*t.Text)
	}
	return t.Bytes
}

func (p *ripgrepOutput) parse(line []byte) error {
	var message struct {
		Type string `json:"type"`
		Data struct {
			Path       ripgrepText `json:"path"`
			Lines      ripgrepText `json:"lines"`
			LineNumber int         `json:"line_number"`
			Submatches []struct {
				Start int `json:"start"`
			} `json:"submatches"`
		} `json:"data"`
	}
	if json.Unmarshal(line, &message) != nil || message.Type == "" {
		return errRipgrep
	}
	text := strings.TrimRight(string(message.Data.Lines.content()), "\r\n")
	name := path.Join(p.folder, strings.ToValidUTF8(string(message.Data.Path.content()), "\uFFFD"))
	switch {
	case message.Type != "match", len(text) > MaxSearchLine:
		return nil
	case message.Data.LineNumber < 1, len(message.Data.Submatches) == 0, len(name) > maxSearchPath:
		return errRipgrep
	case len(p.result.Matches) == p.limit:
		p.result.Stopped = SearchStoppedByLimit
		return io.EOF
	}
	at := min(max(message.Data.Submatches[0].Start, 0), len(text))
	p.result.Matches = append(p.result.Matches, NewMatch(name, message.Data.LineNumber, at, []byte(text)))
	return nil
}

// maxSearchPath bounds the path of a result: PATH_MAX bytes, which take three each where they
// are not UTF-8.
const maxSearchPath = 3 * 4096
