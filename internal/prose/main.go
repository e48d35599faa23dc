// Prose checks the language of the repository: comments, errors, logs, identifiers,
// names of tests and files, documents, shell scripts. CONTRIBUTING.md lists its rules.
//
//	go run ./internal/prose             findings beyond the baseline fail
//	go run ./internal/prose PATH...     all findings below the paths, without the baseline
//	go run ./internal/prose -baseline   write the baseline
//	go run ./internal/prose -strict     a baseline that is too high fails, too
//	go run ./internal/prose -warn       also print the rules that never fail
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
	baselineDir  = folder + "/baseline"
	glossaryFile = "docs/glossary.md"
)

func main() {
	write := flag.Bool("baseline", false, "write the baseline")
	strict := flag.Bool("strict", false, "fail if the baseline is higher than what is found")
	warn := flag.Bool("warn", false, "also print findings of rules that never fail")
	flag.Parse()
	ok, err := run(flag.Args(), *write, *strict, *warn)
	if err != nil {
		fmt.Fprintln(os.Stderr, "prose:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

func run(paths []string, write, strict, warn bool) (bool, error) {
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
	found = slices.DeleteFunc(found, func(f Finding) bool {
		return slices.ContainsFunc(exceptions, func(e exception) bool { return e.covers(f) })
	})
	var failing []Finding
	for _, f := range found {
		switch {
		case !f.Rule.Warn:
			failing = append(failing, f)
		case warn && below(f.Path, paths):
			fmt.Println("warning:", f)
		}
	}
	if len(paths) > 0 {
		failing = slices.DeleteFunc(failing, func(f Finding) bool { return !below(f.Path, paths) })
		for _, f := range failing {
			fmt.Println(f)
		}
		return len(failing) == 0, nil
	}
	counted := count(failing)
	if write {
		return true, writeBaseline(baselineDir, counted)
	}
	base, err := readBaseline(baselineDir)
	if err != nil {
		return false, err
	}
	report := compare(base, counted)
	over := len(report.Over) > 0 && (printOver(report, failing) || strict)
	for _, line := range report.Notes {
		fmt.Println("prose:", line)
	}
	return !over && !(strict && len(report.Notes) > 0), nil
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

// maxPrinted bounds how many findings of a rule are printed for a lot.
const maxPrinted = 20

// printOver prints the lots that are beyond the baseline, with their findings in lines that
// changed. On a branch, lots without such findings are beyond it because of what landed on
// main: it returns false if all are.
func printOver(r comparison, found []Finding) (failed bool) {
	changed, onBranch := changedLines(baselineDir)
	for _, o := range r.Over {
		printed := 0
		for _, f := range found {
			if f.Rule.ID == o.Rule && lot(f.Path) == o.Lot && changed.has(f.Path, f.Line) {
				if printed++; printed <= maxPrinted {
					fmt.Println(f)
				}
			}
		}
		blame := "rewrite the new ones (see CONTRIBUTING.md, Language)"
		if onBranch && printed == 0 {
			blame = "not because of this branch"
		} else {
			failed = true
		}
		fmt.Printf("prose: %s has %d findings of prose/%s, its baseline has %d: %s\n", o.Lot, o.Found, o.Rule, o.Base, blame)
	}
	fmt.Printf("prose: all findings of a file or folder: go run ./%s PATH\n", folder)
	return failed
}
