// Prose checks the language of the repository: comments, errors, logs, identifiers,
// names of tests and files, documents, shell scripts. CONTRIBUTING.md lists its rules.
//
//	go run ./internal/prose             the whole repository
//	go run ./internal/prose PATH...     what is below the paths
//	go run ./internal/prose -warn       also the findings of rules that never fail
package main

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
)

// Paths inside the repository.
const (
	folder       = "internal/prose"
	glossaryFile = "docs/glossary.md"
)

func main() {
	warn := flag.Bool("warn", false, "also print findings of rules that never fail")
	flag.Parse()
	ok, err := run(flag.Args(), *warn)
	if err != nil {
		fmt.Fprintln(os.Stderr, "prose:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// run prints the findings below the paths and reports whether all are of rules that never
// fail.
func run(paths []string, warn bool) (ok bool, err error) {
	if err := chdirTop(); err != nil {
		return false, err
	}
	files, err := listFiles()
	if err != nil {
		return false, err
	}
	found, err := check(files)
	if err != nil {
		return false, err
	}
	ok = true
	for _, f := range found {
		switch {
		case !below(f.Path, paths), slices.ContainsFunc(exceptions, func(e exception) bool { return e.covers(f) }):
		case !f.Rule.Warn:
			fmt.Println(f)
			ok = false
		case warn:
			fmt.Println("warning:", f)
		}
	}
	return ok, nil
}

// below reports whether a path is one of the paths or in one of them.
func below(path string, paths []string) bool {
	return len(paths) == 0 || slices.ContainsFunc(paths, func(p string) bool {
		p = filepath.Clean(strings.TrimSuffix(p, "/..."))
		return p == "." || path == p || strings.HasPrefix(path, p+"/")
	})
}

// chdirTop changes to the top folder of the repository.
func chdirTop() error {
	top, err := exec.Command("git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		return fmt.Errorf("find the top folder of the repository: %w", err)
	}
	return os.Chdir(strings.TrimSpace(string(top)))
}

// listFiles returns the files of the repository that exist, also those to be added.
func listFiles() ([]string, error) {
	out, err := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		return nil, fmt.Errorf("git ls-files: %w", err)
	}
	files := strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
	slices.Sort(files)
	files = slices.Compact(files)
	return slices.DeleteFunc(files, func(f string) bool { _, err := os.Stat(f); return err != nil }), nil
}

// check returns what the rules find in the files, in their order, with what is excepted.
func check(files []string) ([]Finding, error) {
	terms, err := readGlossary(glossaryFile)
	if err != nil {
		return nil, err
	}
	c := &checker{terms: terms}
	results := make([][]Finding, len(files))
	var group errgroup.Group
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i, file := range files {
		group.Go(func() error {
			src, err := os.ReadFile(file)
			if err == nil {
				results[i], err = c.file(file, src)
			}
			slices.SortStableFunc(results[i], func(a, b Finding) int {
				return cmp.Or(cmp.Compare(a.Line, b.Line), strings.Compare(a.Rule.ID, b.Rule.ID))
			})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return dropRare(slices.Concat(results...)), nil
}
