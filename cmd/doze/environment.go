package main

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/cmd/internal/home"
)

// node returns the client of the node.
func (a *app) node() (_ *client.Client, err error) {
	if a.api == nil {
		a.api, err = home.Client(a.getenv, a.apiURL, a.caFile)
	}
	return a.api, err
}

// withNode runs a command that speaks to the node.
func (a *app) withNode(run func(ctx context.Context, node *client.Client, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		node, err := a.node()
		if err != nil {
			return err
		}
		return run(cmd.Context(), node, args)
	}
}

// forEach runs a command for each of the sandboxes that its arguments name. An
// error does not keep it from the others; all but the last are printed.
func (a *app) forEach(do func(ctx context.Context, node *client.Client, name string) error) func(*cobra.Command, []string) error {
	return a.withNode(func(ctx context.Context, node *client.Client, names []string) error {
		var last error
		for _, name := range names {
			err := do(ctx, node, name)
			if err == nil {
				continue
			}
			if last != nil {
				a.complain(last)
			}
			last = err
		}
		return last
	})
}

func (a *app) envCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "env",
		Short: "Print shell variables for the node on this machine",
		Long: `Print shell variables for the node on this machine:

  eval "$(doze env)"

DOZE_API, DOZE_TOKEN and DOZE_CA are for doze and for programs that use the API. With the
others, curl, Python (urllib, requests, httpx), Node.js, Go and programs with OpenSSL trust
the node's certificates in addition to those that they already trust: SSL_CERT_FILE, CURL_CA_BUNDLE
and REQUESTS_CA_BUNDLE name a file with both, which this command writes into your cache
folder, and NODE_EXTRA_CA_CERTS the node's CA alone.

DOZE_HOME and DOZE_HTTPS_PORT select the node.`,
		Args: wants(0, 0),
		RunE: func(*cobra.Command, []string) error {
			acc, err := home.Local(a.getenv)
			if err != nil {
				return err
			}
			if acc.Token == "" {
				return fmt.Errorf("%s cannot be read; start the node, or set DOZE_HOME to its folder", filepath.Join(acc.Home, "token"))
			}
			variables := [][2]string{{"DOZE_API", acc.URL}, {"DOZE_TOKEN", acc.Token}, {"DOZE_CA", acc.CA}, {"NODE_EXTRA_CA_CERTS", acc.CA}}
			bundle, err := a.trustBundle(acc.CA)
			if err != nil {
				fmt.Fprintf(a.err, "doze: SSL_CERT_FILE, CURL_CA_BUNDLE and REQUESTS_CA_BUNDLE are omitted: %s\n", clean(err.Error()))
			} else {
				for _, name := range bundleVariables {
					variables = append(variables, [2]string{name, bundle})
				}
			}
			named := map[string]string{}
			var text strings.Builder
			for _, v := range variables {
				named[v[0]] = v[1]
				fmt.Fprintf(&text, "export %s=%s\n", v[0], shellQuote(v[1]))
			}
			if a.json {
				return a.printJSON(named)
			}
			_, err = io.WriteString(a.out, text.String())
			return err
		},
	}
}

// shellQuote writes s as one word of a POSIX shell.
func shellQuote(s string) string {
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
