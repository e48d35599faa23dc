package main

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/cmd/internal/display"
	"github.com/doze-run/doze/cmd/internal/home"
	"github.com/doze-run/doze/cmd/internal/version"
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
			findings = append(findings, a.quarantineFindings(ctx, folder, port)...)
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

// nodeLimit bounds the request to a node that may not run.
const nodeLimit = 5 * time.Second

// quarantineFindings are the containers that the running node has no record of;
// none when no node answers.
func (a *app) quarantineFindings(ctx context.Context, folder string, port int) []doctor.Finding {
	ctx, cancel := context.WithTimeout(ctx, nodeLimit)
	defer cancel()
	token := a.getenv("DOZE_TOKEN")
	if token == "" {
		text, err := os.ReadFile(filepath.Join(folder, "token"))
		if err != nil {
			return nil
		}
		token = strings.TrimSpace(string(text))
	}
	ca := cmp.Or(a.getenv("DOZE_CA"), filepath.Join(folder, "caddy", "pki", "authorities", "local", "root.crt"))
	if _, err := os.Stat(ca); err != nil {
		ca = ""
	}
	node, err := client.New(client.Config{
		URL:   cmp.Or(a.getenv("DOZE_API"), fmt.Sprintf("https://api.doze.localhost:%d/api/v1", port)),
		Token: token, CAFile: ca, UserAgent: "doze/" + version.String(),
	})
	if err != nil {
		return nil
	}
	defer node.Close()
	info, err := node.Node(ctx)
	if err != nil {
		return nil
	}
	var findings []doctor.Finding
	for _, q := range info.Quarantined {
		finding := doctor.Finding{Name: "quarantine", Level: doctor.LevelWarning}
		if q.Container {
			finding.Detail = fmt.Sprintf("the node has no record of container %s (name %q, image %s) and keeps it stopped", q.ID, q.Name, q.Image)
			finding.Remedy = fmt.Sprintf("doze adopt %s makes it a sandbox again; doze rm --quarantined %s removes it with its files", q.ID, q.ID)
		} else {
			finding.Detail = fmt.Sprintf("the node has no record of the run folder of %s, which has no container", q.ID)
			finding.Remedy = fmt.Sprintf("doze rm --quarantined %s removes it", q.ID)
		}
		if q.Problem != "" {
			finding.Detail += "; it could not be stopped: " + q.Problem
		}
		findings = append(findings, finding)
	}
	return findings
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
