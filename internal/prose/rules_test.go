package main

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/testkit"
)

// examples of what each rule finds and what to write, by the rule's id. Those of rules for
// prose are sentences, all others are Go code or paths. CONTRIBUTING.md has them, too.
var examples = map[string]struct{ bad, good string }{
	"error-gerund":   {`return fmt.Errorf("thawing %s: %w", id, err)`, `return fmt.Errorf("thaw %s: %w", id, err)`},
	"error-capital":  {`return errors.New("Invalid name")`, `return errors.New("invalid name")`},
	"log-gerund":     {`log.Info("waking a sandbox", "sandbox", id)`, `log.Info("sandbox woke", "sandbox", id)`},
	"log-form":       {`log.Warn("podman", "line", line)`, `log.Warn("podman printed a warning", "line", line)`},
	"log-case":       {`log.Info("Sandbox woke")`, `log.Info("sandbox woke")`},
	"log-constant":   {`log.Info("woke " + id)`, `log.Info("sandbox woke", "sandbox", id)`},
	"log-key":        {`log.Info("sandbox woke", "durationMS", ms)`, `log.Info("sandbox woke", "duration_ms", ms)`},
	"method-name":    {"more than 12 unexported methods `end`", "`closeStream`, `stopTimer`"},
	"testkit-import": {`import "github.com/doze-run/doze/testkit"`, `import "testing"`},
	"glossary-term":  {"A sandbox has a **frobnicator**.", "A sandbox has a frobnicator."},
	"nobody":         {"Nobody waits for the lock.", "No request waits for the lock."},
	"whoever":        {"Whoever holds the lease releases it.", "The caller that holds the lease releases it."},
	"who":            {"Who finds no instance waits for one.", "Clients who find no instance wait for one."},
	"somebody":       {"Somebody uses the sandbox.", "A client uses the sandbox."},
	"is-no":          {"It is no request that can be carried.", "It is not a request that can be carried."},
	"no-such":        {"There is no such sandbox.", "The sandbox does not exist."},
	"that-of":        {"The rules are those of the owner.", "The rules are the owner's."},
	"of-which":       {"A node of which all sandboxes run.", "A node whose sandboxes all run."},
	"is-there":       {"A file that is there stays.", "An existing file stays."},
	"headless-what":  {"What a policy wrote stays for a day.", "The output of a policy stays for a day."},
	"says":           {"Running says whether the sandbox runs.", "Running reports whether the sandbox runs."},
	"told":           {"The guest is told of the change.", "The guest is notified of the change."},
	"hears":          {"The client hears of the end.", "The client is notified of the end."},
	"gives-back":     {"It gives the slot back.", "It releases the slot."},
	"for-ever":       {"The name is reserved for ever.", "The name is reserved permanently."},
	"at-once":        {"It ends at once.", "It ends immediately."},
	"beside":         {"A file beside the store.", "A file next to the store."},
	"archaic":        {"Something was wrong lately.", "Something was wrong recently."},
	"he":             {"An owner sees his sandboxes.", "Owners see their sandboxes."},
	"has-it":         {"The node has it removed.", "The node removes it."},
	"anew":           {"It begins anew.", "It begins again."},
	"look-at":        {"It looks at the cgroup every second.", "It polls the cgroup every second."},
	"answers":        {"The server answers 404.", "The server responds 404."},
	"kept":           {"The names are kept.", "The names are stored."},
	"spelling":       {"The host was dialled.", "The host was dialed."},
	"name":           {"func (l *limiter) takePlace() {}", "func (l *limiter) acquireSlot() {}"},
	"name-local":     {"func f() { told := 1; _ = told }", "func f() { reported := 1; _ = reported }"},
}

// fileOf returns a file in which a rule looks at an example.
func fileOf(r *Rule, example string) (name, src string) {
	switch {
	case r == ruleGlossary:
		return "docs/x.md", example + "\n"
	case r == ruleTestkit:
		return "api/x.go", "package api\n\n" + example + "\n"
	case r == ruleMethodName:
		return "", ""
	case r.In&Comment != 0:
		return "api/x.go", "package api\n\n// " + example + "\nvar x int\n"
	case r.In&(Error|Log) != 0:
		return "api/x.go", "package api\n\nfunc f() error {\n" + example + "\n}\n"
	default:
		return "api/x.go", "package api\n\n" + example + "\n"
	}
}

// found returns the ids of the rules that find something in a file.
func found(t *testing.T, name, src string) []string {
	t.Helper()
	c := &checker{terms: map[string]bool{"lease": true}}
	all, err := c.file(name, []byte(src))
	if err != nil {
		t.Fatalf("%v:\n%s", err, src)
	}
	var ids []string
	for _, f := range dropRare(all) {
		ids = append(ids, f.Rule.ID)
	}
	return ids
}

