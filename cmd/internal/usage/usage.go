// Package usage distinguishes invalid command lines from commands that fail.
package usage

import (
	"fmt"

	"github.com/spf13/cobra"
)

// ExitCode is the exit code for a wrong command line.
const ExitCode = 2

// Error is the fault of a command line.
type Error struct{ err error }

func (e *Error) Error() string { return e.err.Error() }
func (e *Error) Unwrap() error { return e.err }

// New returns an Error for err; nil for nil.
func New(err error) error {
	if err == nil {
		return nil
	}
	return &Error{err}
}

// Errorf is New of fmt.Errorf.
func Errorf(format string, args ...any) error { return New(fmt.Errorf(format, args...)) }

// Check makes errors about the arguments and flags of a command, and of those below it, an
// Error. A command that only has others below it takes no other word. flagError, unless nil,
// adds to an error of a flag.
func Check(cmd *cobra.Command, flagError func(*cobra.Command, error) error) {
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if flagError != nil {
			err = flagError(cmd, err)
		}
		return New(err)
	})
	checkArguments(cmd)
}

func checkArguments(cmd *cobra.Command) {
	if !cmd.Runnable() && cmd.HasSubCommands() {
		cmd.Args = cobra.ArbitraryArgs
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return Errorf("%s has no command %q; %s --help lists them", cmd.CommandPath(), args[0], cmd.CommandPath())
		}
	}
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error { return New(check(cmd, args)) }
	}
	for _, sub := range cmd.Commands() {
		checkArguments(sub)
	}
}
