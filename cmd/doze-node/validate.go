package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/spf13/cobra"

	"github.com/doze-run/doze/caddymodule"
)

func (a *app) validateCommand() *cobra.Command {
	var f configFlags
	var address string
	cmd := &cobra.Command{
		Use:   "validate",
		Short: "Check a Caddyfile",
		Long: `Check a Caddyfile: everything that a reload checks, without changing the node or any file.

If the node runs, variables such as {$DOZE_HTTPS_PORT} are replaced from its environment,
and the policies that were pushed to it are known. Otherwise variables are replaced from
this shell's environment.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			text, err := f.read(a)
			if err != nil {
				return err
			}
			if err := a.validate(ctx, address, &f, text); err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.out, "Valid configuration")
			return err
		},
	}
	f.add(cmd.Flags())
	cmd.Flags().StringVar(&address, "address", "", "the node's admin endpoint (default: the one in the configuration)")
	return cmd
}

func (a *app) validate(ctx context.Context, address string, f *configFlags, text []byte) error {
	node, err := a.findAdmin(address, f, text)
	running := err == nil
	var config []byte
	if running {
		config, err = a.adaptAt(ctx, node, f, text)
		if errors.Is(err, errNoNode) && address == "" {
			running = false
		} else if err != nil {
			return err
		}
	}
	if !running {
		adapted, warnings, err := f.adaptHere(text)
		if err != nil {
			return err
		}
		a.warn(warnings)
		config = adapted
	}
	if err := provision(config); err != nil {
		return err
	}
	app := parseConfig(config).Apps.Doze
	if app == nil {
		return nil
	}
	if running {
		_, err := node.request(ctx, http.MethodPost, "/doze/check", nil, app)
		return err
	}
	others, err := caddymodule.CheckPolicies(ctx, app, a.policyCompiler)
	if err == nil && len(others) > 0 {
		fmt.Fprintf(a.err, "doze: not checked, because no node runs: doze does not ship the policies %s, which must have been pushed\n", strings.Join(others, ", "))
	}
	return err
}

// provision has Caddy provision and validate all modules of a configuration, without
// writing anything of the node's: certificate authorities and the database of acme_server,
// which the running node has locked, are made in a temporary folder, and logs are discarded.
func provision(config []byte) (err error) {
	var raw map[string]any
	if err := json.Unmarshal(config, &raw); err != nil {
		return fmt.Errorf("decode the configuration: %w", err)
	}
	if raw["storage"] != nil { // which is replaced below
		storage, _ := lookup(raw, "storage")
		if _, err := caddy.GetModule(fmt.Sprintf("caddy.storage.%v", storage["module"])); err != nil {
			return fmt.Errorf("storage: %w", err)
		}
	}
	data, err := os.MkdirTemp("", "doze-validate-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(data)) }()
	if err := os.Setenv("XDG_DATA_HOME", data); err != nil { // see caddy.AppDataDir
		return err
	}
	raw["storage"] = map[string]any{"module": "file_system", "root": data}
	logs, _ := lookup(raw, "logging", "logs")
	for name := range logs {
		if log, ok := lookup(logs, name); ok {
			log["writer"] = map[string]any{"output": "discard"}
		}
	}
	authorities, _ := lookup(raw, "apps", "pki", "certificate_authorities")
	for name := range authorities {
		if authority, ok := lookup(authorities, name); ok {
			delete(authority, "storage")
		}
	}
	withoutFiles, err := json.Marshal(raw)
	if err != nil {
		return err
	}
	var cfg *caddy.Config
	if err := caddy.StrictUnmarshalJSON(withoutFiles, &cfg); err != nil {
		return fmt.Errorf("decode the configuration: %w", err)
	}
	return caddy.Validate(cfg)
}

// lookup finds an object within objects.
func lookup(object map[string]any, path ...string) (map[string]any, bool) {
	for _, name := range path {
		inner, ok := object[name].(map[string]any)
		if !ok {
			return nil, false
		}
		object = inner
	}
	return object, true
}
