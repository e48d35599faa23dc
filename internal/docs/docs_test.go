// Package docs tests the documents.
package docs

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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
		title := regexp.MustCompile(`\]\([^)]*\)`).ReplaceAllString(match[1], "")
		title = regexp.MustCompile(`[^\p{L}\p{N}_ -]`).ReplaceAllString(strings.ToLower(title), "")
		all[strings.ReplaceAll(title, " ", "-")] = true
	}
	return all
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
	for _, page := range pages {
		text := read(t, page)
		for _, target := range link.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
			path := page
			if target[1] != "" {
				path = filepath.Join(filepath.Dir(page), target[1])
			}
			if _, err := os.Stat(filepath.Join(top, path)); err != nil {
				t.Errorf("%s links to %s, which does not exist", page, path)
			} else if target[2] != "" && strings.HasSuffix(path, ".md") && !anchors(read(t, path))[target[2]] {
				t.Errorf("%s links to the heading %s in %s, which does not exist", page, target[2], path)
			}
		}
	}
}
