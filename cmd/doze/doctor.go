package main

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/runtime/doctor"
)

func (a *app) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Check whether a node can run on this machine",
		Long: `Check whether a node can run on this machine as this user, and print what to do
about each thing that is amiss. Exits with 1 if a sandbox could not run.`,
		Args: wants(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			local, home, err := a.local()
			if err != nil {
				return err
			}
			findings := doctor.Check(cmd.Context(), doctor.Config{Home: home, Ports: freePorts(cmd.Context(), local.URL)})
			if a.json {
				err = a.printJSON(map[string]any{"findings": findings})
			} else {
				err = a.printFindings(findings)
			}
			if err == nil && !doctor.CanRun(findings) {
				return exitCode(exitFailed)
			}
			return err
		},
	}
}

// freePorts are the ports that a node will need and does not have yet.
func freePorts(ctx context.Context, api string) []int {
	u, err := url.Parse(api)
	if err != nil {
		return nil
	}
	port, err := strconv.Atoi(u.Port())
	if err != nil {
		return nil
	}
	dialer := net.Dialer{Timeout: time.Second}
	if conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", u.Port())); err == nil {
		conn.Close()
		return nil
	}
	return []int{port}
}

func (a *app) printFindings(findings []doctor.Finding) error {
	for _, f := range findings {
		mark := "ok"
		if !f.OK {
			mark = string(f.Level)
		}
		if _, err := fmt.Fprintf(a.out, "%-8s %-18s %s\n", mark, f.Name, clean(f.Detail)); err != nil {
			return err
		}
		if !f.OK && f.Remedy != "" {
			fmt.Fprintf(a.out, "%-8s %-18s → %s\n", "", "", clean(f.Remedy))
		}
	}
	return nil
}
