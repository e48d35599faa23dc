package main

import (
	"cmp"
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
	var env, labels, warm []string
	var wait bool
	cmd := &cobra.Command{
		Use:   "create [NAME]",
		Short: "Create a sandbox, or use the one of that name",
		Long: `Create a sandbox and wait until it runs. If a sandbox of that name exists, it is
used unchanged. Without a name the node generates one.`,
		Example: "  doze create shop\n  doze create shop --image node --size standard --env NODE_ENV=development --sleep-after 5m",
		Args:    wants(0, 1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			req.Name = cmp.Or(args...)
			if req.Env, err = a.environ(env); err != nil {
				return err
			}
			for _, language := range warm {
				req.Warm = append(req.Warm, types.Language(language))
			}
			if req.Labels, err = pairs("label", labels); err != nil {
				return err
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
	f.StringVar(&req.Snapshot, "snapshot", "", "snapshot whose disk it begins with, in place of an image")
	f.StringArrayVarP(&env, "env", "e", nil, "environment variable KEY=VALUE, or KEY with its value in this shell; may be repeated")
	f.StringArrayVarP(&labels, "label", "l", nil, "label KEY=VALUE; may be repeated")
	f.Var(optionalDuration{&req.SleepAfter}, "sleep-after", "time without use after which it falls asleep; 0s for never")
	f.Var(optionalDuration{&req.StopAfter}, "stop-after", "time asleep after which it is stopped; 0s for never")
	f.Var(optionalDuration{&req.ArchiveAfter}, "archive-after", "time stopped after which its disk is moved to the object store; 0s for never")
	persistFlag(cmd, (*string)(&req.Persist), "state that a sleep keeps: memory (and the disk), disk (it stops), or none (each stop ends its disk); default memory")
	f.Var(optionalDuration{&req.TTL}, "ttl", "time after which it is destroyed with its files, in use or not; 0s for never")
	f.StringSliceVar(&warm, "warm", nil, "languages for which an interpreter starts with it, so that the first doze code does not wait: python, javascript, typescript")
	f.BoolVar(&wait, "wait", true, "wait until it runs")
	cmd.RegisterFlagCompletionFunc("image", a.complete(func(ctx context.Context, api *client.Client, _ []string) []string {
		node, _ := api.Node(ctx)
		return node.Images
	}))
	cmd.RegisterFlagCompletionFunc("size", a.complete(func(ctx context.Context, api *client.Client, _ []string) []string {
		node, _ := api.Node(ctx)
		return slices.Sorted(maps.Keys(node.Sizes))
	}))
	return cmd
}

// persistFlag adds the flag for the state that a sleep keeps.
func persistFlag(cmd *cobra.Command, target *string, usage string) {
	choiceFlag(cmd, target, "persist", usage, types.Persist("").Values())
}

// optionalDuration is a flag that sets a field only if it is given.
type optionalDuration struct{ field **types.Duration }

func (d optionalDuration) Set(text string) error {
	value, err := time.ParseDuration(text)
	*d.field = (*types.Duration)(&value)
	return err
}

func (d optionalDuration) String() string { return "" }
func (d optionalDuration) Type() string   { return "duration" }

func (a *app) create(ctx context.Context, req types.CreateSandboxRequest, wait bool) error {
	node, err := a.node()
	if err != nil {
		return err
	}
	// The creation goes on at the node when its request ends.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	created := make(chan func() error, 1)
	go func() { // ends with ctx
		sb, isNew, err := node.Create(ctx, req)
		created <- func() error { return a.printCreated(err, sb, isNew) }
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
		case report := <-created:
			progress.clear()
			return report()
		case sb := <-appeared:
			switch {
			case sb.State != types.StateStarting || !fits(sb, req):
				// It existed. The response follows immediately, and may be a refusal.
			case !wait:
				return a.printCreated(nil, sb, true)
			default:
				go followPull(ctx, node, sb, pulls) // ends with ctx
			}
		case pulling = <-pulls:
			progress.show(pulling)
		case <-tick.C:
			progress.show(cmp.Or(pulling, fmt.Sprintf("creating %s… %s", req.Name, age(time.Since(began)))))
		}
	}
}

// fits reports whether an existing sandbox is as requested.
func fits(sb types.Sandbox, req types.CreateSandboxRequest) bool {
	return cmp.Or(req.Image, sb.Image) == sb.Image && cmp.Or(req.Size, sb.Size) == sb.Size
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

func (a *app) printCreated(err error, sb types.Sandbox, created bool) error {
	how := "exists"
	if created {
		how = "created"
	}
	return a.print(err, sb, "%s  %s  %s, %s", sb.Name, sb.ID, how, sb.State)
}

// environ reads KEY=VALUE, and KEY for a variable of this process.
func (a *app) environ(list []string) (map[string]string, error) {
	complete := slices.Clone(list)
	for i, entry := range list {
		if !strings.Contains(entry, "=") {
			value, ok := os.LookupEnv(entry)
			if !ok {
				return nil, usage.Errorf("--env %s: the variable is not set in this shell; write --env %s=VALUE", entry, entry)
			}
			complete[i] += "=" + value
		}
	}
	return pairs("env", complete)
}

// pairs reads KEY=VALUE. Without any it returns nil.
func pairs(flag string, list []string) (map[string]string, error) {
	if len(list) == 0 {
		return nil, nil
	}
	values := map[string]string{}
	for _, entry := range list {
		key, value, ok := strings.Cut(entry, "=")
		if !ok || key == "" {
			return nil, usage.Errorf("invalid pair --%s %s; write --%s KEY=VALUE", flag, entry, flag)
		}
		values[key] = value
	}
	return values, nil
}
