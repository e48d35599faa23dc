package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/cmd/internal/usage"
)

func (a *app) secretCommand() *cobra.Command {
	cmd := group("secret", "Secrets that policies put into requests of sandboxes",
		"Secrets that policies put into requests of sandboxes. Sandboxes never see them, and their values cannot be read again.")
	cmd.AddCommand(a.setSecretCommand(), a.listSecretsCommand(), a.removeSecretCommand())
	return cmd
}

// group is a command that only has others below it.
func group(name, short, long string) *cobra.Command {
	return &cobra.Command{Use: name, Short: short, Long: long}
}

func (a *app) setSecretCommand() *cobra.Command {
	var hosts []string
	var file string
	cmd := &cobra.Command{
		Use:   "set NAME",
		Short: "Make a secret, or replace its value and hosts",
		Long: `Make a secret, or replace its value and hosts. The value is read from the standard
input, or with --from-file from a file; it is never an argument, which other users of
this machine could see and the shell would remember. One newline at its end is not
part of it.

It is sent to the hosts that --host names, and to no others.`,
		Example: `  doze secret set github --host api.github.com < token.txt
  doze secret set deploy-key --host git.example.com --from-file key.pem`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 { // the unexpected argument may be the value: do not repeat it
				return errors.New("a value in the arguments is visible to other users; write it to the standard input, or name its file with --from-file")
			}
			return wants(1, 1)(cmd, args)
		},
		ValidArgsFunction: a.completeSecret,
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			if len(hosts) == 0 {
				return usage.Errorf("name the hosts that the secret may be sent to: --host api.github.com; may be repeated")
			}
			value, err := a.readSecret(file)
			if err != nil {
				return err
			}
			secret, err := node.PutSecret(ctx, args[0], value, hosts)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(secret)
			}
			_, err = fmt.Fprintf(a.out, "%s  version %d, for %s\n", clean(secret.Name), secret.Version, clean(strings.Join(secret.Hosts, " ")))
			return err
		}),
	}
	cmd.Flags().StringArrayVar(&hosts, "host", nil, "a host that it may be sent to, or *.example.com for all below one; may be repeated")
	cmd.Flags().StringVar(&file, "from-file", "", "read the value from this file")
	cmd.MarkFlagFilename("from-file")
	cmd.RegisterFlagCompletionFunc("host", cobra.NoFileCompletions)
	return cmd
}

// maxSecret is more than the API accepts, whose error then has its limit.
const maxSecret = 64<<10 + 2

// readSecret reads a value, without echo where a person types it.
func (a *app) readSecret(file string) ([]byte, error) {
	in := a.in
	if file != "" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	} else if screen, ok := in.(*os.File); ok && isTerminal(screen) {
		fmt.Fprint(a.err, "value (not shown): ")
		value, err := term.ReadPassword(int(screen.Fd()))
		fmt.Fprintln(a.err)
		return value, err
	}
	value, err := io.ReadAll(io.LimitReader(in, maxSecret+1))
	if err != nil {
		return nil, fmt.Errorf("read the value: %w", err)
	}
	if text, ok := strings.CutSuffix(string(value), "\n"); ok {
		value = []byte(strings.TrimSuffix(text, "\r"))
	}
	if len(value) == 0 {
		return nil, errors.New("there is no value; write it to the standard input, or name its file with --from-file")
	}
	return value, nil
}

func (a *app) listSecretsCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "ls",
		Short:             "List secrets, without their values",
		Args:              wants(0, 0),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: a.withNode(func(ctx context.Context, node *client.Client, _ []string) error {
			secrets, err := node.Secrets(ctx)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"secrets": secrets})
			}
			t := newTable(a.out, "NAME", "VERSION", "CHANGED", "HOSTS")
			for _, s := range secrets {
				hosts := strings.Join(s.Hosts, " ")
				if s.Unreadable {
					hosts = "cannot be decrypted: set it again"
				}
				t.row(s.Name, fmt.Sprint(s.Version), ago(s.UpdatedAt), hosts)
			}
			return t.flush()
		}),
	}
}

func (a *app) removeSecretCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "rm NAME...",
		Short:             "Forget secrets",
		Long:              "Forget secrets. Requests of rules that use them are refused from then on.",
		Args:              wants(1, -1),
		ValidArgsFunction: a.completeSecret,
		RunE: a.forEach(func(ctx context.Context, node *client.Client, name string) error {
			if err := node.DeleteSecret(ctx, name); err != nil {
				return err
			}
			return a.printGone(name)
		}),
	}
}

// printGone prints that a secret or a policy was removed.
func (a *app) printGone(name string) error {
	if a.json {
		return a.printJSON(map[string]string{"name": name, "state": "removed"})
	}
	_, err := fmt.Fprintf(a.out, "%s  removed\n", clean(name))
	return err
}

func (a *app) completeSecret(cmd *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
	return a.complete(cmd, word, func(ctx context.Context, node *client.Client) (names []string) {
		secrets, _ := node.Secrets(ctx)
		for _, s := range secrets {
			names = append(names, s.Name)
		}
		return names
	})
}
