package main

import (
	"cmp"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
)

func (a *app) contextCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "context",
		Short: "Interpreters that keep their state from one piece of code to the next",
		Long: `Interpreters that keep their state from one piece of code to the next: variables,
imports and functions. doze code executes code in them. They sleep with their sandbox,
and end when it stops. The contexts python, javascript and typescript are opened by
their first code.`,
		Example: `  doze context create shop python analysis --cwd /srv/shop
  doze code shop --context analysis 'x = 6 * 7'
  doze code shop --context analysis x
  doze context rm shop analysis`,
	}
	cmd.AddCommand(a.createContextCommand(), a.listContextsCommand(),
		partCommand(a, "interrupt SANDBOX CONTEXT", "Interrupt the code that a context executes", "Interrupt the code that a context executes, as Ctrl-C does. The context goes on.", "interrupted", contextIDs, (*client.Client).InterruptContext),
		partCommand(a, "restart SANDBOX CONTEXT", "Start the interpreter of a context again", "Start the interpreter of a context again, without its state; also if it has ended.", "restarted", contextIDs, (*client.Client).RestartContext),
		partCommand(a, "rm SANDBOX CONTEXT", "Close a context", "Close a context: its interpreter ends, with all that it started.", "closed", contextIDs, (*client.Client).CloseContext))
	return cmd
}

func (a *app) createContextCommand() *cobra.Command {
	var req types.OpenContextRequest
	var env []string
	cmd := &cobra.Command{
		Use:               "create SANDBOX LANGUAGE [CONTEXT]",
		Short:             "Open a context, and print its id",
		Long:              "Open a context of a language (python, javascript or typescript), and print its id, which is\ngenerated if none is given. This wakes the sandbox.",
		Args:              wants(2, 3),
		ValidArgsFunction: a.complete(sandboxAndLanguage),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) (err error) {
			req.Language = types.Language(args[1])
			if len(args) > 2 {
				req.ID = args[2]
			}
			if req.Env, err = a.environ(env); err != nil {
				return err
			}
			c, err := node.OpenContext(ctx, args[0], req)
			return a.print(err, c, "%s", c.ID)
		}),
	}
	cmd.Flags().StringVarP(&req.Cwd, "cwd", "w", "", "working directory at the start")
	cmd.Flags().StringArrayVarP(&env, "env", "e", nil, "environment variable KEY=VALUE, or KEY with its value in this shell; may be repeated")
	return cmd
}

func (a *app) listContextsCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "ls SANDBOX",
		Short:             "List the contexts of a sandbox",
		Long:              "List the contexts of a sandbox, as last known. This never wakes the sandbox.",
		Args:              wants(1, 1),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			contexts, err := node.Contexts(ctx, args[0])
			if err != nil {
				return err
			}
			heads := []any{"ID", "LANGUAGE", "PROCESS", "STATE", "STARTED", "CWD"}
			return printTable(a, "contexts", contexts, heads, func(c types.Context) []any {
				return []any{c.ID, c.Language, c.Process, stateOrEnd(c.State, c.Reason, c.Signal, c.ExitCode), ago(c.StartedAt), c.Cwd}
			})
		}),
	}
}

// sandboxAndLanguage lists sandboxes, and then languages.
func sandboxAndLanguage(ctx context.Context, node *client.Client, args []string) []string {
	if len(args) == 1 {
		return textsOf(types.Language("").Values())
	}
	return oneSandbox(ctx, node, args)
}

// contextFlag lists the contexts of the sandbox that args name.
func contextFlag(ctx context.Context, node *client.Client, args []string) []string {
	if len(args) == 0 {
		return nil
	}
	return contextIDs(ctx, node, args[:1])
}

// contextIDs lists sandboxes, and then the contexts of the named one.
func contextIDs(ctx context.Context, node *client.Client, args []string) []string {
	if len(args) != 1 {
		return oneSandbox(ctx, node, args)
	}
	contexts, _ := node.Contexts(ctx, args[0])
	return texts(contexts, func(c types.Context) string { return c.ID })
}

// codeFlags are the flags of code.
type codeFlags struct {
	context, language, file, save string
	timeout                       time.Duration
}

func (a *app) codeCommand() *cobra.Command {
	var f codeFlags
	cmd := &cobra.Command{
		Use:   "code SANDBOX [CODE]",
		Short: "Execute code in a context of a sandbox",
		Long: `Execute code in a context of a sandbox, waking it if it sleeps. Output is printed as it
is written, and values as text. The state of the context persists: see doze context
--help. Without CODE, the code is read from a file (-f) or from standard input.

With --save, values that are pictures, pages or other files are written to a folder, and
their paths are printed. When the code updates such a value, its file is replaced; other
updates are printed again. Output that the code clears stays.

Ctrl-C interrupts the code. doze exits with 1 if the code raised an exception or exceeded
its timeout.`,
		Example: `  doze code shop 'import math; math.pi'
  doze code shop -f analysis.py --save .
  doze code shop -l typescript 'const n: number = await Promise.resolve(42); n'`,
		Args:              wants(1, 2),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			return a.code(ctx, node, f, args)
		}),
	}
	flags := cmd.Flags()
	flags.StringVar(&f.context, "context", "", "id of the context (default: the language's own)")
	cmd.RegisterFlagCompletionFunc("context", a.complete(contextFlag))
	flags.StringVarP(&f.language, "language", "l", "", "python (the default), javascript or typescript")
	cmd.RegisterFlagCompletionFunc("language", cobra.FixedCompletions(textsOf(types.Language("").Values()), cobra.ShellCompDirectiveNoFileComp))
	flags.StringVarP(&f.file, "file", "f", "", "file with the code")
	flags.StringVar(&f.save, "save", "", "folder to write values to that are files")
	flags.DurationVar(&f.timeout, "timeout", 0, "time after which the code is interrupted (default never)")
	return cmd
}

