package api

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
)

// constants returns the values of the constants of a type in a package's source.
func constants(t *testing.T, folder, typeName string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", folder, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	var values []string
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok || len(spec.Values) != 1 {
				return true
			}
			literal, isLiteral := spec.Values[0].(*ast.BasicLit)
			if kind, ok := spec.Type.(*ast.Ident); ok && kind.Name == typeName && isLiteral {
				value, err := strconv.Unquote(literal.Value)
				if err != nil {
					t.Fatal(err)
				}
				values = append(values, value)
			}
			return true
		})
	}
	return values
}

// enumerated are the values of an enumeration of the API.
func enumerated[T interface {
	~string
	Values() []T
}]() []string {
	var zero T
	values := make([]string, 0, len(zero.Values()))
	for _, v := range zero.Values() {
		values = append(values, string(v))
	}
	return values
}

// TestEveryDomainValueIsInTheAPI: what other packages put into responses is in the
// enumerations that the API promises.
func TestEveryDomainValueIsInTheAPI(t *testing.T) {
	for _, c := range []struct {
		folder, typeName string
		promised         []string
	}{
		{"runtime/sandbox", "State", enumerated[types.State]()},
		{"runtime/sandbox", "StateReason", enumerated[types.StateReason]()},
		{"runtime/sandbox", "ConditionCode", enumerated[types.ConditionCode]()},
		{"runtime/sandbox", "Persist", enumerated[types.Persist]()},
		{"runtime/sandbox", "Access", enumerated[types.Access]()},
		{"runtime/sandbox", "WakeMode", enumerated[types.WakeMode]()},
		{"runtime/sandbox", "HostMode", enumerated[types.HostHeader]()},
		{"runtime/sandbox", "Protocol", enumerated[types.Protocol]()},
		{"runtime/sandbox", "WebSocketMode", enumerated[types.WebSocketMode]()},
		{"runtime/sandbox", "Cause", enumerated[types.Cause]()},
		{"runtime/sandbox", "Language", enumerated[types.Language]()},
		{"runtime/sandbox", "WakeKind", enumerated[types.WakeKind]()},
		{"runtime/sandbox", "EventType", enumerated[types.EventType]()},
		{"runtime/sandbox", "BackupPhase", enumerated[types.BackupPhase]()},
		{"runtime/guest", "Restart", enumerated[types.Restart]()},
		{"runtime/guest", "ProcessState", enumerated[types.ProcessState]()},
		{"runtime/git", "Change", enumerated[types.GitChange]()},
		{"runtime/git", "Sides", enumerated[types.GitConflict]()},
		{"runtime/git", "Phase", enumerated[types.GitPhase]()},
		{"runtime/git", "PushStatus", enumerated[types.GitPushStatus]()},
		{"runtime/guest", "WatchEventType", append(enumerated[types.FileEventType](), "overflow", "stopped")}, // events of their own
		{"runtime/guest", "WatchReason", append(enumerated[types.WatchOverflowReason](), enumerated[types.WatchStopReason]()...)},
		{"egress/audit", "Kind", enumerated[types.FlowKind]()},
		{"egress/audit", "Verdict", enumerated[types.Verdict]()},
		{"egress/rule", "Verdict", enumerated[types.Verdict]()},
		{"egress/rule", "Default", enumerated[types.RuleDefault]()},
	} {
		values := constants(t, c.folder, c.typeName)
		if len(values) < 2 {
			t.Errorf("%s has %d constants of type %s", c.folder, len(values), c.typeName)
		}
		for _, value := range values {
			if value != "" && !slices.Contains(c.promised, value) {
				t.Errorf("%s: the %s %q is not among the API's %q", c.folder, c.typeName, value, c.promised)
			}
		}
	}
}

func TestEveryStateReasonIsDescribed(t *testing.T) {
	page, err := os.ReadFile("../docs/reference/api.md")
	if err != nil {
		t.Fatal(err)
	}
	_, states, _ := strings.Cut(string(page), "\n## States\n")
	states, _, _ = strings.Cut(states, "\n## ")
	for _, reason := range enumerated[types.StateReason]() {
		if !regexp.MustCompile("(?m)^\\|[^|]*`" + reason + "`[^|]*\\|").MatchString(states) {
			t.Errorf("the section States does not describe %s", reason)
		}
	}
}
