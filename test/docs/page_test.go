package docs

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// elsewhere has the programs that run the blocks of a page, because these install or
// remove a node.
var elsewhere = map[string][]string{
	"docs/quickstart.md": {"test/up/run"},
	"docs/operations.md": {"test/vm/inside/checks.py", "test/vm/inside/run", "test/up/run"},
}

// pages returns the paths of all pages, from the root.
func pages(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md", "policies/*.md", "policies/*/*.md"} {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			page, err := filepath.Rel(root, file)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, page)
		}
	}
	if !slices.Contains(all, "README.md") || !slices.Contains(all, "docs/egress.md") {
		t.Fatalf("pages are missing: %v", all)
	}
	return all
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// block is a fenced block of code.
type block struct {
	line     int    // of its first line of code
	section  string // the heading of level 2 above it
	language string
	mark     string // run, adapt, node, from, norun, or none
	session  string // of a block that runs; by default its language
	value    string // of from and norun
	text     string
	output   string // its output, if the page shows that
}

var attribute = regexp.MustCompile(`^(\w+)(?:=("[^"]*"|\S+))?\s*`)

// parse reads the info string of a block.
func (b *block) parse(info string) error {
	b.language, info, _ = strings.Cut(info, " ")
	for info = strings.TrimSpace(info); info != ""; {
		m := attribute.FindStringSubmatch(info)
		if m == nil {
			return fmt.Errorf("the mark %q is not NAME or NAME=VALUE", info)
		}
		info = info[len(m[0]):]
		value := strings.Trim(m[2], `"`)
		if m[1] == "session" {
			b.session = value
			continue
		}
		if b.mark != "" {
			return fmt.Errorf("two marks: %s, %s", b.mark, m[1])
		}
		b.mark, b.value = m[1], value
	}
	return b.check()
}

func (b *block) check() error {
	runs := b.language == "sh" || b.language == "python" || b.language == "ts"
	switch {
	case b.session != "" && (b.mark != "run" || b.language != "sh"):
		return errors.New("only a block `sh run` has a session")
	case (b.mark == "from" || b.mark == "norun") && b.value != "":
	case b.mark == "run" && runs && b.value == "":
		if b.session == "" {
			b.session = b.language
		}
	case (b.mark == "adapt" || b.mark == "node") && b.language == "caddyfile" && b.value == "":
	case b.mark == "" && (b.language == "text" || b.language == "json"):
	default:
		return fmt.Errorf("%q is not a known mark of a block of %q; see the package's comment", b.mark, b.language)
	}
	return nil
}

var listItem = regexp.MustCompile(`^\s*([-*+]|\d+[.)]) `)

// parse returns the blocks of a page.
func parse(text string) (blocks []block, err error) {
	var open *block
	section, blank, inList := "", true, false
	for i, line := range strings.Split(text, "\n") {
		fenced := strings.HasPrefix(line, "```")
		switch {
		case open != nil && fenced:
			if err := open.validate(blocks); err != nil {
				return nil, fmt.Errorf("line %d: %w", open.line, err)
			}
			blocks = append(blocks, *open)
			open = nil
		case open != nil:
			open.text += line + "\n"
			continue
		case fenced:
			open = &block{line: i + 2, section: section}
			if err := open.parse(line[3:]); err != nil {
				return nil, fmt.Errorf("line %d: %w", i+1, err)
			}
		case strings.HasPrefix(line, "## "):
			section = line[3:]
		case strings.HasPrefix(strings.TrimSpace(line), "```"), strings.HasPrefix(line, "~~~"):
			return nil, fmt.Errorf("line %d: write the fence as ``` at the beginning of the line", i+1)
		case strings.HasPrefix(line, "    ") && blank && !inList:
			return nil, fmt.Errorf("line %d: indented code: fence it, with a mark", i+1)
		}
		blank = strings.TrimSpace(line) == ""
		if !blank && !strings.HasPrefix(line, " ") || listItem.MatchString(line) {
			inList = listItem.MatchString(line)
		}
	}
	if open != nil {
		return nil, fmt.Errorf("line %d: the block does not end", open.line)
	}
	return blocks, nil
}

// left is what JSON of a page leaves out.
var left = regexp.MustCompile(`,?\s*…`)

// validate checks the text of a block. A text after a block that runs is its output.
func (b *block) validate(before []block) error {
	switch {
	case b.language == "json":
		var value any
		if err := json.Unmarshal([]byte(left.ReplaceAllString(b.text, "")), &value); err != nil {
			return fmt.Errorf("invalid JSON: %w", err)
		}
	case b.mark == "from":
		file, err := os.ReadFile(filepath.Join(root, b.value))
		if err != nil {
			return err
		}
		if !strings.Contains(string(file), b.text) {
			return fmt.Errorf("%s does not have these lines", b.value)
		}
	case b.language == "text" && b.mark == "" && len(before) > 0 && before[len(before)-1].mark == "run" && before[len(before)-1].section == b.section:
		before[len(before)-1].output = b.text
	}
	return nil
}

