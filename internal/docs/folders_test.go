package docs

import (
	"fmt"
	"go/doc"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
)

// folders returns a table of the packages below top, with the first sentence of each
// package comment.
func folders(top string) (string, error) {
	var table strings.Builder
	table.WriteString("| folder | |\n|---|---|\n")
	err := filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() || path == top {
			return err
		}
		if omitted(path) {
			return filepath.SkipDir
		}
		synopsis, err := synopsisOf(path)
		if err != nil || synopsis == "" {
			return err
		}
		folder, err := filepath.Rel(top, path)
		if err != nil {
			return err
		}
		fmt.Fprintf(&table, "| `%s` | %s |\n", filepath.ToSlash(folder), strings.ReplaceAll(synopsis, "|", `\|`))
		return nil
	})
	return table.String(), err
}

// omitted reports whether a folder is not part of the table: packages that only tests
// use, modules of their own, and what is not in the repository.
func omitted(path string) bool {
	name := filepath.Base(path)
	switch name {
	case "testdata", "bin", "build", "node_modules", "examples", "pictures":
		return true
	}
	if name == "sdktest" { // for the tests of policy authors
		return false
	}
	return strings.HasPrefix(name, ".") || strings.HasSuffix(name, "test") && name != "test" || filepath.Base(filepath.Dir(path)) == "test"
}

// synopsisOf returns the first sentence of a package's comment without the package's
// name; nothing for a folder without one.
func synopsisOf(folder string) (string, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		return "", err
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.PackageClauseOnly|parser.ParseComments)
		if err != nil {
			return "", err
		}
		if parsed.Doc == nil {
			continue
		}
		text := new(doc.Package).Synopsis(parsed.Doc.Text())
		text = strings.TrimPrefix(text, "Package "+parsed.Name.Name+" ")
		text = strings.TrimPrefix(text, "Command ")
		if first, rest, ok := strings.Cut(text, " "); ok && strings.EqualFold(first, filepath.Base(folder)) { // a program
			text = rest
		}
		return strings.TrimSuffix(strings.TrimPrefix(text, "is "), "."), nil
	}
	return "", nil
}
