package main

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/cmd/internal/display"
	"github.com/doze-run/doze/cmd/internal/home"
	"github.com/doze-run/doze/runtime/doctor"
)

func (a *app) doctorCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check whether a node can run on this machine",
		Long: `Check whether a node can run on this machine as this user, and print what to do
about each thing that is amiss. Exits with 1 if a sandbox could not run.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			folder, err := home.Folder(a.getenv)
			if err != nil {
				return err
			}
			port, err := a.httpsPort()
			if err != nil {
				return err
			}
			findings := doctor.Check(ctx, doctor.Config{Home: folder, Ports: freePorts(ctx, port)})
			if asJSON {
				err = display.JSON(a.out, map[string]any{"findings": findings}, "  ")
			} else {
				err = a.printFindings(findings)
			}
			if err == nil && !doctor.CanRun(findings) {
				return errReported
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// defaultHTTPSPort is that of a node as `make up` starts it.
const defaultHTTPSPort = "8443"

// httpsPort is the port of the API.
func (a *app) httpsPort() (int, error) {
	text := cmp.Or(a.getenv("DOZE_HTTPS_PORT"), defaultHTTPSPort)
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port == 0 {
		return 0, fmt.Errorf("DOZE_HTTPS_PORT: invalid port %q; use 1 to 65535", text)
	}
	return int(port), nil
}

// freePorts are the ports that a node will need and does not have yet.
func freePorts(ctx context.Context, port int) []int {
	dialer := net.Dialer{Timeout: time.Second}
	if conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port))); err == nil {
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
		if _, err := fmt.Fprintf(a.out, "%-8s %-18s %s\n", mark, f.Name, display.Clean(f.Detail)); err != nil {
			return err
		}
		if !f.OK && f.Remedy != "" {
			fmt.Fprintf(a.out, "%-8s %-18s → %s\n", "", "", display.Clean(f.Remedy))
		}
	}
	return nil
}