func TestEachRuleFindsItsBadExampleOnly(t *testing.T) {
	ids := map[string]bool{}
	for _, r := range rules {
		t.Run(r.ID, func(t *testing.T) {
			bad, good := examples[r.ID].bad, examples[r.ID].good
			if ids[r.ID] || r.ID == "" || r.In == 0 || r.Instead == "" || bad == "" || good == "" {
				t.Errorf("incomplete, or a second rule of this id: %+v", r)
			}
			ids[r.ID] = true
			if r == ruleMethodName {
				return // see TestMethodNamesAreFoundIfTooFrequent
			}
			name, src := fileOf(r, bad)
			if got := strings.Join(found(t, name, src), " "); got != r.ID {
				t.Errorf("%q: found %q", bad, got)
			}
			name, src = fileOf(r, good)
			if got := found(t, name, src); got != nil {
				t.Errorf("%q: found %q", good, got)
			}
		})
	}
}

// The example of a rule for prose is found in every kind of text that the rule is for.
func TestRulesForProseApplyToEveryKindOfText(t *testing.T) {
	for kind, file := range map[string][2]string{
		"comment at the end": {"a.go", "package a\n\nvar x int // It ends at once.\n"},
		"block comment":      {"a.go", "package a\n\n/*\nIt ends\nat once.\n*/\nvar x int\n"},
		"across lines":       {"a.go", "package a\n\n// It ends at\n// once.\nvar x int\n"},
		"item":               {"a.go", "package a\n\n// A list:\n//   - it ends\n//     at once\nvar x int\n"},
		"string":             {"a.go", "package a\n\nvar x = \"it ends at once\"\n"},
		"raw string":         {"a.go", "package a\n\nvar x = `{\n\"a\": \"it ends at once\"}`\n"},
		"joined strings":     {"a.go", "package a\n\nvar x = \"it ends at \" +\n\"once\"\n"},
		"error":              {"a.go", "package a\n\nvar x = errors.New(\"it ends at once\")\n"},
		"log":                {"a.go", "package a\n\nfunc f() { s.log.Info(\"it ended at once\") }\n"},
		"test name":          {"a_test.go", "package a\n\nfunc TestItEndsAtOnce(t *testing.T) {}\n"},
		"name of a case":     {"a_test.go", "package a\n\nfunc f() { t.Run(\"it ends at once\", nil) }\n"},
		"paragraph":          {"a.md", "# Title\n\nIt ends *at\nonce*. At once, it ends.\n"},
		"cell":               {"a.md", "| a | b |\n|---|---|\n| x | it ends at once |\n"},
		"heading":            {"a.md", "# It ends at once\n"},
		"item of a document": {"a.md", "- it ends\n  at once\n\n    and more\n"},
		"shell comment":      {"packaging/x", "#!/bin/bash\n# It ends\n# at once.\n"},
		"shell output":       {"packaging/x", "#!/bin/bash\nif x; then echo 'it ends at once'; fi\n"},
		"shell function":     {"packaging/x", "#!/bin/bash\nsay 'it ends at once'\n"},
		"make help":          {"Makefile", "x: y ## it ends at once\n"},
		"caddyfile":          {"packaging/Caddyfile.production", "{\n\t# It ends at once.\n}\n"},
		"unit":               {"packaging/x.service", "[Unit]\n# It ends at once.\n"},
	} {
		t.Run(kind, func(t *testing.T) {
			if got := found(t, file[0], file[1]); len(got) == 0 || got[0] != "at-once" {
				t.Errorf("found %q in:\n%s", got, file[1])
			}
		})
	}
}

