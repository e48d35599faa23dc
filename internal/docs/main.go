// Docs writes the parts of documents that are generated from code: `make docs`.
package main

import (
	"fmt"
	"log"
	"os"
	"os/exec"
	"strings"
)

// architecture is the document with the table of folders.
const architecture = "docs/architecture.md"

func main() {
	top, err := exec.Command("git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		log.Fatalf("find the top folder of the repository: %v", err)
	}
	if err := os.Chdir(strings.TrimSpace(string(top))); err != nil {
		log.Fatal(err)
	}
	if err := write(); err != nil {
		log.Fatal(err)
	}
}

func write() error {
	document, err := os.ReadFile(architecture)
	if err != nil {
		return err
	}
	table, err := folders(".")
	if err != nil {
		return err
	}
	text, err := replaceGenerated(string(document), "folders", table)
	if err != nil {
		return fmt.Errorf("%s: %w", architecture, err)
	}
	return os.WriteFile(architecture, []byte(text), 0o644)
}

// replaceGenerated replaces what is between the markers of a generated part.
func replaceGenerated(document, name, content string) (string, error) {
	begin, end := "<!-- begin generated: "+name+" -->\n", "<!-- end generated: "+name+" -->"
	before, rest, ok := strings.Cut(document, begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return "", fmt.Errorf("missing markers %q and %q", strings.TrimSpace(begin), end)
	}
	return before + begin + content + end + after, nil
}
