package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
)

func (a *app) secretCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "secret",
		Short: "Secrets that policies put into requests of sandboxes",
		Long:  "Secrets that policies put into requests of sandboxes. Sandboxes never see them, and their values cannot be read again.",
	}
	cmd.AddCommand(a.setSecretCommand(), a.listSecretsCommand(),
		a.deleteCommand("Delete secrets", "Requests of rules that use them are denied from then on.", secretNames, (*client.Client).DeleteSecret))
	return cmd
}

func (a *app) setSecretCommand() *cobra.Command {
	var hosts []string
	var file string
	cmd := &cobra.Command{
		Use:   "set NAME",
		Short: "Create a secret, or replace its value and hosts",
		Long: `Create a secret, or replace its value and hosts. The value is read from standard input,
or with --from-file from a file: arguments are visible to other users of this machine,
and shells store them. One newline at its end is removed.

The secret is sent only to the hosts given by --host.`,
		Example: `  doze secret set github --host api.github.com < token.txt
  doze secret set deploy-key --host git.example.com --from-file key.pem`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 { // the unexpected argument may be the value: do not repeat it
				return errors.New("a value in the arguments is visible to other users; write it to standard input, or name its file with --from-file")
			}
			return wants(1, 1)(cmd, args)
		},
		ValidArgsFunction: a.complete(secretNames),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			if len(hosts) == 0 {
				return usage.Errorf("name the hosts that the secret may be sent to: --host api.github.com; may be repeated")
			}
			value, err := a.readSecret(file)
			if err != nil {
				return err
			}
			secret, err := node.PutSecret(ctx, args[0], value, hosts)
			return a.print(err, secret, "%s  version %d, for %s", secret.Name, secret.Version, strings.Join(secret.Hosts, " "))
		}),
	}
	cmd.Flags().StringArrayVar(&hosts, "host", nil, "host that it may be sent to, or *.example.com for all hosts below example.com; may be repeated")
	cmd.Flags().StringVar(&file, "from-file", "", "read the value from this file")
	cmd.MarkFlagFilename("from-file")
	return cmd
}

// maxSecret is more than the API accepts, whose error then has its limit.
const maxSecret = 64<<10 + 3

// readSecret reads a value, without echo where a person types it.
func (a *app) readSecret(file string) ([]byte, error) {
	if screen, ok := a.in.(*os.File); ok && file == "" && isTerminal(screen) {
		fmt.Fprint(a.err, "value (not shown): ")
		value, err := term.ReadPassword(int(screen.Fd()))
		fmt.Fprintln(a.err)
		return value, err
	}
	value, err := a.readInput("the value", file, maxSecret)
	if err != nil {
		return nil, err
	}
	if text, ok := bytes.CutSuffix(value, []byte("\n")); ok {
		value = bytes.TrimSuffix(text, []byte("\r"))
	}
	if len(value) == 0 {
		return nil, errors.New("no value; write it to standard input, or name its file with --from-file")
	}
	return value, nil
}

// readInput reads a file, or without one the standard input. It ignores the rest of a longer
// text.
func (a *app) readInput(what, file string, most int64) ([]byte, error) {
	in := a.in
	if file != "" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	text, err := io.ReadAll(io.LimitReader(in, most))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", what, err)
	}
	return text, nil
}

func (a *app) listSecretsCommand() *cobra.Command {
	heads := []any{"NAME", "VERSION", "CHANGED", "HOSTS"}
	return listCommand(a, "secrets", "List secrets, without their values", (*client.Client).Secrets, heads, func(s types.Secret) []any {
		hosts := strings.Join(s.Hosts, " ")
		if s.Unreadable {
			hosts = "cannot be decrypted: set it again"
		}
		return []any{s.Name, s.Version, ago(s.UpdatedAt), hosts}
	})
}

// deleteCommand removes what the node stores under names.
func (a *app) deleteCommand(short, long string, names lister, remove func(*client.Client, context.Context, string) error) *cobra.Command {
	return &cobra.Command{
		Use:               "rm NAME...",
		Short:             short,
		Long:              short + ". " + long,
		Args:              wants(1, -1),
		ValidArgsFunction: a.complete(names),
		RunE: a.forEach(func(ctx context.Context, node *client.Client, name string) error {
			return a.printGone(remove(node, ctx, name), name, "removed")
		}),
	}
}

func secretNames(ctx context.Context, node *client.Client, _ []string) []string {
	secrets, _ := node.Secrets(ctx)
	return texts(secrets, func(s types.Secret) string { return s.Name })
}
