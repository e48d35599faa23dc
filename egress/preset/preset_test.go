package preset_test

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/egress/preset"
	"github.com/doze-run/doze/egress/rule"
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
		got, ok, err := preset.Parse(preset.Prefix + p.Name)
		if !ok || err != nil || got.Name != p.Name {
			t.Errorf("%s: got %+v, %v, %v", p.Name, got, ok, err)
		}
	}
	if !slices.IsSorted(names) || len(slices.Compact(slices.Clone(names))) != len(names) {
		t.Errorf("not in the order of their names: %v", names)
	}
}

func TestWhatIsNoPreset(t *testing.T) {
	for _, pattern := range []string{"npm", "*.npm.example", "**", "", "preset"} {
		if _, ok, err := preset.Parse(pattern); ok || err != nil {
			t.Errorf("%q: %v, %v", pattern, ok, err)
		}
	}
	for _, pattern := range []string{"preset:nmp", "preset:", "preset:NPM", "preset:npm "} {
		if _, ok, err := preset.Parse(pattern); !ok || err == nil || !strings.Contains(err.Error(), "use one of anthropic, ") {
			t.Errorf("%q: %v, %v", pattern, ok, err)
		}
	}
}

var update = flag.Bool("update", false, "write the table of docs/egress.md")

// The table in the documentation is this one.
func TestDocumentation(t *testing.T) {
	const file = "../../docs/egress.md"
	page, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var table strings.Builder
	table.WriteString("| preset | | hosts |\n|---|---|---|\n")
	for _, p := range preset.All() {
		fmt.Fprintf(&table, "| `%s` | %s | `%s` |\n", p.Name, p.Description, strings.Join(p.Hosts, "` `"))
	}
	pattern := regexp.MustCompile(`(?m)^\| preset \|.*\n(\|.*\n)+`)
	if got := string(pattern.Find(page)); got == table.String() {
		return
	}
	if !*update {
		t.Fatal("the table of presets is another one; go test -update writes it")
	}
	if err := os.WriteFile(file, pattern.ReplaceAllLiteral(page, []byte(table.String())), 0o644); err != nil {
		t.Fatal(err)
	}
}
