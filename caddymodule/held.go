package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/doze-run/doze/api"
	"github.com/doze-run/doze/egress"
	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/wakeproxy"
)

// nodes that are open in this process, by data folder. It outlives every
// configuration.
var nodes = caddy.NewUsagePool()

// heldNode is an open node with what must outlive a configuration: the
// connections into sandboxes, the counts, the metrics.
type heldNode struct {
	manager    *sandbox.Manager
	egress     *egress.Egress
	token      string
	proxy      *wakeproxy.Proxy
	apiMetrics *api.Metrics
	log        *slog.Logger

	target *logTarget // of log
	node   openedNode

	// requests ends all requests to the API when the node closes.
	requests    context.Context
	endAPICalls context.CancelFunc

	mu   sync.Mutex
	apps []*App // configurations that were applied and not given back, oldest first
}

// openedNode is a *node.Node.
type openedNode interface {
	Token() string
	Apply(node.Config) error
	Check(node.Config) error
	Close(context.Context) error
}

// open opens a node; tests put one without Podman in its place.
var open = func(ctx context.Context, cfg node.Config, log *slog.Logger) (openedNode, *sandbox.Manager, error) {
	n, err := node.Open(ctx, cfg, log)
	if err != nil {
		return nil, nil, err
	}
	return n, n.Manager, nil
}

// closeTimeout bounds the node's end: freezing takes microseconds, writing the
// store and ending Podman's service up to seconds.
const closeTimeout = 30 * time.Second

// key of the node in nodes.
func (a *App) key() (string, error) {
	home := a.Data
	if home == "" {
		home = os.Getenv("DOZE_HOME")
	}
	if home == "" {
		return "", errors.New("the node's folder is not set: name one with `data` in the global option `doze`, or with the environment variable DOZE_HOME")
	}
	return filepath.Abs(home)
}

// takeOpenNode takes the node if it is open, and returns nil if it is not.
func takeOpenNode(a *App) (*heldNode, error) {
	key, err := a.key()
	if err != nil {
		return nil, err
	}
	held, _, err := nodes.LoadOrNew(key, func() (caddy.Destructor, error) { return nil, errNotOpen })
	if errors.Is(err, errNotOpen) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return held.(*heldNode), nil
}

// otherFolder is the data folder of the node that is open in this process unless that is
// key; empty otherwise.
func otherFolder(key string) (other string) {
	nodes.Range(func(have, _ any) bool {
		if have != key {
			other, _ = have.(string)
		}
		return other == ""
	})
	return other
}

// openNode takes the node and opens it if it is not open. A process has one node: a
// reload cannot change its folder.
func openNode(a *App) (*heldNode, error) {
	key, err := a.key()
	if err != nil {
		return nil, err
	}
	if other := otherFolder(key); other != "" {
		return nil, node.FixedError{Option: "data", Have: other, Want: key}
	}
	held, _, err := nodes.LoadOrNew(key, func() (caddy.Destructor, error) {
		ctx, cancel := context.WithTimeout(context.Background(), openTimeout)
		defer cancel()
		target := newLogTarget(a.ctx.Slogger().Handler())
		log := slog.New(target.handler())
		cfg := a.config()
		cfg.Home = key
		settings, err := a.Egress.settings()
		if err != nil {
			return nil, err
		}
		var out *egress.Egress
		cfg.Uplink = func(ctx context.Context, parts node.Parts) (node.Uplink, error) {
			out, err = egress.Open(ctx, egress.Config{
				Folder: parts.Folder, Documents: parts.Documents, Device: parts.Device, Sandboxes: egress.Of(parts.Sandboxes),
				Operator: owner, Settings: settings, Log: parts.Log, PolicyCompiler: PolicyCompiler,
			})
			return out, err
		}
		opened, manager, err := open(ctx, cfg, log)
		if err != nil {
			return nil, err
		}
		requests, endAPICalls := context.WithCancel(context.Background())
		return &heldNode{
			manager:     manager,
			egress:      out,
			token:       opened.Token(),
			proxy:       wakeproxy.New(wakeproxy.Of(manager), log),
			apiMetrics:  api.NewMetrics(),
			log:         log,
			target:      target,
			node:        opened,
			requests:    requests,
			endAPICalls: endAPICalls,
		}, nil
	})
	if err != nil {
		return nil, err
	}
	return held.(*heldNode), nil
}

// apply makes the settings of a the node's.
func (h *heldNode) apply(a *App) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.use(a); err != nil {
		return err
	}
	h.apps = append(h.apps, a)
	return nil
}

// prepare checks whether the node can have the settings of a. Unless it fails, the
// caller applies or discards the change of egress.
func (h *heldNode) prepare(ctx context.Context, a *App) (node.Config, *egress.Change, error) {
	cfg := a.config()
	key, err := a.key()
	if err != nil {
		return cfg, nil, err
	}
	cfg.Home = key
	settings, err := a.Egress.settings()
	if err != nil {
		return cfg, nil, err
	}
	if err := h.node.Check(cfg); err != nil {
		return cfg, nil, err
	}
	change, err := h.egress.Prepare(ctx, settings)
	return cfg, change, err
}

func (h *heldNode) use(a *App) error {
	cfg, change, err := h.prepare(a.ctx, a)
	if err != nil {
		return err
	}
	if err := h.node.Apply(cfg); err != nil {
		change.Discard()
		return err
	}
	change.Apply()
	h.target.set(a.ctx.Slogger().Handler())
	return nil
}

// giveBack ends what a has of the node. If another part of a's configuration
// failed to start, the settings of the one before return.
func (h *heldNode) giveBack(a *App) error {
	key, err := a.key()
	if err != nil {
		return err
	}
	_, deleted := nodes.Delete(key)
	return errors.Join(h.withdraw(a), deleted)
}

func (h *heldNode) withdraw(a *App) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.Index(h.apps, a)
	newest := i >= 0 && i == len(h.apps)-1
	h.apps = slices.DeleteFunc(h.apps, func(other *App) bool { return other == a })
	if !newest || len(h.apps) == 0 {
		return nil
	}
	if err := h.use(h.apps[len(h.apps)-1]); err != nil {
		return fmt.Errorf("returning to the settings before: %w", err)
	}
	return nil
}

// endRequests ends all that is in flight.
func (h *heldNode) endRequests() {
	h.endAPICalls()
	h.proxy.Close()
}

// Destruct closes the node: no configuration has it any more.
func (h *heldNode) Destruct() error {
	h.endRequests()
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	return h.node.Close(ctx)
}
