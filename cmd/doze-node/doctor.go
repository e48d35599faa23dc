package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/cmd/internal/display"
	"github.com/doze-run/doze/cmd/internal/home"
	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/runtime/doctor"
	"github.com/doze-run/doze/runtime/store"
)

func (a *app) doctorCommand() *cobra.Command {
	var asJSON, checkStore, reset bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check whether a node can run on this machine",
		Long: `Check whether a node can run on this machine as this user, and print a remedy for
each problem. It exits with 1 if a sandbox could not run. Run by root, it checks for the
running node of $DOZE_HOME, as its user and in its environment.

With --store [PATH] it reads the node's store, by default $DOZE_HOME/store, verifies all
checksums and changes nothing; the node must not run. With --reset it moves that folder
aside and creates an empty one: the node then starts with every sandbox in quarantine,
and doze adopt restores each with its files, ports and declared processes. Rules,
secrets, policies, and the certificates of storage doze are lost.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if checkStore {
				return cobra.MaximumNArgs(1)(cmd, args)
			}
			return cobra.NoArgs(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if checkStore {
				return a.checkStore(args, reset, asJSON)
			}
			if reset {
				return usage.Errorf("--reset requires --store; use doze doctor --store [PATH] --reset")
			}
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			folder, err := home.Folder(a.getenv)
			if err != nil {
				return err
			}
			if n := findNode(folder); n != nil && n.runsAsOther() && os.Geteuid() == 0 {
				again := []string{"doctor"}
				if asJSON {
					again = append(again, "--json")
				}
				return a.runAsNode(ctx, n, folder, again)
			}
			access, err := home.Local(a.getenv)
			if err != nil {
				return err
			}
			findings := doctor.Check(ctx, doctor.Config{Home: folder, Ports: freePorts(ctx, access.Port)})
			findings = append(findings, a.quarantineFindings(ctx)...)
			return a.report(findings, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&checkStore, "store", false, "check the node's store instead")
	cmd.Flags().BoolVar(&reset, "reset", false, "move the store aside and create an empty one")
	return cmd
}

// report prints findings and fails if no sandbox could run.
func (a *app) report(findings []doctor.Finding, asJSON bool) error {
	var err error
	if asJSON {
		err = display.JSON(a.out, map[string]any{"findings": findings}, "  ")
	} else {
		err = a.printFindings(findings)
	}
	if err == nil && !doctor.CanRun(findings) {
		return errReported
	}
	return err
}

// checkStore checks a store that no node has open, or replaces it by an empty one.
func (a *app) checkStore(args []string, reset, asJSON bool) error {
	folder, err := home.Folder(a.getenv)
	if err != nil {
		return err
	}
	dir := node.StoreDir(folder)
	if len(args) > 0 {
		if dir, err = filepath.Abs(args[0]); err != nil {
			return err
		}
	}
	if err := store.InUse(dir); err != nil {
		return fmt.Errorf("%w; stop the node first", err)
	}
	finding := doctor.Finding{Name: "store", OK: true, Level: doctor.LevelInfo, Detail: dir + " is intact"}
	if reset {
		if err := checkOwner(os.Geteuid(), filepath.Dir(dir), "doctor"); err != nil {
			return err
		}
		id, err := node.ReadNodeID(filepath.Dir(dir))
		if err != nil {
			return err
		}
		if id == "" {
			return fmt.Errorf("%s does not name the node; write its id there: `podman ps -a --format '{{index .Labels \"doze.node\"}}'` prints it for each sandbox",
				filepath.Join(filepath.Dir(dir), "node_id"))
		}
		aside, err := store.Reset(dir, id)
		if err != nil {
			return err
		}
		finding.Detail = dir + " is empty now"
		if aside != "" {
			finding.Detail += "; its previous content is in " + aside
		}
		return a.report([]doctor.Finding{finding}, asJSON)
	}
	err = store.Verify(dir)
	damage, isDamage := errors.AsType[*store.DamageError](err)
	switch {
	case isDamage:
		finding = doctor.Finding{Name: "store", Level: doctor.LevelError, Detail: fmt.Sprintf("%s %s; lost: %s", damage.Path, damage.Problem, damage.Lost), Remedy: damage.Remedy}
	case err != nil:
		return err
	}
	return a.report([]doctor.Finding{finding}, asJSON)
}

// nodeLimit bounds the request to a node that may not run.
const nodeLimit = 5 * time.Second

// quarantineFindings returns the containers that the running node has no record of, or
// nothing if no node responds.
func (a *app) quarantineFindings(ctx context.Context) []doctor.Finding {
	ctx, cancel := context.WithTimeout(ctx, nodeLimit)
	defer cancel()
	api, err := home.Client(a.getenv, "", "")
	if err != nil {
		return nil
	}
	defer api.Close()
	info, err := api.Node(ctx)
	if err != nil {
		return nil
	}
	var findings []doctor.Finding
	if info.DataRestored {
		findings = append(findings, doctor.Finding{
			Name: "data", Level: doctor.LevelWarning,
			Detail: "the node started on data that is older than its containers: an older copy was restored, or the newest changes were lost",
			Remedy: "adopt or remove the quarantined containers, and check rules, secrets and ports",
		})
	}
	for _, q := range info.Quarantined {
		finding := doctor.Finding{Name: "quarantine", Level: doctor.LevelWarning}
		if q.HasContainer {
			finding.Detail = fmt.Sprintf("the node has no record of container %s (name %q, image %s) and keeps it stopped", q.ID, q.Name, q.Image)
			finding.Remedy = fmt.Sprintf("doze adopt %s makes it a sandbox again; doze rm --quarantined %s removes it with its files", q.ID, q.ID)
		} else {
			finding.Detail = fmt.Sprintf("the node has no record of the run folder of %s, which has no container", q.ID)
			finding.Remedy = fmt.Sprintf("doze rm --quarantined %s removes it", q.ID)
		}
		if q.Error != "" {
			finding.Detail += "; it could not be stopped: " + q.Error
		}
		findings = append(findings, finding)
	}
	return findings
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