func TestWhatIsNotProseIsIgnored(t *testing.T) {
	for kind, file := range map[string][2]string{
		"code in a comment":   {"a.go", "package a\n\n// An example:\n//\n//\tends at once\nvar x int\n"},
		"directive":           {"a.go", "package a\n\n//go:generate echo at once\nvar x int\n"},
		"a single word":       {"a.go", "package a\n\nvar x = \"nobody\"\n"},
		"struct tag":          {"a.go", "package a\n\ntype x struct {\n\tA int `doc:\"at once\"`\n}\n"},
		"generated":           {"a.go", "// Code generated by x. DO NOT EDIT.\n\npackage a\n\n// At once.\nvar x int\n"},
		"testdata":            {"testdata/a.go", "package a\n\n// At once.\nvar x int\n"},
		"fence":               {"a.md", "```sh\nat once\n```\n"},
		"indented code":       {"a.md", "Text:\n\n    at once\n\n    at once\n"},
		"code span":           {"a.md", "Text `at\nonce` and ``at ` once``.\n"},
		"address of a link":   {"a.md", "A [link](https://example.com/at once) and https://example.com/his.\n"},
		"HTML comment":        {"a.md", "<!-- at once -->\n<!--\nat once\n-->\n"},
		"generated part":      {"CONTRIBUTING.md", generatedBegin + "prose -->\n| at once |\n" + generatedEnd + "prose -->\n"},
		"shell code":          {"packaging/x", "#!/bin/bash\nrun --at once \"at once\" ${x#at once}\n"},
		"another file":        {"x.json", "at once\n"},
		"the rules":           {folder + "/rules.go", "at once\n"},
		"a term":              {"a.md", "A **lease**, many **leases**.\n\n**Begin** the paragraph.\n"},
		"user nobody":         {"a.go", "package a\n\n// It runs as user nobody.\nvar x int\n"},
		"there is no":         {"a.go", "package a\n\n// There is no other. Where there was still no file, it is no longer used, it is no more than x.\nvar x int\n"},
		"who of a person":     {"a.go", "package a\n\n// Clients who wait, an owner who, those who, visitors (who wait).\nvar x int\n"},
		"which with a number": {"a.go", "package a\n\n// Files, one of which is new, most of which are old.\nvar x int\n"},
		"what in a question":  {"a.md", "## What wakes a sandbox\n\nWhat wakes a sandbox? A request.\n"},
		"answers of DNS":      {"a.go", "package a\n\n// The name server answers the query.\nvar x int\n"},
		"system error":        {"a.go", "package a\n\nvar x = \"open x: no such file or directory\"\n"},
		"lookups":             {"a.go", "package a\n\nvar keepAlive, lookUp int\n"},
		"testing's Error":     {"a_test.go", "package a\n\nfunc f() { t.Error(\"Wrong \" + x); b.t.Error(\"Wrong\") }\n"},
		"names of errors":     {"a.go", "package a\n\nfunc f() { errors.New(\"missing x\"); errors.New(\"HTTP: x\"); errors.New(\"Content-Length: x\"); errors.New(\"Podman: x\") }\n"},
		"keys after variable": {"a.go", "package a\n\nfunc f() { log.Info(\"x\", attrs, \"Not a key\"); log.LogAttrs(ctx, l, \"it ended\", slog.Int(\"a_b\", 1)) }\n"},
		"testkit in tests":    {"a_test.go", "package a\n\nimport \"github.com/doze-run/doze/testkit\"\n"},
		"testkit in a suite":  {"a/atest/a.go", "package a\n\nimport \"github.com/doze-run/doze/testkit\"\n"},
		"testca in bench":     {"test/bench/a.go", "package a\n\nimport \"github.com/doze-run/doze/testkit/testca\"\n"},
	} {
		t.Run(kind, func(t *testing.T) {
			if got := found(t, file[0], file[1]); got != nil {
				t.Errorf("found %q in:\n%s", got, file[1])
			}
		})
	}
}

func TestNamesAreFoundWhereverTheyAreDeclared(t *testing.T) {
	for src, want := range map[string]string{
		"type turn int":                           "name",
		"func takeSlot() {}":                      "name",
		"func (s *T) GiveSlot() {}":               "name",
		"type t struct { a, roomLeft int }":       "name",
		"type i interface { letTake() }":          "name",
		"const maxRoom = 1":                       "name",
		"var (\n\tx = 1\n\tkeptOnes int\n)":       "name",
		"func f() { told := 1 }":                  "name-local",
		"func f() { for i, said := range x {} }":  "name-local",
		"func f(told int) {}":                     "name-local",
		"func f() { var whose int }":              "name-local",
		"func f() { rest := 1; way := 2 }":        "",
		"func f() { x.turn() }":                   "",
		"type placeholder struct { runtime int }": "",
		"var nobodyAccepts, cancelledOnes = 1, 2": "nobody spelling",
	} {
		if got := strings.Join(found(t, "a.go", "package a\n\n"+src+"\n"), " "); got != want {
			t.Errorf("%s: found %q, want %q", src, got, want)
		}
	}
	if got := found(t, "egress/outside.go", "package egress\n"); len(got) != 1 || got[0] != "name" {
		t.Errorf("the file's name: found %q", got)
	}
}

func TestMethodNamesAreFoundIfTooFrequent(t *testing.T) {
	src := "package a\n" + strings.Repeat("func (x *T) end() {}\nfunc (x *T) End() {}\nfunc (x *T) close() {}\nfunc end() {}\n", maxMethods)
	testkit.Diff(t, "findings of as many as permitted", found(t, "a.go", src), []string(nil))
	all := found(t, "a.go", src+"func (x *T) end() {}\n")
	testkit.Diff(t, "findings of one more", all, slices.Repeat([]string{ruleMethodName.ID}, maxMethods+1))
}

