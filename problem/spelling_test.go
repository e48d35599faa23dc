package problem_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/doze-run/doze/problem"
)

// otherWords are texts of other enumerations that are spelled like codes.
var otherWords = map[string][]string{
	"caddymodule":     {"wake_timeout"}, // an option
	"api/types":       {"wake_failed", "sleep_failed", "process_exited"},
	"runtime/sandbox": {"wake_failed", "sleep_failed", "process_exited", "wake_timeout"},
	"runtime/guest":   {"path_not_found", "process_not_found", "terminal_not_found", "session_not_found", "session_lost", "session_busy", "directory_not_empty", "command_not_found", "command_not_executable", "port_not_ready", "guest_error"}, // the guest's own codes
}

// TestNoCodeIsSpelledOut: a program that sends or compares a code uses this package's
// variable, so that the compiler knows it.
func TestNoCodeIsSpelledOut(t *testing.T) {
	const root = ".."
	codes := map[string]bool{}
	for _, d := range problem.All() {
		codes[d.Name] = true
	}
	files := 0
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		folder, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if folder == "problem" || strings.HasPrefix(entry.Name(), ".") && folder != "." ||
				entry.Name() == "testdata" || entry.Name() == "node_modules" {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		files++
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		words := otherWords[filepath.ToSlash(filepath.Dir(folder))]
		ast.Inspect(file, func(n ast.Node) bool {
			literal, ok := n.(*ast.BasicLit)
			if !ok || literal.Kind != token.STRING {
				return true
			}
			text, err := strconv.Unquote(literal.Value)
			if err != nil {
				t.Fatal(err)
			}
			if codes[text] && !slices.Contains(words, text) {
				t.Errorf("%s spells out %q", folder, text)
			}
			if strings.Contains(text, `"code":`) {
				t.Errorf("%s writes a problem by hand: %s", folder, text)
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 50 {
		t.Errorf("only %d files", files)
	}
}
