package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/cmd/internal/version"
	"github.com/doze-run/doze/policies"
)

func (a *app) policyNewCommand() *cobra.Command {
	template := "bearer"
	cmd := &cobra.Command{
		Use:   "new NAME",
		Short: "Create a policy in Go, in a folder of that name",
		Long: `Create a policy in Go, in a folder of that name: a program with tests of its code and of
its module, a recorded request, and the guest SDK. It builds without doze's own module
and without a network.

Templates are the policies that doze ships: ` + strings.Join(policies.Names(), ", ") + `.`,
		Example: "  doze policy new github --template bearer",
		Args:    wants(1, 1),
		RunE: func(_ *cobra.Command, args []string) error {
			name := args[0]
			source, ok := policies.Source(template)
			switch {
			case !policyName.MatchString(name):
				return usage.Errorf("invalid name %.80q of a policy; use 1 to 64 of a-z, 0-9, - and _", name)
			case !ok:
				return usage.Errorf("unknown template %.80q; the templates are %s", template, strings.Join(policies.Names(), ", "))
			}
			if err := os.Mkdir(name, 0o777); errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("%s exists; choose another name, or remove it", name)
			} else if err != nil {
				return err
			}
			s := scaffold{name: name, template: template}
			if err := s.write(source); err != nil {
				return errors.Join(err, os.RemoveAll(name)) // it was not there before
			}
			if a.json {
				return a.printJSON(map[string]string{"folder": name, "template": template})
			}
			_, err := fmt.Fprintf(a.out, `%[1]s/  a policy like %[2]s; its README.md describes its configuration
  (cd %[1]s && go test ./...)
  doze policy build %[1]s
  doze policy test %[1]s/tests.json
`, name, template)
			return err
		},
	}
	cmd.Flags().StringVar(&template, "template", template, "policy to start from")
	_ = cmd.RegisterFlagCompletionFunc("template", cobra.FixedCompletions(policies.Names(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// scaffold is a new policy's folder.
type scaffold struct{ name, template string }

// module is the path of the policy's Go module: it has no dot, so it is not on the
// internet, and is not in the standard library.
func (s scaffold) module() string { return "policy/" + s.name }

// write fills the folder.
func (s scaffold) write(source fs.FS) error {
	const inSDK = "internal/sdk"
	if err := s.copy(source, ".", func(file string) bool { return file == "README.md" }); err != nil {
		return err
	}
	// The SDK's own tests need no place here; package sdktest does.
	if err := s.copy(policies.SDK(), inSDK, func(file string) bool {
		return strings.HasSuffix(file, "_test.go") || slices.Contains(strings.Split(file, "/"), "testdata")
	}); err != nil {
		return err
	}
	page, err := fs.ReadFile(source, "README.md")
	if err != nil {
		return err
	}
	for file, text := range map[string]string{
		"go.mod":             "module " + s.module() + "\n\ngo 1.24\n",
		".gitignore":         "*.wasm\n",
		"README.md":          s.readme(string(page)),
		inSDK + "/README.md": "The guest SDK of doze (Apache-2.0), as of doze " + version.String() + ". `doze policy new` put it here.\n",
	} {
		if err := os.WriteFile(filepath.Join(s.name, file), []byte(text), 0o666); err != nil {
			return err
		}
	}
	return nil
}

// copy copies files, with imports of the SDK led to the folder's own.
func (s scaffold) copy(from fs.FS, to string, skip func(file string) bool) error {
	return fs.WalkDir(from, ".", func(file string, entry fs.DirEntry, err error) error {
		target := filepath.Join(s.name, to, file)
		switch {
		case err != nil:
			return err
		case skip(file):
			return nil
		case entry.IsDir():
			return os.MkdirAll(target, 0o777)
		}
		text, err := fs.ReadFile(from, file)
		if err != nil {
			return err
		}
		if file == "tests.json" { // of the module that is built here
			text = bytes.ReplaceAll(text, []byte(`"name": "`+s.template+`"`), []byte(`"name": "`+s.name+`.wasm"`))
		}
		if strings.HasSuffix(file, ".go") {
			text = bytes.ReplaceAll(text, []byte(policies.ImportPath), []byte(s.module()+"/internal/sdk"))
		}
		return os.WriteFile(target, text, 0o666)
	})
}

// readme is the template's page with what to do first.
func (s scaffold) readme(page string) string {
	_, body, _ := strings.Cut(page, "\n")
	return fmt.Sprintf(`# %[1]s

A policy for doze, created from %[2]s. Its code is in main.go.

    go test ./...                                its code, by internal/sdk/sdktest
    doze policy build .                          %[1]s.wasm
    doze policy test tests.json                  as the node runs it
    doze policy test %[1]s.wasm request.json     one request, with what it costs

In rules its name is that under which it was pushed. Of %[2]s doze says:
%[3]s`, s.name, s.template, body)
}