func TestFindingHasItsLineAndWhatToWrite(t *testing.T) {
	c := &checker{}
	all, err := c.file("a.go", []byte("package a\n\n// A comment that\n// ends at\n// once and at once.\nvar x = `a\nends at once`\n"))
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, f := range all {
		lines = append(lines, f.String())
	}
	const end = "; write immediately; concurrently, at the same time"
	testkit.Diff(t, "findings", lines, []string{
		`a.go:4: prose/at-once: "at once"` + end, `a.go:5: prose/at-once: "at once"` + end, `a.go:7: prose/at-once: "at once"` + end,
	})
}

func TestWords(t *testing.T) {
	for name, want := range map[string]string{
		"takeTurn": "take turn", "HTTPServer2": "http server", "a_b-c.d": "a b c d", "ID": "id", "newIDs": "new i ds", "x": "x", "": "",
	} {
		if got := strings.Join(words(name), " "); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

func TestTermsOfTheGlossaryAreRead(t *testing.T) {
	terms, err := readGlossary("../../" + glossaryFile)
	if err != nil {
		t.Fatal(err)
	}
	for _, term := range []string{"sandbox", "lease", "hold", "namespace helper"} {
		if !terms[term] {
			t.Errorf("%s has no term %q", glossaryFile, term)
		}
	}
	c := &checker{terms: map[string]bool{"turn": true}}
	if all, err := c.file("a.go", []byte("package a\n\ntype turn int\ntype room int\n")); err != nil || len(all) != 1 || all[0].Text != "room" {
		t.Errorf("a term is found as a forbidden name: %v, %v", all, err)
	}
}

func ruleByID(id string) *Rule {
	if i := slices.IndexFunc(rules, func(r *Rule) bool { return r.ID == id }); i >= 0 {
		return rules[i]
	}
	return nil
}

func TestExceptionsCoverFilesBelowTheirFolder(t *testing.T) {
	atOnce, told := ruleByID("at-once"), ruleByID("told")
	file, below := exception{"a.go", "at-once", "ends at once"}, exception{"b/", "told", "told"}
	for _, test := range []struct {
		exception exception
		finding   Finding
		want      bool
	}{
		{file, Finding{"a.go", 1, atOnce, "at once", "it ends AT once"}, true},
		{file, Finding{"a.go", 2, atOnce, "at once", "it begins at once"}, false},
		{file, Finding{"a.go", 3, told, "told", "ends at once told"}, false},
		{below, Finding{"b/c/d.go", 4, told, "told", "told"}, true},
		{below, Finding{"bb.go", 5, told, "told", "told"}, false},
	} {
		if got := test.exception.covers(test.finding); got != test.want {
			t.Errorf("%+v covers %+v: %v", test.exception, test.finding, got)
		}
	}
}

// Each exception covers a finding; otherwise it is to be deleted.
func TestExceptionsAreInUse(t *testing.T) {
	t.Chdir("../..")
	files, err := listFiles()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range exceptions {
		all, err := check(slices.DeleteFunc(slices.Clone(files), func(f string) bool { return !strings.HasPrefix(f, e.path) }))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(all, e.covers) {
			t.Errorf("delete the exception %+v", e)
		}
	}
}

func TestRunFailsForFindingsBelowItsPaths(t *testing.T) {
	t.Chdir(t.TempDir())
	if out, err := exec.CommandContext(testkit.Context(t), "git", "init", "-q", ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := os.Mkdir("api", 0o755); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		comment string
		paths   []string
		want    bool
	}{
		{"It ends at once.", nil, false},
		{"It ends at once.", []string{"api/..."}, false},
		{"It ends at once.", []string{"api/a.go"}, false},
		{"It ends at once.", []string{"ap", "cmd"}, true},
		{"It ends.", nil, true},
		{"The names are kept.", nil, true}, // a rule that never fails
	} {
		if err := os.WriteFile("api/a.go", []byte("package api\n\n// "+test.comment+"\nvar x int\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if ok, err := run(test.paths, false); err != nil || ok != test.want {
			t.Errorf("%q, paths %q: %v, %v", test.comment, test.paths, ok, err)
		}
	}
}

// TestReferenceOfRules generates the table of rules in CONTRIBUTING.md.
func TestReferenceOfRules(t *testing.T) {
	testkit.Generated(t, "../../CONTRIBUTING.md", "prose", table())
}

// table returns the rules for CONTRIBUTING.md.
func table() string {
	var b strings.Builder
	b.WriteString("| rule | instead of | write |\n|---|---|---|\n")
	for _, r := range rules {
		id := "`" + r.ID + "`"
		if r.Warn {
			id += " (warns)"
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", id, example(r, examples[r.ID].bad), example(r, examples[r.ID].good))
	}
	return b.String()
}

// example returns an example as Markdown: code in a code span, prose as it is.
func example(r *Rule, s string) string {
	if r.In&(Comment|Doc) != 0 || strings.Contains(s, "`") {
		return s
	}
	return "`" + s + "`"
}
