package types_test

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
)

// source is the declarations of this package.
func source(t *testing.T) []*ast.File {
	t.Helper()
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var files []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	if len(files) < 10 {
		t.Fatalf("only %d files", len(files))
	}
	return files
}

// Clients import this package: it brings in nothing else of doze, and no library.
func TestTypesImportTheStandardLibraryOnly(t *testing.T) {
	for _, file := range source(t) {
		for _, spec := range file.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(path, ".") && path != "github.com/doze-run/doze/problem" {
				t.Errorf("import of %s", path)
			}
		}
	}
}

// enumeration is a type with constants, as it is declared.
type enumeration struct {
	constants []string // names
	values    []string // texts
	listed    []string // names of constants that Values returns
}

func enumerations(t *testing.T) map[string]*enumeration {
	t.Helper()
	enums := map[string]*enumeration{}
	of := func(name string) *enumeration {
		if enums[name] == nil {
			enums[name] = &enumeration{}
		}
		return enums[name]
	}
	for _, file := range source(t) {
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.ValueSpec:
				kind, ok := n.Type.(*ast.Ident)
				if !ok || kind.Name == "byte" {
					break
				}
				value, err := strconv.Unquote(n.Values[0].(*ast.BasicLit).Value)
				if err != nil {
					t.Fatal(err)
				}
				e := of(kind.Name)
				e.constants, e.values = append(e.constants, n.Names[0].Name), append(e.values, value)
			case *ast.FuncDecl:
				if n.Name.Name != "Values" {
					break
				}
				list := n.Body.List[0].(*ast.ReturnStmt).Results[0].(*ast.CompositeLit)
				for _, element := range list.Elts {
					e := of(n.Recv.List[0].Type.(*ast.Ident).Name)
					e.listed = append(e.listed, element.(*ast.Ident).Name)
				}
			}
			return true
		})
	}
	if len(enums) < 20 {
		t.Fatalf("only %d enumerations", len(enums))
	}
	return enums
}

var snakeCase = regexp.MustCompile(`\A[a-z][a-z0-9]*(_[a-z0-9]+)*\z`)

func TestEnumerations(t *testing.T) {
	for name, e := range enumerations(t) {
		if diff := cmp.Diff(e.constants, e.listed); diff != "" {
			t.Errorf("%s: Values differs from the constants (-constants +values):\n%s", name, diff)
		}
		for i, constant := range e.constants {
			if !strings.HasPrefix(constant, name) {
				t.Errorf("%s is not named after its type %s", constant, name)
			}
			if name != "Encoding" && !snakeCase.MatchString(e.values[i]) { // utf-8 is IANA's
				t.Errorf("%s is %q, which is not snake_case", constant, e.values[i])
			}
		}
	}
}

// Each field has a snake_case name and a description. Its defaults and narrower lists
// of values are of its enumeration.
func TestFields(t *testing.T) {
	enums := enumerations(t)
	fields := 0
	for _, file := range source(t) {
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok {
				return true
			}
			structure, ok := spec.Type.(*ast.StructType)
			if !ok {
				return true
			}
			for _, field := range structure.Fields.List {
				if len(field.Names) == 0 {
					continue // embedded: its fields are checked where they are declared
				}
				fields++
				where := spec.Name.Name + "." + field.Names[0].Name
				literal, err := strconv.Unquote(field.Tag.Value)
				if err != nil {
					t.Fatal(err)
				}
				tag := reflect.StructTag(literal)
				if name, _, _ := strings.Cut(tag.Get("json"), ","); !snakeCase.MatchString(name) {
					t.Errorf("%s has the JSON name %q", where, name)
				}
				if doc := tag.Get("doc"); doc == "" || strings.HasSuffix(doc, ".") {
					t.Errorf("%s has the description %q", where, doc)
				}
				kind := field.Type
				if array, ok := kind.(*ast.ArrayType); ok {
					kind = array.Elt
					if tag.Get("nullable") != "false" {
						t.Errorf("%s may be null", where)
					}
				}
				values := strings.FieldsFunc(tag.Get("enum")+","+tag.Get("default"), func(r rune) bool { return r == ',' })
				if ident, ok := kind.(*ast.Ident); ok && enums[ident.Name] != nil {
					for _, value := range values {
						if !slices.Contains(enums[ident.Name].values, value) {
							t.Errorf("%s: %q is not a value of %s", where, value, ident.Name)
						}
					}
				} else if tag.Get("enum") != "" {
					t.Errorf("%s has a list of values without a type of its own", where)
				}
			}
			return true
		})
	}
	if fields < 200 {
		t.Errorf("only %d fields", fields)
	}
}

