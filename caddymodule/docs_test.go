package caddymodule_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/doze-run/doze/testkit"
)

// options of a block of the Caddyfile: where its syntax and its documentation are.
type block struct {
	section  string // of the reference
	function string // whose doc comment has the syntax
	path     string // the blocks in it that lead to the options
	config   string // the type whose fields have the documentation
}

var blocks = []block{
	{"doze", "parseApp", "doze", "App"},
	{"size", "parseApp", "doze/size", "Size"},
	{"egress", "parseEgress", "egress", "Egress"},
	{"rule", "parseEgress", "egress/rule", ""},
	{"backups", "parseApp", "doze/backups", "Backups"},
	{"bucket", "parseApp", "doze/bucket", "Bucket"},
	{"doze_preview", "parsePreview", "doze_preview", "Preview"},
}

// fieldNames of options that differ from their own.
var fieldNames = map[string]string{
	"image": "images", "size": "sizes", "doze/bucket": "buckets", "rule": "rules", "preset": "presets", "domain": "domains", "upstream_ca": "upstream_ca_files",
}

// source is this package as it is written.
type source struct {
	functions map[string]string            // doc comments
	fields    map[string]map[string]string // doc comments of types by JSON name
}

func readSource(t *testing.T) source {
	t.Helper()
	s := source{functions: map[string]string{}, fields: map[string]map[string]string{}}
	for _, file := range []string{"app.go", "caddyfile.go", "egress.go", "egress_caddyfile.go", "objectstore.go", "preview.go"} {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range parsed.Decls {
			switch decl := decl.(type) {
			case *ast.FuncDecl:
				s.functions[decl.Name.Name] = decl.Doc.Text()
			case *ast.GenDecl:
				for _, spec := range decl.Specs {
					if config, ok := spec.(*ast.TypeSpec); ok {
						s.fields[config.Name.Name] = fieldsOf(config)
					}
				}
			}
		}
	}
	for _, config := range []string{"Backups", "Bucket"} {
		maps.Copy(s.fields[config], s.fields["ObjectStore"]) // embedded
	}
	return s
}

func fieldsOf(config *ast.TypeSpec) map[string]string {
	fields := map[string]string{}
	structure, ok := config.Type.(*ast.StructType)
	if !ok {
		return nil
	}
	for _, field := range structure.Fields.List {
		if field.Tag == nil {
			continue
		}
		name, _, _ := strings.Cut(reflect.StructTag(strings.Trim(field.Tag.Value, "`")).Get("json"), ",")
		fields[name] = strings.Join(strings.Fields(field.Doc.Text()), " ")
	}
	return fields
}

// syntax returns the options of a block as its syntax has them, with their arguments.
func (s source) syntax(t *testing.T, b block) (options []string) {
	t.Helper()
	var path []string
	for line := range strings.Lines(s.functions[b.function]) {
		text := strings.TrimLeft(line, "\t")
		depth := len(line) - len(text)
		text = strings.Join(strings.Fields(text), " ")
		if depth == 0 || text == "}" || text == "..." {
			continue
		}
		path = path[:min(depth-1, len(path))]
		if strings.Join(path, "/") == b.path {
			options = append(options, strings.TrimSuffix(text, " {"))
		}
		path = append(path, strings.Fields(text)[0])
	}
	if len(options) < 5 {
		t.Fatalf("the syntax of %s has the options %q", b.section, options)
	}
	return options
}

var defaultValue = regexp.MustCompile(`Default: (.+?)\.(?: |$)`)

// TestReferenceOfOptions generates the tables of options from the syntax and the fields.
func TestReferenceOfOptions(t *testing.T) {
	const file = "../docs/reference/caddyfile.md"
	s := readSource(t)
	for _, b := range blocks {
		if b.config == "" {
			continue
		}
		var table strings.Builder
		table.WriteString("| option | default | |\n|---|---|---|\n")
		missing := s.fields[b.config]
		for _, option := range s.syntax(t, b) {
			name, _, _ := strings.Cut(option, " ")
			field := name
			if other, ok := fieldNames[name]; ok {
				field = other
			}
			if other, ok := fieldNames[b.path+"/"+name]; ok {
				field = other
			}
			text, ok := s.fields[b.config][field]
			if !ok {
				t.Errorf("%s has no field with the JSON name %s", b.config, field)
			}
			delete(missing, field)
			value := ""
			if found := defaultValue.FindStringSubmatch(text); found != nil {
				value, text = found[1], strings.TrimSpace(strings.Replace(text, found[0], "", 1))
			}
			escape := strings.NewReplacer("|", `\|`).Replace
			fmt.Fprintf(&table, "| `%s` | %s | %s |\n", escape(option), escape(value), escape(text))
		}
		for name := range missing {
			t.Errorf("the syntax of %s lacks an option for the field %s", b.section, name)
		}
		testkit.Generated(t, file, "options of "+b.section, table.String())
	}
}

// The options of a rule are fields of a condition or of an action, so their table is
// written by hand.
func TestOptionsOfRulesAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../docs/reference/caddyfile.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n## Rules of `egress`\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var documented, want []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z_]+)").FindAllStringSubmatch(section, -1) {
		documented = append(documented, row[1])
	}
	for _, b := range blocks {
		if b.section != "rule" {
			continue
		}
		for _, option := range readSource(t).syntax(t, b) {
			name, _, _ := strings.Cut(option, " ")
			want = append(want, name)
		}
	}
	testkit.Diff(t, "the options of rules in docs/reference/caddyfile.md", documented, want)
}
