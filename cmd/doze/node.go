package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/cmd/internal/version"
)

// nodeProgram has the commands that run and maintain a node: Caddy with doze's modules,
// which start too slowly for a client.
const nodeProgram = "doze-node"

// nodeCommands are those that nodeProgram has.
func (a *app) nodeCommands() []*cobra.Command {
	var commands []*cobra.Command
	for _, c := range []struct{ use, short string }{
		{"run [--config FILE] [FLAGS OF CADDY]", "Run a node in the foreground"},
		{"reload [--config FILE] [FLAGS OF CADDY]", "Load a changed Caddyfile into the running node; sandboxes and previews go on"},
		{"validate [--config FILE] [FLAGS OF CADDY]", "Check a Caddyfile"},
		{"caddy COMMAND", "Run a command of Caddy"},
		{"backup-node FILE|-", "Copy the node's own data, while it runs, into one file"},
		{"restore-node FILE|-", "Restore the node's own data from a file of backup-node"},
		{"doctor", "Check whether a node can run on this machine"},
	} {
		commands = append(commands, &cobra.Command{
			Use:   c.use,
			Short: c.short,
			// The node's program parses the flags, --help too.
			DisableFlagParsing: true,
			ValidArgsFunction:  completeFiles,
			RunE: func(cmd *cobra.Command, args []string) error {
				program, err := findNodeProgram()
				if err != nil {
					return err
				}
				return become(program, append([]string{program, cmd.Name()}, args...))
			},
		})
	}
	return commands
}

// findNodeProgram finds the node's program next to this one, or else in PATH.
func findNodeProgram() (string, error) {
	name := nodeProgram
	if runtime.GOOS == "windows" {
		name += ".exe"
	}
	if self, err := os.Executable(); err == nil {
		if self, err = filepath.EvalSymlinks(self); err == nil {
			if program, err := exec.LookPath(filepath.Join(filepath.Dir(self), name)); err == nil {
				return program, nil
			}
		}
	}
	program, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%s, which runs nodes, is not installed on this machine; "+
			"install it next to doze or in PATH (Linux only), or run this command on the node's machine", nodeProgram)
	}
	return program, nil
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of this program",
		Args:  wants(0, 0),
		RunE: func(*cobra.Command, []string) error {
			return a.print(nil, map[string]string{"version": version.String()}, "doze %s", version.String())
		},
	}
}
