package problem_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// TestReferenceOfCodes generates the tables of docs/reference/errors.md.
func TestReferenceOfCodes(t *testing.T) {
	var page strings.Builder
	var group problem.Group
	for _, d := range problem.All() {
		if d.Group != group {
			group = d.Group
			fmt.Fprintf(&page, "\n## %s\n\n| code | status | Retry-After | sent by | meaning |\n|---|---|---|---|---|\n", group)
		}
		retryAfter := ""
		if d.RetryAfter > 0 {
			retryAfter = fmt.Sprint(d.RetryAfter)
		}
		fmt.Fprintf(&page, "| <a id=%q></a>`%s` | %d | %s | %s | %s. %s |\n", d.Name, d.Name, d.Status, retryAfter, d.From, d.Title, d.Meaning)
	}
	testkit.Generated(t, "../docs/reference/errors.md", "codes", page.String())
}
