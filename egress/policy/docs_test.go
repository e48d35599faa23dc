package policy

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tetratelabs/wazero/api"
)

// The reference lists the host functions with names for their parameters and results.
// Their types are i32 unless noted.
func TestReferenceHasTheHostFunctions(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/egress-abi.md")
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)` \\| `\\(([^)]*)\\)(?: -> (.*?))?` \\|")
	for _, module := range []string{handlerModule, egressModule} {
		_, section, _ := strings.Cut(string(page), "\n## "+module+"\n")
		section, _, _ = strings.Cut(section, "\n## ")
		documented := map[string]string{}
		for _, cells := range row.FindAllStringSubmatch(section, -1) {
			documented[cells[1]] = documentedTypes(cells[2]) + " -> " + documentedTypes(cells[3])
		}
		want := map[string]string{}
		for _, f := range hostModules[module] {
			want[f.name] = typeNames(f.params) + " -> " + typeNames(f.results)
		}
		if diff := cmp.Diff(want, documented); diff != "" {
			t.Errorf("docs/reference/egress-abi.md differs from module %s (-code +page):\n%s", module, diff)
		}
	}
}

// documentedTypes returns the types of a list such as "key, ttl_ms i64".
func documentedTypes(list string) string {
	var all []string
	for name := range strings.SplitSeq(list, ", ") {
		if name == "" {
			continue
		}
		if _, kind, ok := strings.Cut(name, " "); ok {
			all = append(all, kind)
		} else {
			all = append(all, "i32")
		}
	}
	return strings.Join(all, " ")
}

func typeNames(values []api.ValueType) string {
	var all []string
	for _, v := range values {
		all = append(all, api.ValueTypeName(v))
	}
	return strings.Join(all, " ")
}
