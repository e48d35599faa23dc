package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
)

func (a *app) policyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Write, test and push policies, which inspect requests of sandboxes",
		Long: `Write, test and push policies. A policy is a WebAssembly module that inspects each
request of the rules that name it, and changes it, refuses it or responds to it. The commands
new, build and test need no node, and dev works without one.`,
		Example: `  doze policy new github --template bearer
  doze policy dev github
  doze policy build github
  doze policy test github/tests.json
  doze policy push github github/github.wasm`,
	}
	cmd.AddCommand(a.policyNewCommand(), a.policyDevCommand(), a.policyBuildCommand(), a.policyTestCommand(),
		a.pushPolicyCommand(), a.listPoliciesCommand(), a.policyLogsCommand(),
		a.deleteCommand("Delete policies that were pushed", "This fails while rules use them.", policyNames, (*client.Client).DeletePolicy))
	return cmd
}

func (a *app) policyBuildCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "build [DIR]",
		Short: "Compile a policy that is written in Go",
		Long: `Compile a policy that is written in Go, into DIR/NAME.wasm where NAME is the folder's.
It uses the Go toolchain of this machine. Modules in other languages are built by their
own compilers.`,
		Args: wants(0, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, err := filepath.Abs(cmp.Or(append(args, ".")...))
			if err != nil {
				return err
			}
			built, err := buildPolicy(cmd.Context(), dir, output)
			return a.print(err, built, "%s  %s", built.File, size(built.Bytes))
		},
		ValidArgsFunction: completeFolders,
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "write the module to this file")
	return cmd
}

// builtPolicy is a module that was built.
type builtPolicy struct {
	File   string `json:"file"`
	Bytes  int64  `json:"bytes"`
	Digest string `json:"digest"` // SHA-256 in hexadecimal
}

// buildPolicy compiles the program in a folder.
func buildPolicy(ctx context.Context, dir, output string) (builtPolicy, error) {
	info, err := os.Stat(dir)
	switch {
	case err != nil:
		return builtPolicy{}, err
	case !info.IsDir():
		return builtPolicy{}, fmt.Errorf("%s is not a folder; name the folder with the policy's main.go", dir)
	}
	if output == "" {
		output = filepath.Join(dir, filepath.Base(dir)+".wasm")
	}
	file, err := filepath.Abs(output)
	if err != nil {
		return builtPolicy{}, err
	}
	// Without symbols, which take a third of the module; panics have their names
	// all the same.
	build := exec.CommandContext(ctx, "go", "build", "-buildmode=c-shared", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", file, ".")
	build.Dir = dir
	build.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	switch {
	case ctx.Err() != nil:
		return builtPolicy{}, ctx.Err()
	case errors.Is(err, exec.ErrNotFound):
		return builtPolicy{}, errors.New("go is not in PATH; install Go 1.24 or later (https://go.dev/dl)")
	case err != nil:
		return builtPolicy{}, &buildError{dir, string(out), err}
	}
	wasm, err := os.ReadFile(file)
	if err != nil {
		return builtPolicy{}, err
	}
	return builtPolicy{output, int64(len(wasm)), fmt.Sprintf("%x", sha256.Sum256(wasm))}, nil
}

// buildError is a failure of the compiler, with its output.
type buildError struct {
	dir, output string
	err         error
}

func (e *buildError) Error() string {
	return fmt.Sprintf("build %s: %v: %s", e.dir, e.err, strings.TrimSpace(e.output))
}

func (e *buildError) Unwrap() error { return e.err }

// policyName is what policies can be called.
var policyName = regexp.MustCompile(`\A[a-z0-9_-]{1,64}\z`)