func TestDuration(t *testing.T) {
	for _, test := range []struct {
		text string
		want time.Duration
		out  string
	}{
		{"60s", time.Minute, "60s"},
		{"1h30m", 90 * time.Minute, "5400s"},
		{"1.5s", 1500 * time.Millisecond, "1.5s"},
		{"250ms", 250 * time.Millisecond, "0.25s"},
		{"0", 0, "0s"},
	} {
		var d types.Duration
		if err := json.Unmarshal([]byte(strconv.Quote(test.text)), &d); err != nil || time.Duration(d) != test.want {
			t.Errorf("%s is read as %v: %v", test.text, d, err)
		}
		if out, err := json.Marshal(d); err != nil || string(out) != strconv.Quote(test.out) {
			t.Errorf("%s is written as %s: %v", test.text, out, err)
		}
	}
	for _, text := range []string{"", "60", "-1s", "soon", strings.Repeat("9", 500)} {
		var d types.Duration
		err := d.UnmarshalText([]byte(text))
		if err == nil || len(err.Error()) > 200 || !strings.Contains(err.Error(), "1h30m") {
			t.Errorf("%.20q: %v", text, err)
		}
	}
}

// Embedded types add no level to the JSON.
func TestEmbeddedTypesAreFlat(t *testing.T) {
	minute := types.Duration(time.Minute)
	exit := types.ExecExit{ExitCode: 137, Signal: "SIGKILL", TimedOut: true, DurationMS: 1.5}
	command := types.Command{Command: "ls", Argv: []string{"a"}, Cwd: "/root", Env: map[string]string{"A": "b"}}
	for _, test := range []struct {
		value any
		want  string
	}{
		{types.ExecRequest{Command: command, Timeout: &minute}, `{"command":"ls","argv":["a"],"cwd":"/root","env":{"A":"b"},"timeout":"60s"}`},
		{types.ExecCommand{Type: types.ExecMessageTypeExec, Command: command}, `{"type":"exec","command":"ls","argv":["a"],"cwd":"/root","env":{"A":"b"}}`},
		{types.StartProcessRequest{Command: command, Name: "web", Restart: types.RestartOnWake}, `{"command":"ls","argv":["a"],"cwd":"/root","env":{"A":"b"},"name":"web","restart":"on_wake"}`},
		{types.ExecResult{Stdout: "x", ExecExit: exit}, `{"stdout":"x","stderr":"","truncated":false,"exit_code":137,"signal":"SIGKILL","timed_out":true,"duration_ms":1.5}`},
		{types.ExecComplete{ExecExit: exit}, `{"exit_code":137,"signal":"SIGKILL","timed_out":true,"duration_ms":1.5}`},
		{types.ExecCompleted{Type: types.ExecMessageTypeComplete, ExecExit: exit}, `{"type":"complete","exit_code":137,"signal":"SIGKILL","timed_out":true,"duration_ms":1.5}`},
		{types.LogChunk{Stream: types.LogStreamStderr, Output: types.Output{Data: "AA==", Encoding: types.EncodingBase64}}, `{"stream":"stderr","data":"AA==","encoding":"base64"}`},
		{types.FeedEvent{Event: types.Event{Seq: 1, Type: types.EventTypeSlept, Reason: types.StateReasonIdle}, SandboxName: "shop", Cursor: "a-1"},
			`{"seq":1,"type":"slept","time":"0001-01-01T00:00:00Z","sandbox":"","reason":"idle","sandbox_name":"shop","cursor":"a-1"}`},
		{types.Node{Sandboxes: map[types.State]int{types.StateAsleep: 2}}.Sandboxes, `{"asleep":2}`},
	} {
		got, err := json.Marshal(test.value)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(test.want, string(got)); diff != "" {
			t.Errorf("%T differs (-want +got):\n%s", test.value, diff)
		}
		decoded := reflect.New(reflect.TypeOf(test.value))
		if err := json.Unmarshal(got, decoded.Interface()); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(test.value, decoded.Elem().Interface()); diff != "" {
			t.Errorf("%T changes when it is decoded (-sent +decoded):\n%s", test.value, diff)
		}
	}
}

func TestExecFailedCarriesAProblem(t *testing.T) {
	sent := types.ExecFailed{Type: types.ExecMessageTypeError, Problem: problem.New(problem.CommandNotFound, "no program sl")}
	message, err := json.Marshal(sent)
	if err != nil {
		t.Fatal(err)
	}
	var got types.ExecFailed
	if err := json.Unmarshal(message, &got); err != nil {
		t.Fatal(err)
	}
	if got.Type != types.ExecMessageTypeError || !problem.Has(got.Problem, problem.CommandNotFound) || got.Problem.Detail != "no program sl" {
		t.Errorf("%s is decoded as %+v", message, got)
	}
}
