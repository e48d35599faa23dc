package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
)

// readyForms are the conditions of doze wait and doze exec --ready.
const readyForms = "port=3000, log='ready in', http=3000/health, http=3000/health=204 or exit"

func (a *app) waitCommand() *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "wait SANDBOX PROCESS CONDITION",
		Short: "Wait until a background process is ready, or has ended",
		Long: `Wait until a condition holds for a background process, given by id or name. This wakes
the sandbox and keeps it awake. If the process ends before, doze prints its last lines and
fails immediately. The conditions are:

  port=3000               it, or a process that it started, listens on the TCP port
  log='ready in \d+ ms'   a line of its output since its last start matches the RE2
                          regular expression; colors are ignored
  http=3000/health        GET http://localhost:3000/health in the sandbox has a 2xx status
  http=3000/health=204    the same with another status, or a class such as 3xx
  exit                    it has ended`,
		Example:           "  doze wait shop web port=3000\n  doze wait shop build exit --timeout 10m",
		Args:              wants(3, 3),
		ValidArgsFunction: a.complete(processNames),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			condition, err := parseReady(args[2], timeout)
			if err != nil {
				return err
			}
			done := a.waiting(fmt.Sprintf("%s: waiting for %s of %s", args[0], args[2], args[1]))
			ready, err := node.WaitProcess(ctx, args[0], args[1], condition)
			done()
			p := ready.Process
			return a.print(err, ready, "%s  %s  %s", p.ID, p.Name, readyText(ready))
		}),
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "time to wait, at most 1h (default 1m)")
	return cmd
}

// readyText describes what made a process ready.
func readyText(r types.ReadyProcess) string {
	switch {
	case r.Status != 0:
		return fmt.Sprintf("port %d responds %d", r.Listening.Port, r.Status)
	case r.Listening != nil:
		return fmt.Sprintf("listens on port %d", r.Listening.Port)
	case len(r.Match) > 0:
		return r.Line
	}
	return processState(r.Process)
}

// parseReady parses a condition, one of readyForms.
func parseReady(text string, timeout time.Duration) (types.ReadyCondition, error) {
	c := types.ReadyCondition{Timeout: types.Duration(timeout)}
	kind, value, _ := strings.Cut(text, "=")
	var err error
	switch {
	case timeout < 0:
		err = usage.Errorf("the timeout %s is negative; write it like 30s", timeout)
	case text == "exit":
		c.Exit = true
	case kind == "log" && value != "":
		c.Log = value
	case kind == "port":
		c.Port, err = parsePort(value)
	case kind == "http":
		c.HTTP = &types.ReadyHTTP{}
		if i := strings.LastIndexByte(value, '='); i >= 0 && isStatus(value[i+1:]) {
			value, c.HTTP.Status = value[:i], value[i+1:]
		}
		port, path, found := strings.Cut(value, "/")
		if found {
			c.HTTP.Path = "/" + path
		}
		c.HTTP.Port, err = parsePort(port)
	default:
		err = usage.Errorf("unknown condition %q; use %s", text, readyForms)
	}
	return c, err
}

// isStatus reports whether a text is a status such as 204, or a class such as 2xx.
func isStatus(text string) bool {
	if class, ok := strings.CutSuffix(text, "xx"); ok {
		text = class + "00"
	}
	status, err := strconv.Atoi(text)
	return err == nil && len(text) == 3 && status >= 100 && status < 600
}

func (a *app) portsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "ports SANDBOX",
		Short: "List the ports of a sandbox with a server or a preview",
		Long: `List the TCP ports of a sandbox on which processes listen, as last known, and those that
have a preview. This never wakes the sandbox.`,
		Args:              wants(1, 1),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			list, err := node.Ports(ctx, args[0])
			if err != nil || a.json {
				return a.print(err, list, "")
			}
			heads := []any{"PORT", "ADDRESSES", "PROGRAM", "PID", "PROCESS", "PREVIEW"}
			return printTable(a, "ports", mergePorts(list), heads, func(p portRow) []any {
				l := p.listening
				return []any{l.Port, cmp.Or(strings.Join(l.Addresses, ","), "-"), cmp.Or(l.Program, "-"), orDash(l.PID), cmp.Or(l.Process, "-"), cmp.Or(p.url, "-")}
			})
		}),
	}
}

func orDash(n int) string {
	if n == 0 {
		return "-"
	}
	return strconv.Itoa(n)
}

// portRow is a port with a server, a preview or both.
type portRow struct {
	listening types.ListeningPort
	url       string
}

// mergePorts returns the ports of a list in their order.
func mergePorts(list types.PortList) []portRow {
	var rows []portRow
	for _, l := range list.Listening {
		rows = append(rows, portRow{listening: l})
	}
	for _, p := range list.Ports {
		i := slices.IndexFunc(rows, func(r portRow) bool { return r.listening.Port == p.Port })
		if i < 0 {
			i, rows = len(rows), append(rows, portRow{listening: types.ListeningPort{Port: p.Port}})
		}
		rows[i].url = p.URL
	}
	slices.SortFunc(rows, func(a, b portRow) int { return cmp.Compare(a.listening.Port, b.listening.Port) })
	return rows
}
