package main

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// lots are the parts of the repository with a baseline file each. The first whose prefix
// fits has the file.
var lots = []struct{ name, prefixes string }{
	{"runtime-sandbox", "runtime/sandbox/"},
	{"runtime-guest", "runtime/guest/ archive/"},
	{"runtime", "runtime/ node/"},
	{"api", "api/ problem/"},
	{"cmd", "cmd/"},
	{"egress-carry", "egress/http/ egress/network/ egress/tls/"},
	{"egress-rules", "egress/rule/ egress/secret/"},
	{"policy", "egress/policy/ policies/"},
	{"egress", "egress/"},
	{"previews", "wakeproxy/ caddymodule/"},
	{"docs", "docs/ README.md CHANGELOG.md CONTRIBUTING.md"},
	{"tests", "test/ packaging/ images/ testkit/ internal/ .ci/"},
	{"shared", ""}, // the small packages of the top folder, and its files
}

// lot returns the name of the lot that a file is in.
func lot(path string) string {
	for _, l := range lots {
		for _, prefix := range append(strings.Fields(l.prefixes), map[bool][]string{true: {""}}[l.prefixes == ""]...) {
			if strings.HasPrefix(path, prefix) {
				return l.name
			}
		}
	}
	panic("unreachable: the last lot has every file")
}

// counts are numbers of findings, by lot and rule.
type counts map[string]map[string]int

func count(found []Finding) counts {
	c := counts{}
	for _, f := range found {
		c.add(lot(f.Path), f.Rule.ID, 1)
	}
	return c
}

func (c counts) add(lot, rule string, n int) {
	if c[lot] == nil {
		c[lot] = map[string]int{}
	}
	c[lot][rule] += n
}

// total returns the number of findings of each rule in all lots.
func (c counts) total() map[string]int {
	sums := map[string]int{}
	for _, rules := range c {
		for rule, n := range rules {
			sums[rule] += n
		}
	}
	return sums
}

// readBaseline reads the files <lot>.txt of lines "rule count". Without the folder every
// count is zero.
func readBaseline(dir string) (counts, error) {
	c := counts{}
	files, err := filepath.Glob(filepath.Join(dir, "*.txt"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for i, line := range strings.Split(strings.TrimSuffix(string(b), "\n"), "\n") {
			rule, number, _ := strings.Cut(line, " ")
			n, err := strconv.Atoi(number)
			if err != nil || n < 1 || ruleByID(rule) == nil {
				return nil, fmt.Errorf("%s:%d: want a rule and a count, got %q; run go run ./%s -baseline", file, i+1, line, folder)
			}
			c.add(strings.TrimSuffix(filepath.Base(file), ".txt"), rule, n)
		}
	}
	return c, nil
}

// writeBaseline replaces all files of the baseline.
func writeBaseline(dir string, c counts) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	for lot, rules := range c {
		var b bytes.Buffer
		for _, rule := range slices.Sorted(maps.Keys(rules)) {
			fmt.Fprintf(&b, "%s %d\n", rule, rules[rule])
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, lot+".txt"), b.Bytes(), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// excess is a lot that has more findings of a rule than its baseline.
type excess struct {
	Lot, Rule   string
	Base, Found int
}

type comparison struct {
	Over  []excess // fails
	Notes []string // fails with -strict
}

// compare compares what was found with the baseline. A lot may have more than its
// baseline as long as all lots together do not: then a finding moved with its file.
func compare(base, found counts) comparison {
	var r comparison
	lower, moved := 0, 0
	baseTotal, foundTotal := base.total(), found.total()
	for _, l := range lots {
		for _, rule := range rules {
			b, f := base[l.name][rule.ID], found[l.name][rule.ID]
			switch {
			case f < b:
				lower += b - f
			case f > b && foundTotal[rule.ID] > baseTotal[rule.ID]:
				r.Over = append(r.Over, excess{l.name, rule.ID, b, f})
			case f > b:
				moved += f - b
			}
		}
	}
	if lower > 0 || moved > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("the baseline is out of date: %d findings are gone from their folder, %d are in another; run go run ./%s -baseline and commit %s", lower, moved, folder, baselineDir))
	}
	return r
}

// lines are numbers of lines by file.
type lines map[string]map[int]bool

func (l lines) has(path string, line int) bool { return l[path][line] || l[path][0] }

// changedLines returns the lines that changed since the branch left main, or on main since
// a folder was last committed. It is empty without git or commits.
func changedLines(dir string) (changed lines, onBranch bool) {
	changed = lines{}
	base := gitLine("merge-base", "HEAD", "main")
	onBranch = base != "" && gitLine("branch", "--show-current") != "main"
	if !onBranch {
		base = gitLine("log", "-1", "--format=%H", "--", dir)
	}
	if base == "" {
		return changed, false
	}
	diff, err := exec.Command("git", "diff", "-U0", "--no-color", "--no-ext-diff", base).Output()
	if err != nil {
		return changed, false
	}
	if untracked, err := exec.Command("git", "ls-files", "--others", "--exclude-standard").Output(); err == nil {
		for path := range strings.Lines(string(untracked)) {
			changed[strings.TrimSpace(path)] = map[int]bool{0: true}
		}
	}
	path := ""
	for line := range strings.Lines(string(diff)) {
		if after, ok := strings.CutPrefix(line, "+++ b/"); ok {
			path = strings.TrimSpace(after)
			changed[path] = map[int]bool{}
		} else if strings.HasPrefix(line, "@@ ") && path != "" {
			first, number := hunk(line)
			for n := first; n < first+number; n++ {
				changed[path][n] = true
			}
		}
	}
	return changed, onBranch
}

// gitLine returns the line that a git command prints, or nothing if it fails.
func gitLine(args ...string) string {
	out, _ := exec.Command("git", args...).Output()
	return string(bytes.TrimSpace(out))
}

// hunk reads the new lines' first number and count from "@@ -a,b +c,d @@".
func hunk(line string) (first, number int) {
	fields := strings.Fields(line)
	if len(fields) < 3 {
		return 0, 0
	}
	c, d, ok := strings.Cut(strings.TrimPrefix(fields[2], "+"), ",")
	first, _ = strconv.Atoi(c)
	if number = 1; ok {
		number, _ = strconv.Atoi(d)
	}
	return first, number
}