func (a *app) code(ctx context.Context, node *client.Client, f codeFlags, args []string) error {
	if f.context != "" && f.language != "" {
		return usage.Errorf("--context and --language exclude each other; a context has a language")
	}
	if f.language != "" && !slices.Contains(types.Language("").Values(), types.Language(f.language)) {
		return usage.Errorf("--language %s is not known; use python, javascript or typescript", f.language)
	}
	if f.timeout < 0 {
		return usage.Errorf("--timeout %s is negative; write it like 30s", f.timeout)
	}
	req := client.RunCodeRequest{Context: cmp.Or(f.context, f.language, "python"), Timeout: types.Duration(f.timeout)}
	if f.timeout == 0 {
		req.Timeout = client.NoTimeout // Ctrl-C ends it
	}
	var err error
	if req.Code, err = a.codeOf(f.file, args[1:]); err != nil {
		return err
	}
	if a.json {
		result, err := node.RunCode(ctx, args[0], req)
		if err == nil {
			err = a.printJSON(result)
		}
		if err == nil && (result.Error != nil || result.TimedOut) {
			err = exitCode(exitFailed)
		}
		return err
	}
	failed := false
	values := valuePrinter{out: a.out, folder: f.save, displayed: map[string]string{}}
	end, err := node.RunCodeStream(ctx, args[0], req, client.CodeEvents{
		Stdout: func(b []byte) error { _, err := a.out.Write(b); return err },
		Stderr: func(b []byte) error { _, err := a.err.Write(b); return err },
		Result: values.print,
		Error: func(e types.CodeError) error {
			failed = true
			lines := e.Traceback
			if len(lines) == 0 {
				lines = []string{e.Name + ": " + e.Message}
			}
			_, err := fmt.Fprintln(a.err, clean(strings.Join(lines, "\n")))
			return err
		},
	})
	if err != nil {
		return err
	}
	if end.Truncated {
		fmt.Fprintln(a.err, "doze: output beyond the limit was dropped")
	}
	if end.TimedOut {
		fmt.Fprintln(a.err, "doze: the code was interrupted because it exceeded its timeout")
	}
	if failed || end.TimedOut {
		return exitCode(exitFailed)
	}
	return nil
}

// codeOf returns the code of the argument, a file or standard input.
func (a *app) codeOf(file string, words []string) (string, error) {
	var b []byte
	var err error
	switch {
	case file != "" && len(words) > 0:
		return "", usage.Errorf("code and --file exclude each other; give one of them")
	case len(words) > 0:
		return words[0], nil
	case file != "":
		b, err = os.ReadFile(file)
	default:
		b, err = io.ReadAll(a.in)
	}
	return string(b), err
}

// valueFile is a file that a value becomes.
type valueFile struct {
	mime, extension string
	base64          bool // in JSON
}

// valueFiles are the files that values become, the best first.
var valueFiles = []valueFile{
	{"image/png", ".png", true}, {"image/jpeg", ".jpg", true}, {"image/svg+xml", ".svg", false}, {"application/pdf", ".pdf", true}, {"text/html", ".html", false},
}

// valuePrinter prints values as text, or writes them to a folder and prints their paths.
type valuePrinter struct {
	out    io.Writer
	folder string // "" for none
	files  int    // files written
	// displayed are the paths of the values that the code may update, by their display_id.
	displayed map[string]string
}

// print prints a value. An update of a value that was written to a file prints nothing, unless
// the path changes with the type.
func (p *valuePrinter) print(v types.CodeValue) error {
	text, _ := v.Data["text/plain"].(string)
	i := slices.IndexFunc(valueFiles, func(f valueFile) bool { _, ok := v.Data[f.mime].(string); return ok })
	switch {
	case i >= 0 && p.folder != "":
		path, known, err := p.save(v, valueFiles[i])
		if err != nil || known {
			return err
		}
		text = path
	case i >= 0 && text == "":
		text = "<" + valueFiles[i].mime + ">"
	}
	_, err := fmt.Fprintln(p.out, clean(text))
	return err
}

// save writes a value to a file: an update to the file of the value that it replaces. known
// reports whether the path was returned before.
func (p *valuePrinter) save(v types.CodeValue, file valueFile) (path string, known bool, err error) {
	content := []byte(v.Data[file.mime].(string))
	if file.base64 {
		if content, err = base64.StdEncoding.DecodeString(string(content)); err != nil {
			return "", false, fmt.Errorf("decode the %s of a value: %w", file.mime, err)
		}
	}
	before := ""
	if v.Update {
		before = p.displayed[v.DisplayID]
	}
	if before == "" {
		p.files++
		path = filepath.Join(p.folder, fmt.Sprintf("result-%d%s", p.files, file.extension))
	} else {
		path = strings.TrimSuffix(before, filepath.Ext(before)) + file.extension
	}
	if err := os.WriteFile(path, content, 0o644); err != nil {
		return "", false, err
	}
	if before != "" && before != path {
		if err := os.Remove(before); err != nil {
			return "", false, err
		}
	}
	if v.DisplayID != "" {
		p.displayed[v.DisplayID] = path
	}
	return path, path == before, nil
}
