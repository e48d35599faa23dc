package preset_test

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/preset"
	"github.com/doze-run/doze/testkit"
)

func TestPresetsAreListsOfHosts(t *testing.T) {
	var names []string
	for _, p := range preset.All() {
		names = append(names, p.Name)
		if !regexp.MustCompile(`\A[a-z0-9_]{2,32}\z`).MatchString(p.Name) || p.Description == "" || len(p.Hosts) == 0 {
			t.Errorf("%+v", p)
		}
		for i, h := range p.Hosts {
			if _, _, err := rule.CleanPattern(h); err != nil || slices.Contains(p.Hosts[:i], h) || h != strings.ToLower(h) {
				t.Errorf("%s: %s: %v", p.Name, h, err)
			}
		}
		if p.Source != preset.BuiltIn {
			t.Errorf("%s: the source is %q", p.Name, p.Source)
		}
	}
	if !slices.IsSorted(names) || len(slices.Compact(slices.Clone(names))) != len(names) {
		t.Errorf("not in the order of their names: %v", names)
	}
}

// TestReferenceOfPresets generates the table of presets.
func TestReferenceOfPresets(t *testing.T) {
	var table strings.Builder
	table.WriteString("| preset | | hosts |\n|---|---|---|\n")
	for _, p := range preset.All() {
		fmt.Fprintf(&table, "| `%s` | %s | `%s` |\n", p.Name, p.Description, strings.Join(p.Hosts, "` `"))
	}
	testkit.Generated(t, "../../../docs/egress.md", "presets", table.String())
}
