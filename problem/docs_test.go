package problem_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// sections of docs/reference/errors.md, by their first codes.
var sections = map[string]string{
	problem.RequestInvalid.String():              "Requests",
	problem.SandboxNotFound.String():             "Sandboxes",
	problem.CommandNotFound.String():             "Commands, files and processes",
	problem.GitNotInstalled.String():             "Git",
	problem.NodeUnavailable.String():             "The node",
	problem.RulesInvalid.String():                "Rules, secrets and policies",
	problem.PreviewNotFound.String():             "Previews",
	problem.EgressDenied.String():                "Egress",
	problem.ProxyAuthenticationRequired.String(): "The proxy",
}

// sourcesOf lists the parts of a node that send a code, such as "API, previews".
func sourcesOf(from problem.Source) string {
	var names []string
	for i, name := range []string{"API", "previews", "egress", "proxy"} {
		if from&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// TestReferenceOfCodes generates the tables of docs/reference/errors.md.
func TestReferenceOfCodes(t *testing.T) {
	var page strings.Builder
	for _, d := range problem.All() {
		if section, ok := sections[d.Name]; ok {
			fmt.Fprintf(&page, "\n## %s\n\n| code | status | Retry-After | sent by | meaning |\n|---|---|---|---|---|\n", section)
		}
		retryAfter := ""
		if d.RetryAfter > 0 {
			retryAfter = fmt.Sprint(d.RetryAfter)
		}
		fmt.Fprintf(&page, "| <a id=%q></a>`%s` | %d | %s | %s | %s. %s |\n", d.Name, d.Name, d.Status, retryAfter, sourcesOf(d.From), d.Title, d.Meaning)
	}
	testkit.Generated(t, "../docs/reference/errors.md", "codes", page.String())
}
