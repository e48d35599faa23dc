package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/doze-run/doze/egress/egresstest"
	"github.com/doze-run/doze/testkit"
)

// TestExamplesOfTheAPIRunAsPrinted runs those that need no sandbox, by the shell and
// with the function that the page defines.
func TestExamplesOfTheAPIRunAsPrinted(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "reference", "api.md"))
	if err != nil {
		t.Fatal(err)
	}
	function := regexp.MustCompile(`(?m)^api\(\) \{(?:.*\\\n)*.*\}$`).FindString(string(page))
	if function == "" {
		t.Fatal("the page defines no function api")
	}
	r := newRig(t)
	dir := t.TempDir()
	tree{"sign.wasm": string(egresstest.Module(1))}.write(t, dir)
	ran := 0
	runnable := regexp.MustCompile(`^(api '?/(policies|openapi)|api /node$|curl .*"\$DOZE_API/policies)`)
	for line := range strings.Lines(strings.ReplaceAll(string(page), "\\\n", "")) {
		example := strings.TrimSuffix(line, "\n")
		if !runnable.MatchString(example) {
			continue
		}
		ran++
		cmd := exec.CommandContext(t.Context(), "bash", "-c", function+"\n"+example)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "DOZE_API="+r.env["DOZE_API"], "DOZE_TOKEN="+testToken, "DOZE_CA=/etc/ssl/certs/ca-certificates.crt")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", example, err, out)
		}
	}
	if ran == 0 {
		t.Error("the page does not have the example")
	}
	if strings.Contains(string(page), `"/app`) || strings.Contains(string(page), "path=/app") {
		t.Error("the page has files in /app, which no image of doze's has")
	}
}

// TestReferenceOfCommands generates the reference of the command line.
func TestReferenceOfCommands(t *testing.T) {
	root := (&app{}).rootCommand()
	root.InitDefaultHelpCmd()
	var page strings.Builder
	for _, group := range root.Groups() {
		fmt.Fprintf(&page, "\n## %s\n", strings.TrimSuffix(group.Title, ":"))
		for _, cmd := range root.Commands() {
			if cmd.GroupID == group.ID {
				writeCommand(&page, cmd)
			}
		}
	}
	page.WriteString("\n## Flags of all commands\n")
	writeFlags(&page, root.PersistentFlags())
	testkit.Generated(t, filepath.Join("..", "..", "docs", "reference", "cli.md"), "commands", page.String())
}

// writeCommand writes a command and those below it.
func writeCommand(page *strings.Builder, cmd *cobra.Command) {
	if cmd.IsAvailableCommand() {
		fmt.Fprintf(page, "\n### %s\n\n", cmd.CommandPath())
		if cmd.Runnable() && !cmd.HasSubCommands() {
			_, arguments, _ := strings.Cut(cmd.Use, " ")
			fmt.Fprintf(page, "```text\n%s\n```\n\n", strings.TrimSpace(cmd.CommandPath()+" "+arguments))
		}
		text := cmd.Long
		if text == "" {
			text = cmd.Short + "."
		}
		page.WriteString(indented.ReplaceAllStringFunc(text, func(block string) string {
			return "```text\n" + strings.TrimRight(block, "\n") + "\n```\n"
		}) + "\n")
		if cmd.Example != "" {
			fmt.Fprintf(page, "\n```text\n%s\n```\n", strings.ReplaceAll(strings.TrimPrefix(cmd.Example, "  "), "\n  ", "\n"))
		}
		writeFlags(page, cmd.LocalNonPersistentFlags())
	}
	for _, sub := range cmd.Commands() {
		writeCommand(page, sub)
	}
}

// indented are lines of a help text that stand apart, such as examples.
var indented = regexp.MustCompile(`(?m)(?:^  +.*\n?)+`)

func writeFlags(page *strings.Builder, flags *pflag.FlagSet) {
	flags.SortFlags = true
	head := "\n| flag | |\n|---|---|\n"
	flags.VisitAll(func(flag *pflag.Flag) {
		if flag.Hidden || flag.Name == "help" {
			return
		}
		kind, usage := pflag.UnquoteUsage(flag)
		name := "--" + flag.Name
		if flag.Shorthand != "" {
			name = "-" + flag.Shorthand + ", " + name
		}
		if kind != "" {
			name += " " + kind
		}
		if flag.DefValue != "" && flag.DefValue != "false" && flag.DefValue != "[]" && flag.DefValue != "0" && flag.DefValue != "0s" && !strings.Contains(usage, "default") {
			usage += fmt.Sprintf(" (default %s)", flag.DefValue)
		}
		fmt.Fprintf(page, "%s| `%s` | %s |\n", head, name, strings.NewReplacer("|", `\|`, "<", "&lt;").Replace(usage))
		head = ""
	})
}

// The page that doze policy test --help names has the fields of tests.
func TestHelpNamesThePageOfTests(t *testing.T) {
	help := (&app{}).policyTestCommand().Long
	named := regexp.MustCompile(`(docs/\S+\.md) has the format`).FindStringSubmatch(help)
	if named == nil {
		t.Fatal("the help names no page")
	}
	page, err := os.ReadFile(filepath.Join("..", "..", named[1]))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(page), "| `want` |") {
		t.Errorf("%s does not have the fields of tests", named[1])
	}
}