func TestBlocksOfPagesHaveMarks(t *testing.T) {
	for _, page := range pages(t) {
		blocks, err := parse(read(t, page))
		if err != nil {
			t.Errorf("%s: %v", page, err)
		}
		var programs string
		for _, program := range elsewhere[page] {
			programs += read(t, program)
		}
		for _, b := range blocks {
			runs := regexp.MustCompile(fmt.Sprintf(`section '%s'|documented\(?[" ]%s\b|session=%[2]s\b`, b.section, b.session))
			if programs != "" && b.mark == "run" && !runs.MatchString(programs) {
				t.Errorf("%s:%d: no block of section %q or session %q runs", page, b.line, b.section, b.session)
			}
		}
	}
}

func TestMarks(t *testing.T) {
	for text, want := range map[string]string{
		"```sh run\na\n```\n\nIt prints:\n\n```text\nb\n```":            "",
		"```sh run session=other\na\n```":                               "",
		"```sh norun=\"installs packages\"\na\n```":                     "",
		"```go from=test/docs/doc.go\npackage docs\n```":                "",
		"```json\n{\"a\":[1,…],\"b\":{…},\"c\":\"…\"}\n```":             "",
		"- item\n\n    of two paragraphs\n":                             "",
		"text\n    that goes on\n":                                      "",
		"```sh\na\n```":                                                 "line 1: \"\" is not a known mark",
		"```\na\n```":                                                   "line 1: \"\" is not a known mark",
		"```sh runs\na\n```":                                            "line 1: \"runs\" is not",
		"```sh run norun=x\na\n```":                                     "line 1: two marks",
		"```sh norun\na\n```":                                           "line 1: \"norun\" is not",
		"```sh norun=\"\"\na\n```":                                      "line 1: \"norun\" is not",
		"```text run\na\n```":                                           "line 1: \"run\" is not",
		"```sh adapt\na\n```":                                           "line 1: \"adapt\" is not",
		"```python run session=a\na\n```":                               "only a block `sh run` has a session",
		"```sh run !\na\n```":                                           "is not NAME or NAME=VALUE",
		"```sh run\na":                                                  "line 2: the block does not end",
		"text\n\n    doze ls\n":                                         "line 3: indented code",
		"- item\n\ntext\n\n    doze ls\n":                               "line 5: indented code",
		"- item\n\n  ```sh run\n  a\n  ```\n":                           "line 3: write the fence",
		"```json\n{\"a\":}\n```":                                        "line 2: invalid JSON",
		"```go from=test/docs/doc.go\npackage none\n```":                "line 2: test/docs/doc.go does not have these lines",
		"```go from=test/docs/none.go\npackage none\n```":               "no such file",
		"```caddyfile adapt\n{\n}\n```\n\n```caddyfile\n{\n}\n```":      "line 6: \"\" is not",
		"```python norun=\"x\" session=y\na\n```\n\n## Two\n\n```\n```": "only a block",
	} {
		_, err := parse(text)
		if got := fmt.Sprint(err); want == "" && err != nil || !strings.Contains(got, want) {
			t.Errorf("%q: got %s, want %s", text, got, want)
		}
	}
	blocks, err := parse("## One\n\n```sh run\na\n```\n\nIt prints:\n\n```text\nb\n```\n\n```text\nc\n```\n\n```sh run\nd\n```\n\n## Two\n\n```text\ne\n```")
	if err != nil || len(blocks) != 5 {
		t.Fatal(blocks, err)
	}
	if b := blocks[3]; b.output != "" {
		t.Errorf("the text of another section is taken for output: %+v", b)
	}
	if b := blocks[0]; b.output != "b\n" || b.session != "sh" || b.section != "One" || b.line != 4 || b.text != "a\n" {
		t.Errorf("got %+v", b)
	}
}

// prints reports whether a block printed what the page shows.
func (b *block) prints(got string) bool {
	if b.output == "" {
		return true
	}
	pattern := strings.ReplaceAll(regexp.QuoteMeta(strings.TrimSpace(b.output)), "…", "(?s:.*?)")
	return regexp.MustCompile(`^` + pattern + `$`).MatchString(strings.TrimSpace(got))
}

func TestOutputIsCompared(t *testing.T) {
	for _, tt := range []struct {
		shown, printed string
		want           bool
	}{
		{"", "anything", true},
		{"a.b\n", "a.b\n", true},
		{"a.b\n", "axb\n", false},
		{"id …, state running\n…\nend\n", "id k3, state running\n1\n2\nend", true},
		{"id …, state running\n", "id k3, state asleep\n", false},
		{"a\n", "a\nb\n", false},
	} {
		if got := (&block{output: tt.shown}).prints(tt.printed); got != tt.want {
			t.Errorf("%q shown, %q printed: %v", tt.shown, tt.printed, got)
		}
	}
}
