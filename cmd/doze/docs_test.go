package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/doze-run/doze/egress/egresstest"
)

// TestExamplesOfTheAPIRunAsPrinted runs those that need no sandbox, by the shell and
// with the function that the page defines.
func TestExamplesOfTheAPIRunAsPrinted(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "reference", "api.md"))
	if err != nil {
		t.Fatal(err)
	}
	function := regexp.MustCompile(`(?m)^    api\(\) \{(?:.*\\\n)*.*\}$`).FindString(string(page))
	if function == "" {
		t.Fatal("the page defines no function api")
	}
	r := newRig(t)
	dir := t.TempDir()
	tree{"sign.wasm": string(egresstest.Module(1))}.write(t, dir)
	ran := 0
	runnable := regexp.MustCompile(`^(api '?/(policies|openapi)|api /node$|curl .*"\$DOZE_API/policies)`)
	for line := range strings.Lines(strings.ReplaceAll(string(page), "\\\n", "")) {
		example, indented := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "    ")
		if !indented || !runnable.MatchString(example) {
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
