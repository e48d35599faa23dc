package main

import (
	"context"
	"fmt"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
)

func (a *app) exposeCommand() *cobra.Command {
	var req types.ExposePortRequest
	var wait time.Duration
	var remove bool
	cmd := &cobra.Command{
		Use:   "expose SANDBOX PORT",
		Short: "Give a port of a sandbox a preview URL",
		Long: `Give a port of a sandbox a preview URL, and print the URL. Exposing a port again sets
all of its modes; those without a flag get their defaults. The URL changes only if the
access changes.`,
		Example:           "  doze expose shop 3000\n  doze expose shop 8080 --access public --wake never",
		Args:              wants(2, 2),
		ValidArgsFunction: a.complete(exposedPorts),
		PreRunE: func(cmd *cobra.Command, _ []string) (err error) {
			cmd.LocalNonPersistentFlags().VisitAll(func(flag *pflag.Flag) {
				if remove && flag.Changed && flag.Name != "remove" {
					err = usage.Errorf("--remove and --%s exclude each other; give one of them", flag.Name)
				}
			})
			return err
		},
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			port, err := parsePort(args[1])
			if err != nil {
				return err
			}
			if remove {
				err := node.Unexpose(ctx, args[0], port)
				return a.print(err, map[string]any{"port": port, "state": "closed"}, "%d  closed", port)
			}
			req.Port, req.WaitTimeout = port, types.Duration(wait)
			done := a.waiting(fmt.Sprintf("%s: waiting for a server on port %d", args[0], port))
			exposed, err := node.Expose(ctx, args[0], req)
			done()
			return a.print(err, exposed, "%s", exposed.URL)
		}),
	}
	f := cmd.Flags()
	choiceFlag(cmd, (*string)(&req.Access), "access", "token (the URL has a secret, the default) or public", types.Access("").Values())
	choiceFlag(cmd, (*string)(&req.Wake), "wake", "any (every request), navigation (a page that is open does not start a stopped sandbox, the default) or never (410 while it does not run)", types.WakeMode("").Values())
	choiceFlag(cmd, (*string)(&req.HostHeader), "host-header", "auto (the server sees the preview's host unless it rejects that, the default), rewrite (localhost:PORT) or preserve", types.HostHeader("").Values())
	choiceFlag(cmd, (*string)(&req.Protocol), "protocol", "auto (HTTP/1.1, and HTTP/2 without TLS for gRPC, the default), http1 or h2c", types.Protocol("").Values())
	choiceFlag(cmd, (*string)(&req.WebSocket), "websocket", "sleep (a silent WebSocket lets the sandbox sleep, the default) or keep_awake", types.WebSocketMode("").Values())
	f.DurationVar(&wait, "wait-timeout", 0, "time to wait for a server to listen on the port, at most 5m; wakes the sandbox")
	f.BoolVar(&remove, "remove", false, "remove the preview; its URL is never reused")
	return cmd
}

func parsePort(text string) (uint16, error) {
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port == 0 {
		return 0, usage.Errorf("invalid port %q; use 1 to 65535", text)
	}
	return uint16(port), nil
}

func (a *app) openCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "open SANDBOX [PORT]",
		Short: "Open a preview in the browser",
		Long: `Print the preview URL of a sandbox, and open it in the browser if there is one.
PORT is required only if several ports are exposed.`,
		Args:              wants(1, 2),
		ValidArgsFunction: a.complete(exposedPorts),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			sb, err := node.Get(ctx, args[0])
			if err != nil {
				return err
			}
			port, err := choosePort(sb, args[1:])
			if err := a.print(err, port, "%s", port.URL); err != nil || a.json {
				return err
			}
			return a.browse(ctx, port.URL)
		}),
	}
}

func choosePort(sb types.Sandbox, args []string) (types.Port, error) {
	exposed := strings.Join(portNumbers(sb.Ports), ",")
	switch {
	case len(sb.Ports) == 0:
		return types.Port{}, fmt.Errorf("%s has no preview; create one with doze expose %s PORT", sb.Name, sb.Name)
	case len(args) == 0 && len(sb.Ports) > 1:
		return types.Port{}, fmt.Errorf("%s has several previews; name the port: %s", sb.Name, exposed)
	case len(args) == 0:
		return sb.Ports[0], nil
	}
	number, err := parsePort(args[0])
	if err != nil {
		return types.Port{}, err
	}
	if i := slices.IndexFunc(sb.Ports, func(p types.Port) bool { return p.Port == number }); i >= 0 {
		return sb.Ports[i], nil
	}
	return types.Port{}, fmt.Errorf("port %d of %s has no preview, but %s has; create one with doze expose %s %d", number, sb.Name, exposed, sb.Name, number)
}

// browse opens an address in the browser if a person with a desktop asked for it.
func (a *app) browse(ctx context.Context, address string) error {
	if !isTerminal(a.out) {
		return nil
	}
	opener := ""
	switch {
	case runtime.GOOS == "darwin":
		opener = "open"
	case a.getenv("DISPLAY") != "" || a.getenv("WAYLAND_DISPLAY") != "":
		opener = "xdg-open"
	}
	path, err := exec.LookPath(opener)
	if opener == "" || err != nil {
		return nil
	}
	if err := exec.CommandContext(ctx, path, address).Run(); err != nil {
		return fmt.Errorf("open the browser with %s: %w", opener, err)
	}
	return nil
}
