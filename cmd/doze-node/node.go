package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/doze-run/doze/caddymodule"
	"github.com/doze-run/doze/caddymodule/inuse"
	"github.com/doze-run/doze/cmd/internal/home"
	"github.com/doze-run/doze/cmd/internal/version"
	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/runtime/store"
)

// packagedCaddyfile is where packages keep the node's configuration.
const packagedCaddyfile = "/etc/doze/Caddyfile"

func (a *app) runCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "run [--config FILE] [FLAGS OF CADDY]",
		Short: "Run a node in the foreground",
		// Caddy parses the flags, --help too.
		DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error {
			if !slices.Contains(args, "--help") && !slices.Contains(args, "-h") {
				if err := a.checkAlone(args); err != nil {
					return err
				}
			}
			return a.handOver(append([]string{"run"}, a.withCaddyfile(args)...))
		},
	}
}

func (a *app) caddyCommand() *cobra.Command {
	return &cobra.Command{
		Use:                "caddy COMMAND",
		Short:              "Run a command of Caddy",
		DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error {
			return a.handOver(args)
		},
	}
}

// checkAlone returns an error if another node uses the folder of a node with these
// arguments, or if another process listens on its addresses: otherwise Caddy would listen
// in parallel or remove the other's admin socket. Caddy reports a configuration that cannot
// be read.
func (a *app) checkAlone(args []string) error {
	folder, err := a.setHome()
	if err != nil {
		return err
	}
	flags := pflag.NewFlagSet("run", pflag.ContinueOnError)
	flags.ParseErrorsAllowlist.UnknownFlags = true
	flags.SetOutput(io.Discard)
	f := configFlags{}
	f.add(flags)
	config := &nodeConfig{}
	if flags.Parse(a.withCaddyfile(args)) == nil && f.file != "" {
		if text, err := f.read(a); err == nil {
			if adapted, _, err := f.adaptHere(text); err == nil {
				config = parseConfig(adapted)
			}
		}
	}
	var app caddymodule.App
	_ = json.Unmarshal(config.Apps.Doze, &app) // Caddy reports errors
	if err := store.InUse(node.StoreDir(cmp.Or(app.Data, folder))); err != nil {
		return err
	}
	return config.checkAddresses()
}

// checkAddresses returns an error if another process listens on one of the
// configuration's addresses, the admin endpoint's included.
func (c *nodeConfig) checkAddresses() error {
	listen := []string{c.adminAddress()}
	for _, server := range c.Apps.HTTP.Servers {
		listen = append(listen, server.Listen...)
	}
	replacer := caddy.NewReplacer()
	for _, text := range listen {
		address, err := caddy.ParseNetworkAddress(replacer.ReplaceAll(text, ""))
		switch {
		case err != nil: // for Caddy to report
		case address.IsUnixNetwork():
			err = checkSocket(address)
		default:
			err = inuse.CheckAll(address, false)
		}
		if err != nil && address.Network != "" {
			return err
		}
	}
	return nil
}

// checkSocket returns an error if a process listens on a Unix socket, which Caddy would
// replace with its own.
func checkSocket(address caddy.NetworkAddress) error {
	path, _, _ := strings.Cut(address.Host, "|") // and the file's mode
	conn, err := net.Dial(address.Network, path)
	if err != nil {
		return nil // no process listens
	}
	conn.Close()
	return fmt.Errorf("another process already listens on %s; stop it, or choose another path", path)
}

// setHome sets DOZE_HOME, which Caddyfiles use, to the home.
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

// withCaddyfile names the Caddyfile if the arguments do not.
func (a *app) withCaddyfile(args []string) []string {
	for _, arg := range args {
		name, _, _ := strings.Cut(arg, "=")
		if slices.Contains([]string{"--config", "-c", "--resume", "-r", "--help", "-h"}, name) || strings.HasPrefix(arg, "-c") && !strings.HasPrefix(arg, "--") {
			return args
		}
	}
	file := a.defaultCaddyfile()
	args = append(slices.Clone(args), "--config", file)
	if !slices.Contains(args, "--adapter") && adapterOf(file) != "" {
		args = append(args, "--adapter", adapterOf(file))
	}
	return args
}

// defaultCaddyfile is DOZE_CADDYFILE, the Caddyfile in the working directory, or the
// packaged one.
func (a *app) defaultCaddyfile() string {
	if file := a.getenv("DOZE_CADDYFILE"); file != "" {
		return file
	}
	if _, err := os.Stat("Caddyfile"); err == nil {
		return "Caddyfile"
	}
	return packagedCaddyfile
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
