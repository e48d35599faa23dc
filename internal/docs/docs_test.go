package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/doze-run/doze/testkit"
)

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

func TestFolderTableIsCurrent(t *testing.T) {
	document := read(t, architecture)
	table, err := folders(top)
	if err != nil {
		t.Fatal(err)
	}
	want, err := replaceGenerated(document, "folders", table)
	if err != nil {
		t.Fatal(err)
	}
	testkit.Diff(t, architecture+", which `make docs` writes from the package comments", document, want)
}

var (
	code = regexp.MustCompile("`([^`\n]+)`")
	link = regexp.MustCompile(`\]\(([^)#\s]+)`)
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
	for _, target := range link.FindAllStringSubmatch(document, -1) {
		if _, err := os.Stat(filepath.Join(top, "docs", target[1])); err != nil {
			t.Errorf("%s links to %s, which does not exist", architecture, target[1])
		}
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
