package main

import (
	"fmt"
	"net/http"

	"github.com/spf13/cobra"
)

func (a *app) reloadCommand() *cobra.Command {
	var f configFlags
	var address string
	var force bool
	cmd := &cobra.Command{
		Use:   "reload",
		Short: "Load a changed Caddyfile into the running node; sandboxes and previews go on",
		Long: `Load a changed Caddyfile into the running node; sandboxes and previews go on.

The node replaces variables such as {$DOZE_HTTPS_PORT} from the environment that it was
started with, not from this shell's. If the node rejects the configuration, it keeps its
current one.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			text, err := f.read(a)
			if err != nil {
				return err
			}
			node, err := a.findAdmin(address, &f, text)
			if err != nil {
				return err
			}
			config, err := a.adaptAt(cmd.Context(), node, &f, text)
			if err != nil {
				return err
			}
			// With these Caddy knows that it may read the same file again by SIGUSR1.
			header := http.Header{"Caddy-Config-Source-File": {f.filename()}, "Caddy-Config-Source-Adapter": {f.adapterName()}}
			if force {
				header.Set("Cache-Control", "must-revalidate")
			}
			if _, err := node.request(cmd.Context(), http.MethodPost, "/load", header, config); err != nil {
				return fmt.Errorf("the node rejected the configuration and keeps its current one: %w", err)
			}
			return nil
		},
	}
	f.add(cmd.Flags())
	cmd.Flags().StringVar(&address, "address", "", "the node's admin endpoint (default: the one in the configuration)")
	cmd.Flags().BoolVarP(&force, "force", "f", false, "load the configuration even if it has not changed")
	return cmd
}
