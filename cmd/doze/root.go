package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/cmd/internal/version"
)

const (
	groupSandboxes = "sandboxes"
	groupSandbox   = "inside"
	groupEgress    = "egress"
	groupNode      = "node"
)

func (a *app) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "doze",
		Short: "Sandboxes that sleep until someone knocks",
		Long: `Sandboxes that sleep until someone knocks.

Commands for sandboxes call the node's API. Its address, token and CA are in DOZE_API,
DOZE_TOKEN and DOZE_CA, or else in the folder of the node on this machine (DOZE_HOME).`,
		Example: `  doze create shop
  doze exec shop -- node --version
  doze exec -d --name web --restart on_wake shop -- npm run dev
  doze expose shop 3000`,
		SilenceUsage:               true,
		SilenceErrors:              true,
		SuggestionsMinimumDistance: 2,
		Args:                       cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			hint := ""
			if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
				hint = " did you mean " + strings.Join(near, " or ") + "?"
			}
			return usage.Errorf("unknown command %q;%s doze --help lists the commands", args[0], hint)
		},
	}
	root.PersistentFlags().BoolVar(&a.json, "json", false, "print the API's JSON")
	root.PersistentFlags().StringVar(&a.apiURL, "api", "", "address of the API (default $DOZE_API, or this machine's node)")
	root.PersistentFlags().StringVar(&a.caFile, "ca", "", "file with the CA of the node's certificate (default $DOZE_CA, or this machine's node's)")
	root.Version = version.String()
	root.SetVersionTemplate("doze {{.Version}}\n")
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	root.MarkPersistentFlagFilename("ca")
	root.AddGroup(
		&cobra.Group{ID: groupSandboxes, Title: "Sandboxes:"},
		&cobra.Group{ID: groupSandbox, Title: "Inside a sandbox:"},
		&cobra.Group{ID: groupEgress, Title: "Traffic of sandboxes:"},
		&cobra.Group{ID: groupNode, Title: "The node:"},
	)
	add := func(group string, commands ...*cobra.Command) {
		for _, cmd := range commands {
			cmd.GroupID = group
			root.AddCommand(cmd)
		}
	}
	add(groupSandboxes, a.createCommand(), a.listCommand(), a.showCommand(), a.sleepCommand(), a.wakeCommand(), a.stopCommand(), a.archiveCommand(),
		a.holdCommand(), a.updateCommand(), a.removeCommand(), a.adoptCommand(), a.eventsCommand(), a.topCommand())
	add(groupSandboxes, a.snapshotCommand(), a.restoreCommand(), a.forkCommand(), a.backupCommand(), a.mountCommand(), a.historyCommand())
	add(groupSandbox, a.execCommand(), a.shellCommand(), a.sessionCommand(), a.codeCommand(), a.contextCommand(), a.copyCommand(), a.filesCommand(), a.watchCommand(), a.psCommand(), a.waitCommand(), a.portsCommand(), a.logsCommand(), a.killCommand(), a.exposeCommand(), a.openCommand())
	add(groupEgress, a.egressCommand(), a.policyCommand(), a.secretCommand())
	add(groupSandbox, a.gitCommand())
	add(groupNode, append(a.nodeCommands(), a.dfCommand(), a.envCommand(), a.versionCommand())...)
	root.InitDefaultCompletionCmd()
	setHelpCommand(root)
	usage.Check(root, flagError)
	return root
}

// setHelpCommand makes cobra's command help fail for an unknown command.
func setHelpCommand(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	help, _, _ := root.Find([]string{"help"})
	help.Use, help.Long, help.Run = "help [COMMAND]", "", nil
	help.RunE = func(cmd *cobra.Command, args []string) error {
		found, rest, err := cmd.Root().Find(args)
		if err != nil || len(rest) > 0 {
			return usage.Errorf("unknown command %q; doze --help lists the commands", strings.Join(args, " "))
		}
		found.InitDefaultHelpFlag()
		return found.Help()
	}
}

// flagError adds the command's help to an error, and for exec the usual cause.
func flagError(cmd *cobra.Command, err error) error {
	hint := cmd.CommandPath() + " --help lists its flags"
	if passesExitCodes(cmd) && strings.HasPrefix(err.Error(), "unknown") {
		hint = "put -- before a command that has flags of its own: " + cmd.CommandPath() + " SANDBOX -- COMMAND…"
		interactive := []string{"'i' in -i", "'t' in -t", "flag: --interactive", "flag: --tty"} // as for docker exec
		if slices.ContainsFunc(interactive, func(flag string) bool { return strings.Contains(err.Error(), flag) }) {
			hint = "omit -i and -t: standard input is read without a flag (-n prevents it), and doze shell has a terminal"
		}
	}
	return fmt.Errorf("%w; %s", err, hint)
}

// wants returns a check of the number of arguments; most < 0 means any. The error
// names the missing or unexpected argument and the usage of the command.
func wants(least, most int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		_, usage, _ := strings.Cut(cmd.Use, " ")
		var wrong string
		switch {
		case len(args) < least:
			missing := strings.Fields(usage)[len(args)]
			wrong = strings.TrimSuffix(missing, "...") + " is missing"
		case most >= 0 && len(args) > most:
			wrong = fmt.Sprintf("unexpected argument %q", args[most])
		default:
			return nil
		}
		return errors.New(wrong + "; usage: " + strings.TrimSpace(cmd.CommandPath()+" "+usage))
	}
}
