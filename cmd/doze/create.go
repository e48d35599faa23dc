package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/problem"
)

func (a *app) createCommand() *cobra.Command {
	var req types.CreateSandboxRequest
	var env, labels []string
	var sleepAfter, stopAfter, ttl time.Duration
	var wait bool
	cmd := &cobra.Command{
		Use:   "create [NAME]",
		Short: "Create a sandbox, or find it by name",
		Long: `Create a sandbox and wait until it runs. An existing sandbox of that name is used
unchanged. Without a name the node generates one.`,
		Example: "  doze create shop\n  doze create shop --image node --size standard --env NODE_ENV=development --sleep-after 5m",
		Args:    wants(0, 1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if len(args) == 1 {
				req.Name = args[0]
			}
			if req.Env, err = a.environ(env); err != nil {
				return err
			}
			if req.Labels, err = pairs("label", labels); err != nil {
				return err
			}
			if cmd.Flags().Changed("sleep-after") {
				req.SleepAfter = (*types.Duration)(&sleepAfter)
			}
			if cmd.Flags().Changed("stop-after") {
				req.StopAfter = (*types.Duration)(&stopAfter)
			}
			if cmd.Flags().Changed("ttl") {
				req.TTL = (*types.Duration)(&ttl)
			}
			if !wait && req.Name == "" {
				return usage.Errorf("--wait=false requires a name: doze create NAME --wait=false")
			}
			return a.create(cmd.Context(), req, wait)
		},
	}
	f := cmd.Flags()
	f.StringVar(&req.Image, "image", "", "short name of one of the node's images, or a reference that it allows")
	f.StringVar(&req.Size, "size", "", "lite, basic, standard or another of the node's sizes")
	f.StringArrayVarP(&env, "env", "e", nil, "KEY=VALUE for all that runs in it, or KEY for this shell's value; may be repeated")
	f.StringArrayVarP(&labels, "label", "l", nil, "KEY=VALUE to find it by; may be repeated")
	f.DurationVar(&sleepAfter, "sleep-after", 0, "idle for so long, it sleeps; 0s for never")
	f.DurationVar(&stopAfter, "stop-after", 0, "asleep for so long, it is stopped; 0s for never")
	f.DurationVar(&ttl, "ttl", 0, "time after which it is destroyed with its files, in use or not; 0s for never")
	f.BoolVar(&wait, "wait", true, "wait until it runs")
	cmd.RegisterFlagCompletionFunc("image", a.completeNode(func(node types.Node) []string { return node.Images }))
	cmd.RegisterFlagCompletionFunc("size", a.completeNode(func(node types.Node) []string { return slices.Sorted(maps.Keys(node.Sizes)) }))
	return cmd
}

func (a *app) create(ctx context.Context, req types.CreateSandboxRequest, wait bool) error {
	node, err := a.node()
	if err != nil {
		return err
	}
	// The creation goes on at the node when its request ends.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type response struct {
		sb      types.Sandbox
		created bool
		err     error
	}
	answered := make(chan response, 1)
	go func() { // ends with ctx
		sb, created, err := node.Create(ctx, req)
		answered <- response{sb, created, err}
	}()
	appeared := make(chan types.Sandbox, 1)
	if req.Name != "" && (!wait || isTerminal(a.err)) {
		go func() { // ends with ctx
			if sb, err := awaitSandbox(ctx, node, req.Name); err == nil {
				appeared <- sb
			}
		}()
	}
	progress := newProgress(a.err)
	defer progress.clear()
	began, tick := time.Now(), time.NewTicker(slow)
	defer tick.Stop()
	pulls, pulling := make(chan string), ""
	for {
		select {
		case got := <-answered:
			progress.clear()
			if got.err != nil {
				return got.err
			}
			return a.printCreated(got.sb, got.created)
		case sb := <-appeared:
			switch {
			case sb.State != types.StateStarting || !fits(sb, req):
				// It existed. The response follows immediately, and may be a refusal.
			case !wait:
				return a.printCreated(sb, true)
			default:
				go followPull(ctx, node, sb, pulls) // ends with ctx
			}
		case pulling = <-pulls:
			progress.show(pulling)
		case <-tick.C:
			progress.show(first(pulling, fmt.Sprintf("creating %s… %s", req.Name, age(time.Since(began)))))
		}
	}
}

// fits reports whether an existing sandbox is as requested.
func fits(sb types.Sandbox, req types.CreateSandboxRequest) bool {
	return first(req.Image, sb.Image) == sb.Image && first(req.Size, sb.Size) == sb.Size
}

// followPull sends the progress of the pull of a sandbox's image.
func followPull(ctx context.Context, node *client.Client, sb types.Sandbox, pulls chan<- string) {
	node.Follow(ctx, sb.ID, 0, func(e types.Event) error {
		if e.Type != "image_pull_progress" {
			return nil
		}
		select {
		case pulls <- "pulling " + sb.Image + ": " + e.Progress:
		case <-ctx.Done():
		}
		return nil
	})
}

// awaitSandbox polls until the node lists a sandbox that is being created.
func awaitSandbox(ctx context.Context, node *client.Client, name string) (types.Sandbox, error) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		sb, err := node.Get(ctx, name)
		if err == nil || !problem.Has(err, problem.SandboxNotFound) {
			return sb, err
		}
		select {
		case <-ctx.Done():
			return types.Sandbox{}, ctx.Err()
		case <-tick.C:
		}
	}
}

func (a *app) printCreated(sb types.Sandbox, created bool) error {
	if a.json {
		return a.printJSON(sb)
	}
	how := "exists"
	if created {
		how = "created"
	}
	_, err := fmt.Fprintf(a.out, "%s  %s  %s, %s\n", clean(sb.Name), clean(sb.ID), how, clean(sb.State))
	return err
}

// environ reads KEY=VALUE, and KEY for a variable of this process.
func (a *app) environ(list []string) (map[string]string, error) {
	complete := make([]string, len(list))
	for i, entry := range list {
		if !strings.Contains(entry, "=") {
			value, ok := os.LookupEnv(entry)
			if !ok {
				return nil, usage.Errorf("--env %s: the variable is not set in this shell; write --env %s=VALUE", entry, entry)
			}
			entry += "=" + value
		}
		complete[i] = entry
	}
	return pairs("env", complete)
}

// pairs reads KEY=VALUE.
func pairs(flag string, list []string) (map[string]string, error) {
	var values map[string]string
	for _, entry := range list {
		key, value, ok := strings.Cut(entry, "=")
		if !ok || key == "" {
			return nil, usage.Errorf("invalid pair --%s %s; write --%s KEY=VALUE", flag, entry, flag)
		}
		if values == nil {
			values = make(map[string]string)
		}
		values[key] = value
	}
	return values, nil
}
