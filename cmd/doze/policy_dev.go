package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/cmd/internal/display"
	"github.com/doze-run/doze/cmd/internal/usage"
)

func (a *app) policyDevCommand() *cobra.Command {
	d := developer{app: a}
	var noPush, once bool
	cmd := &cobra.Command{
		Use:   "dev [DIR]",
		Short: "Build, test and push a policy whenever it changes",
		Long: `Build, test and push a policy whenever a file in DIR changes, until Ctrl-C. DIR contains a
policy in Go, as for "doze policy build". The tests are DIR's files tests.json and
NAME.tests.json, as for "doze policy test". A policy that does not build, or that fails a
test, is not pushed, and the node keeps the previous version.

Hidden files and folders, the module itself and temporary files of editors do not count
as changes.`,
		Example: `  doze policy dev github
  doze policy dev github --no-push`,
		Args: wants(0, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if d.dir, err = filepath.Abs(cmp.Or(append(args, ".")...)); err != nil {
				return err
			}
			d.file = filepath.Join(d.dir, filepath.Base(d.dir)+".wasm")
			if !noPush {
				d.name = cmp.Or(d.name, filepath.Base(d.dir))
				if !policyName.MatchString(d.name) {
					return usage.Errorf("%.80q is not a valid name of a policy; give one of a-z, 0-9, - and _ with --name", d.name)
				}
				if d.node, err = a.node(); err != nil {
					return fmt.Errorf("%w; --no-push builds and tests without a node", err)
				}
			}
			if once {
				return d.round(cmd.Context())
			}
			return d.watch(cmd.Context())
		},
		ValidArgsFunction: completeFolders,
	}
	f := cmd.Flags()
	f.StringVar(&d.name, "name", "", "push under this name (default: the folder's)")
	f.BoolVar(&noPush, "no-push", false, "build and test only, without a node")
	f.BoolVar(&once, "once", false, "run once, and exit with 1 if a step failed")
	f.StringArrayVar(&d.secrets, "secret", nil, "secret of the tests, NAME=VALUE or NAME=@FILE")
	return cmd
}

// developer builds, tests and pushes one policy.
type developer struct {
	*app
	dir, file string         // the policy's program and its module
	node      *client.Client // nil: the policy is not pushed
	name      string         // on the node
	secrets   []string       // flags
}

// watch does a round, and another one after each change, until ctx ends.
func (d *developer) watch(ctx context.Context) error {
	w, err := watchFolder(d.dir, d.file)
	if err != nil {
		return err
	}
	defer w.close()
	for first := true; ; first = false {
		err := d.round(ctx)
		if _, failed := errors.AsType[exitCode](err); err != nil && ctx.Err() == nil && !failed {
			return err
		}
		if first && ctx.Err() == nil {
			if err := d.report(devStep{Step: "watch", OK: true, Message: d.dir + "; Ctrl-C exits"}); err != nil {
				return err
			}
		}
		changed, err := w.next(ctx)
		if ctx.Err() != nil {
			return nil // Ctrl-C is how this command ends
		}
		if err != nil {
			return err
		}
		if err := d.report(devStep{Step: "change", OK: true, Message: strings.Join(changed, ", ")}); err != nil {
			return err
		}
	}
}

// devStep is what became of a step.
type devStep struct {
	Step       string  `json:"step"` // build, test, push; also watch and change
	OK         bool    `json:"ok"`
	Message    string  `json:"message"`
	DurationMS float64 `json:"duration_ms,omitempty"`
	Output     string  `json:"output,omitempty"` // of a step that failed
}

// round builds, tests and pushes. It ends with the first step that fails, and returns its
// exitCode; other errors are failures to print, or ctx's.
func (d *developer) round(ctx context.Context) error {
	steps := []struct {
		name string
		run  func(context.Context) (devStep, error)
	}{{"build", d.build}, {"test", d.test}, {"push", d.push}}
	if d.node == nil {
		steps = steps[:2]
	}
	for _, s := range steps {
		began := time.Now()
		done := d.waiting(s.name)
		result, err := s.run(ctx)
		done()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			result = devStep{Message: "failed", Output: errorText(err)}
		case result.Message == "":
			continue // there is nothing to do
		}
		result.Step, result.DurationMS = s.name, ms(time.Since(began))
		if err := d.report(result); err != nil {
			return err
		}
		if !result.OK {
			return exitCode(exitFailed)
		}
	}
	return nil
}

// errorText is an error as it is printed: a compiler's output without what
// precedes it.
func errorText(err error) string {
	if failed, ok := errors.AsType[*buildError](err); ok && strings.TrimSpace(failed.output) != "" {
		return strings.TrimSpace(failed.output)
	}
	var b bytes.Buffer
	(&app{err: &b}).complain(err)
	return strings.TrimSpace(strings.TrimPrefix(b.String(), "doze: "))
}

func (d *developer) build(ctx context.Context) (devStep, error) {
	built, err := buildPolicy(ctx, d.dir, "")
	return devStep{OK: true, Message: filepath.Base(d.file) + ", " + size(built.Bytes)}, err
}

// test runs all suites. Without any, the step has no message.
func (d *developer) test(ctx context.Context) (devStep, error) {
	var failed []testResult
	count := 0
	for _, pattern := range []string{"tests.json", "*.tests.json"} {
		files, err := filepath.Glob(filepath.Join(globQuote(d.dir), pattern))
		if err != nil {
			return devStep{}, err
		}
		for _, file := range files {
			s, err := readSuite(file, d.secrets)
			if err != nil {
				return devStep{}, err
			}
			results, err := s.run(ctx, d.policies)
			if err != nil {
				return devStep{}, err
			}
			count += len(results)
			failed = append(failed, slices.DeleteFunc(results, func(r testResult) bool { return r.OK })...)
		}
	}
	switch {
	case count == 0:
		return devStep{}, nil
	case len(failed) == 0:
		return devStep{OK: true, Message: fmt.Sprintf("%d of %d tests passed", count, count)}, nil
	}
	var output bytes.Buffer
	err := printResults(&output, failed)
	return devStep{Message: fmt.Sprintf("%d of %d tests failed", len(failed), count), Output: output.String()}, err
}

func (d *developer) push(ctx context.Context) (devStep, error) {
	policy, err := pushFile(ctx, d.node, d.name, d.file)
	d.warn(policy.Warnings)
	return devStep{OK: true, Message: policy.Name + ", " + shortDigest(policy.Digest)}, err
}

// report prints a step.
func (d *developer) report(s devStep) error {
	if d.json {
		return display.JSON(d.out, s, "")
	}
	line := fmt.Sprintf("%-6s  %s", s.Step, clean(s.Message))
	if s.DurationMS > 0 {
		line += "  " + milliseconds(s.DurationMS)
	}
	_, err := fmt.Fprintln(d.out, line)
	return errors.Join(err, indent(d.out, "        ", s.Output))
}

// globQuote quotes a path for filepath.Glob.
func globQuote(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}
