package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/doze-run/doze/caddymodule"
	"github.com/doze-run/doze/cmd/internal/home"
	"github.com/doze-run/doze/cmd/internal/version"
	"github.com/doze-run/doze/runtime/store"
)

// packagedCaddyfile is where packages keep the node's configuration.
const packagedCaddyfile = "/etc/doze/Caddyfile"

func (a *app) runCommand() *cobra.Command {
	cmd := a.caddyfileCommand("run", "Run a node in the foreground")
	cmd.PreRunE = func(_ *cobra.Command, args []string) error {
		if slices.Contains(args, "--help") || slices.Contains(args, "-h") {
			return nil
		}
		data, err := a.dataFolder(args)
		if err != nil {
			return err
		}
		// Before Caddy takes the admin socket from the node that has it.
		return store.InUse(filepath.Join(data, "store"))
	}
	return cmd
}

// dataFolder is where a node with these arguments keeps its data: what its
// configuration says, or else the home. A configuration that cannot be read is
// for Caddy to report.
func (a *app) dataFolder(args []string) (string, error) {
	folder, err := a.setHome()
	if err != nil {
		return "", err
	}
	flags := pflag.NewFlagSet("run", pflag.ContinueOnError)
	flags.ParseErrorsAllowlist.UnknownFlags = true
	flags.SetOutput(io.Discard)
	file, adapter := flags.StringP("config", "c", "", ""), flags.StringP("adapter", "a", "", "")
	if flags.Parse(a.withCaddyfile(args)) != nil {
		return folder, nil
	}
	text, err := os.ReadFile(*file)
	if err != nil {
		return folder, nil
	}
	if *adapter != "" || filepath.Ext(*file) != ".json" {
		adapts := caddyconfig.GetAdapter(cmp.Or(*adapter, "caddyfile"))
		if adapts == nil {
			return folder, nil
		}
		if text, _, err = adapts.Adapt(text, map[string]any{"filename": *file}); err != nil {
			return folder, nil
		}
	}
	var config struct {
		Apps struct {
			Doze struct {
				Data string `json:"data"`
			} `json:"doze"`
		} `json:"apps"`
	}
	if json.Unmarshal(text, &config) != nil {
		return folder, nil
	}
	return cmp.Or(config.Apps.Doze.Data, folder), nil
}

// setHome sets DOZE_HOME, of which the Caddyfile speaks, to the home.
func (a *app) setHome() (string, error) {
	folder, err := home.Folder(a.getenv)
	if err != nil {
		return "", err
	}
	if err := os.Setenv(home.Variable, folder); err != nil {
		return "", fmt.Errorf("set %s: %w", home.Variable, err)
	}
	return folder, nil
}

func (a *app) reloadCommand() *cobra.Command {
	return a.caddyfileCommand("reload", "Give a running node its changed Caddyfile; sandboxes and previews go on")
}

func (a *app) validateCommand() *cobra.Command {
	return a.caddyfileCommand("validate", "Check a Caddyfile")
}

// caddyfileCommand hands over to the command of Caddy with the same name.
func (a *app) caddyfileCommand(name, short string) *cobra.Command {
	return &cobra.Command{
		Use:   name + " [--config FILE] [FLAGS OF CADDY]",
		Short: short,
		// Caddy reads the flags, --help too.
		DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error {
			return a.handOver(append([]string{name}, a.withCaddyfile(args)...))
		},
	}
}

func (a *app) caddyCommand() *cobra.Command {
	return &cobra.Command{
		Use:                "caddy COMMAND",
		Short:              "Any command of Caddy",
		DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error {
			return a.handOver(args)
		},
	}
}

// withCaddyfile names the Caddyfile if the arguments do not.
func (a *app) withCaddyfile(args []string) []string {
	for _, arg := range args {
		name, _, _ := strings.Cut(arg, "=")
		if slices.Contains([]string{"--config", "-c", "--resume", "-r", "--help", "-h"}, name) || strings.HasPrefix(arg, "-c") && !strings.HasPrefix(arg, "--") {
			return args
		}
	}
	file := a.getenv("DOZE_CADDYFILE")
	if file == "" {
		file = "Caddyfile"
		if _, err := os.Stat(file); err != nil {
			file = packagedCaddyfile
		}
	}
	args = append(slices.Clone(args), "--config", file)
	if !slices.Contains(args, "--adapter") && !strings.HasPrefix(filepath.Base(file), "Caddyfile") && filepath.Ext(file) != ".json" {
		args = append(args, "--adapter", "caddyfile")
	}
	return args
}

// handOver runs Caddy's own command line, which ends the program.
func (a *app) handOver(args []string) error {
	if _, err := a.setHome(); err != nil {
		return err
	}
	caddy.CustomBinaryName = "doze caddy"
	caddymodule.Version = version.String()
	os.Args = append(os.Args[:1:1], args...)
	caddycmd.Main()
	return nil
}
