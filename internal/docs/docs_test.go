// Package docs tests the documents.
package docs

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/testkit"
)

// architecture is the page about the code.
const architecture = "docs/architecture.md"

// top of the repository, from this package's folder.
const top = "../.."

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(top, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

// TestReferenceOfFolders generates the table of folders.
func TestReferenceOfFolders(t *testing.T) {
	table, err := folders(top)
	if err != nil {
		t.Fatal(err)
	}
	testkit.Generated(t, filepath.Join(top, architecture), "folders", table)
}

var (
	code = regexp.MustCompile("`([^`\n]+)`")
	// source is a path of the repository, with a name in it after a colon.
	source = regexp.MustCompile(`^([a-zA-Z][\w.-]*(?:/[\w.-]+)+|[A-Z]+\.md)(?:: (\w+))?$`)
)

// The page is of use as long as all that it refers to exists.
func TestArchitectureNamesWhatExists(t *testing.T) {
	document, _, _ := strings.Cut(read(t, architecture), "<!-- begin generated: folders -->")
	named := 0
	for _, span := range code.FindAllStringSubmatch(document, -1) {
		match := source.FindStringSubmatch(span[1])
		if match == nil || match[1] == "net/http" {
			continue
		}
		path, name := match[1], match[2]
		named++
		info, err := os.Stat(filepath.Join(top, path))
		switch {
		case err != nil:
			t.Errorf("%s refers to %s, which does not exist", architecture, path)
		case name == "" || info.IsDir():
		case !regexp.MustCompile(`(?m)^(?:func |type )(?:\([^)]*\) )?` + name + `\b`).MatchString(read(t, path)):
			t.Errorf("%s refers to %s in %s, which does not declare it", architecture, name, path)
		}
	}
	if named < 50 {
		t.Errorf("found %d paths in %s, want 50 at least", named, architecture)
	}
}

// A picture contains the digest of the source that it was made from.
func TestPicturesAreCurrent(t *testing.T) {
	sources, err := filepath.Glob(filepath.Join(top, "docs/pictures/*.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if len(sources) == 0 {
		t.Fatal("docs/pictures has no sources")
	}
	for _, source := range sources {
		text, err := os.ReadFile(source)
		if err != nil {
			t.Fatal(err)
		}
		picture, err := os.ReadFile(strings.TrimSuffix(source, ".txt") + ".svg")
		if err != nil {
			t.Errorf("%v; `make pictures` draws it", err)
			continue
		}
		if digest := fmt.Sprintf("%x", sha256.Sum256(text)); !strings.Contains(string(picture), digest) {
			t.Errorf("%s is not the picture of its source; `make pictures` draws it", filepath.Base(source))
		}
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^)#:\s]*)(?:#([^)\s]+))?\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$|<a id="([^"]+)">`)
	fenced  = regexp.MustCompile("(?ms)^ *```.*?^ *```")
)

// anchors returns what links to a page may have after the #, as GitHub makes it of headings.
func anchors(page string) map[string]bool {
	all := map[string]bool{}
	for _, match := range heading.FindAllStringSubmatch(fenced.ReplaceAllString(page, ""), -1) {
		if match[2] != "" {
			all[match[2]] = true
			continue
		}
		all[anchor(match[1])] = true
	}
	return all
}

var (
	address     = regexp.MustCompile(`\]\([^)]*\)`)
	punctuation = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
)

// anchor returns the anchor of a heading.
func anchor(title string) string {
	title = address.ReplaceAllString(title, "")
	title = punctuation.ReplaceAllString(strings.ToLower(title), "")
	return strings.ReplaceAll(title, " ", "-")
}

// All links between pages lead to a file that exists, and to a heading in it.
func TestLinksOfDocuments(t *testing.T) {
	list := exec.Command("git", "ls-files", "*.md")
	list.Dir = top
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	pages := strings.Fields(string(out))
	if len(pages) < 10 {
		t.Fatalf("found %d pages", len(pages))
	}
	known := map[string]map[string]bool{} // anchors, by page
	anchorsOf := func(path string) map[string]bool {
		if known[path] == nil {
			known[path] = anchors(read(t, path))
		}
		return known[path]
	}
	for _, page := range pages {
		text := read(t, page)
		for _, target := range link.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
			path := page
			if target[1] != "" {
				path = filepath.Join(filepath.Dir(page), target[1])
			}
			if _, err := os.Stat(filepath.Join(top, path)); err != nil {
				t.Errorf("%s links to %s, which does not exist", page, path)
			} else if target[2] != "" && strings.HasSuffix(path, ".md") && !anchorsOf(path)[target[2]] {
				t.Errorf("%s links to the heading %s in %s, which does not exist", page, target[2], path)
			}
		}
	}
}

// TestReferenceOfContents generates the list of entries of docs/RATIONALE.md.
func TestReferenceOfContents(t *testing.T) {
	const page = "docs/RATIONALE.md"
	var contents strings.Builder
	for _, match := range regexp.MustCompile(`(?m)^(##|###) (.*)$`).FindAllStringSubmatch(read(t, page), -1) {
		indent := ""
		if match[1] == "###" {
			indent = "  "
		}
		fmt.Fprintf(&contents, "%s- [%s](#%s)\n", indent, match[2], anchor(match[2]))
	}
	testkit.Generated(t, filepath.Join(top, page), "contents", contents.String())
}

// The rows of the page are the figures that the benchmark measures.
func TestBenchmarksNameTheFigures(t *testing.T) {
	figures := names(read(t, "test/bench/main.go"), `(?m)^\t\{"([a-z]+)", start\w+, .*measure\w+\},$`)
	rows := names(read(t, "docs/benchmarks.md"), "(?m)^\\| `([a-z]+)` \\|")
	if len(figures) < 10 {
		t.Fatalf("test/bench has the figures %v", figures)
	}
	testkit.Diff(t, "the rows of docs/benchmarks.md", rows, figures)
}

// Commands of the operator's guide run in a virtual machine or with a node of `make up`.
func TestCommandsOfOperationsAreRun(t *testing.T) {
	sessions := names(read(t, "docs/operations.md"), "(?m)^```sh run session=(\\S+)$")
	run := names(read(t, "test/vm/inside/checks.py"), `documented\("(\S+?)"`)
	run = append(run, names(read(t, "test/vm/inside/run"), `run session=(\w+)`)...)
	run = append(run, names(read(t, "test/up/run"), `(?m)^holds '.*' documented (\S+)$`)...)
	if len(sessions) < 8 {
		t.Fatalf("docs/operations.md has the sessions %v", sessions)
	}
	slices.Sort(run)
	testkit.Diff(t, "the sessions of docs/operations.md", sessions, slices.Compact(run))
	for _, info := range names(read(t, "docs/operations.md"), "(?m)^```sh *(.*)$") {
		if !strings.HasPrefix(info, "run session=") && !strings.HasPrefix(info, `norun="`) {
			t.Errorf("docs/operations.md has a block `sh %s`, which is not run; give it a session, or norun with the reason", info)
		}
	}
}

func TestAlertsNameMetricsThatExist(t *testing.T) {
	metrics := names(read(t, "docs/reference/metrics.md"), "(?m)^\\| `(doze_[a-z_]+)` \\|")
	used := names(read(t, "docs/operations.md"), `\b(doze_[a-z_]+?)(?:_bucket)?\b`)
	if len(used) < 6 {
		t.Fatalf("docs/operations.md uses the metrics %v", used)
	}
	for _, name := range used {
		if !slices.Contains(metrics, name) && name != "doze_preview" && name != "doze_api" && name != "doze_proxy" {
			t.Errorf("docs/operations.md uses the metric %s, which does not exist", name)
		}
	}
}

// names returns the different submatches of a pattern, sorted.
func names(text, pattern string) (all []string) {
	for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		all = append(all, match[1])
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// A table of docs/RATIONALE.md has the purpose of each module that the code imports.
func TestRationaleHasEachDependency(t *testing.T) {
	_, table, _ := strings.Cut(read(t, "docs/RATIONALE.md"), "\n## Dependencies\n")
	required := 0
	for line := range strings.Lines(read(t, "go.mod")) {
		match := regexp.MustCompile(`^\t\S+?([\w-]+)(?:/v\d+)? v\S+\n$`).FindStringSubmatch(line)
		if match == nil { // of another kind, or indirect
			continue
		}
		required++
		if !regexp.MustCompile(`\b` + match[1] + `\b`).MatchString(table) {
			t.Errorf("docs/RATIONALE.md has no purpose of %s", strings.TrimSpace(line))
		}
	}
	if required < 30 {
		t.Errorf("found %d modules in go.mod, want 30 at least", required)
	}
}
