package caddymodule

import (
	"cmp"
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

	"github.com/doze-run/doze/node"
)

// nodes that are open in this process, by data folder. It outlives every
// configuration.
var nodes = caddy.NewUsagePool()

// heldNode is an open node with the configurations that use it.
type heldNode struct {
	*node.Node
	store  *heldStore // nil in tests
	target logTarget  // of its log

	mu   sync.Mutex
	apps []*App // applied configurations, oldest first
}

// closeTimeout bounds the node's end: freezing takes microseconds, writing the
// store and ending Podman's service up to seconds.
const closeTimeout = 30 * time.Second

// home is the node's folder, and its key in nodes.
func (a *App) home() (string, error) {
	home := cmp.Or(a.Data, os.Getenv("DOZE_HOME"))
	if home == "" {
		return "", errors.New("the node's folder is not set: name one with `data` in the global option `doze`, or with the environment variable DOZE_HOME")
	}
	return filepath.Abs(home)
}

// loadOpenNode acquires the node in a folder if it is open, and returns nil otherwise. A process has one node: while one is open,
// other folders are refused.
func loadOpenNode(home string) (*heldNode, error) {
	if other := otherFolder(home); other != "" {
		return nil, node.FixedError{Option: "data", Have: other, Want: home}
	}
	held, _, err := nodes.LoadOrNew(home, func() (caddy.Destructor, error) { return nil, errNotOpen })
	if errors.Is(err, errNotOpen) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return held.(*heldNode), nil
}

// otherFolder is the data folder of the node that is open in this process unless that is
// home; empty otherwise.
func otherFolder(home string) (other string) {
	nodes.Range(func(have, _ any) bool {
		if have != home {
			other, _ = have.(string)
		}
		return other == ""
	})
	return other
}

// openNode acquires the node, and opens it if it is not open.
func openNode(a *App) (*heldNode, error) {
	held, _, err := nodes.LoadOrNew(a.config.Home, func() (_ caddy.Destructor, err error) {
		ctx, cancel := context.WithTimeout(context.Background(), openTimeout)
		defer cancel()
		held := new(heldNode)
		held.target.set(a.ctx.Slogger().Handler())
		if held.store, err = holdStore(a.config.Home, a.ctx.Slogger().Handler()); err != nil {
			return nil, err
		}
		held.Node, err = node.OpenOn(ctx, a.config, held.store.Badger, slog.New(logHandler{target: &held.target}))
		if err != nil {
			return nil, errors.Join(err, held.store.release())
		}
		return held, nil
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

func (h *heldNode) use(a *App) error {
	change, err := h.Prepare(a.ctx, a.config)
	if err != nil {
		return err
	}
	if err := change.Apply(); err != nil {
		return err
	}
	h.target.set(a.ctx.Slogger().Handler())
	if h.store != nil {
		h.store.target.set(a.ctx.Slogger().Handler())
	}
	return nil
}

// release ends the use of the node by a. If another part of a's configuration
// failed to start, the settings of the one before return.
func (h *heldNode) release(a *App) error {
	_, deleted := nodes.Delete(a.config.Home)
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
		return fmt.Errorf("restore the previous settings: %w", err)
	}
	return nil
}

// Destruct closes the node: no configuration uses it any more.
func (h *heldNode) Destruct() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	err := h.Close(ctx)
	if h.store != nil {
		err = errors.Join(err, h.store.release())
	}
	return err
}
