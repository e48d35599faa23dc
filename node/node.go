// Package node assembles a node: the store, the engine, the freezer, the access to the
// sandboxes' networks, and the Manager that uses them.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/doze-run/doze/runtime/freezer"
	"github.com/doze-run/doze/runtime/netns"
	"github.com/doze-run/doze/runtime/podman"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store"
)

// Config of a node. Home and Uplink are required.
type Config struct {
	// Home is the folder with all of the node's data. One node at a time may use it.
	Home string
	// TokenFile holds the API token and is created if it is missing. Default: Home/token.
	TokenFile string
	// Guest and NetnsHelper are the paths of doze-guest and doze-netns.
	// Default: in the folder of the running program.
	Guest, NetnsHelper string
	// PodmanSocket of the Podman service to use. Default: the user's own; if that does
	// not respond, the node starts one.
	PodmanSocket string
	// Cgroup is the cgroup v2 subtree that belongs to the node's user. Default:
	// $DOZE_CGROUP. Without one, Podman freezes the sandboxes, which takes about 100
	// times as long, and no limits are enforced.
	Cgroup string
	// Sandbox configures the Manager. Open replaces its RunDir and GuestBinary.
	Sandbox sandbox.Config
	// Uplink connects the sandboxes to the internet. It is made before any sandbox is
	// recovered, and the node closes it.
	Uplink func(context.Context, Parts) (Uplink, error)
}

// Parts of a node that its Uplink uses. The node closes them after the Uplink.
type Parts struct {
	Folder    string           // for the Uplink's files, below Home
	Sandboxes *sandbox.Manager // has not started
	Documents Documents
	Device    func(ctx context.Context, id sandbox.ID, pid int) (*os.File, *net.TCPListener, error)
	Log       *slog.Logger
}

// Documents are stored in the node's store; store.Badger documents the contract.
type Documents interface {
	PutDocument(ctx context.Context, kind, name string, value []byte) error
	DeleteDocument(ctx context.Context, kind, name string) error
	Documents(ctx context.Context, kind string, yield func(name string, value []byte) error) error
}

// Uplink is a sandbox.Uplink that the node closes.
type Uplink interface {
	sandbox.Uplink
	Close() error
}

func (c *Config) fill() error {
	if c.Home == "" {
		return errors.New("the node's home is not set: name a folder with `data` in the Caddyfile or with DOZE_HOME")
	}
	home, err := filepath.Abs(c.Home)
	if err != nil {
		return err
	}
	c.Home = home
	program, err := os.Executable()
	if err != nil {
		return err
	}
	programs := filepath.Dir(program)
	for _, d := range []struct {
		field *string
		value string
	}{
		{&c.TokenFile, filepath.Join(c.Home, "token")},
		{&c.Guest, filepath.Join(programs, "doze-guest")},
		{&c.NetnsHelper, filepath.Join(programs, "doze-netns")},
		{&c.Cgroup, os.Getenv("DOZE_CGROUP")},
	} {
		if *d.field == "" {
			*d.field = d.value
		}
	}
	c.Sandbox.RunDir = filepath.Join(c.Home, "run")
	c.Sandbox.GuestBinary = filepath.Join(c.Home, "guest", "doze-guest")
	return nil
}

// Node is a running node. Close ends it.
type Node struct {
	Manager *sandbox.Manager

	config Config
	token  string
	// closers in the order of opening; they are closed in the reverse order.
	closers []func() error
}

// failedStartLimit bounds how long a node that failed to recover takes to close.
const failedStartLimit = 30 * time.Second

// Open starts a node: it locks and opens the store, finds or starts Podman, and recovers
// the sandboxes of earlier runs. The caller closes the node.
//
// Errors: store.ErrInUse (wrapped) if another node uses the home or its containers,
// *store.DamageError, and an error with remedies if no sandbox can run on this host.
func Open(ctx context.Context, cfg Config, log *slog.Logger) (_ *Node, err error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	n := &Node{config: cfg}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.Close(context.WithoutCancel(ctx)))
		}
	}()
	for _, dir := range []string{cfg.Home, cfg.Sandbox.RunDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("create the node's folders: %w", err)
		}
	}
	restrict(cfg.Home, log)
	findings := checkHost(ctx, cfg)
	// The store is first: its lock excludes a second node.
	records, err := openStore(cfg.Home, log)
	if err != nil {
		return nil, err
	}
	n.closers = append(n.closers, records.Close)
	if n.token, err = readToken(cfg.TokenFile); err != nil {
		return nil, err
	}
	if err := installGuest(cfg.Guest, cfg.Sandbox.GuestBinary); err != nil {
		return nil, err
	}
	if err := report(<-findings, log); err != nil {
		return nil, err
	}
	engine, err := podman.Open(ctx, podman.Config{Node: records.NodeID(), RunDir: cfg.Sandbox.RunDir, Socket: cfg.PodmanSocket, Helper: cfg.NetnsHelper, Log: log})
	if err != nil {
		return nil, err
	}
	n.closers = append(n.closers, engine.Close)
	storage, err := engine.StorageFolder(ctx)
	if err != nil {
		return nil, err
	}
	restored, err := n.witness(storage, records, log)
	if err != nil {
		return nil, err
	}
	sandboxFreezer, err := n.openFreezer(engine, log)
	if err != nil {
		return nil, err
	}
	network, err := netns.Open(netns.Config{Helper: cfg.NetnsHelper, Cgroup: sandboxCgroup(cfg.Cgroup), Log: log})
	if err != nil {
		return nil, err
	}
	n.closers = append(n.closers, network.Close)
	deps := sandbox.Deps{Engine: engine, Freezer: sandboxFreezer, Network: network, Store: records, Restored: restored,
		Creations: creationsDir(storage, records.NodeID()), Origins: originsDir(storage, records.NodeID()), PublicRoots: publicRoots, Log: log}
	if n.Manager, err = sandbox.New(cfg.Sandbox, deps); err != nil {
		return nil, err
	}
	if err := n.start(ctx, Parts{filepath.Join(cfg.Home, "egress"), n.Manager, records, network.TUN, log}); err != nil {
		return nil, err
	}
	n.removeStaleCgroups(sandboxFreezer, log)
	return n, nil
}

// witness records every commit of the store in the folder of Podman's containers. restored
// reports whether the store is older than the recorded count.
func (n *Node) witness(storage string, records *store.Badger, log *slog.Logger) (restored bool, err error) {
	w, commits, err := openWitness(storage, records.NodeID(), n.config.Home, log)
	if err != nil {
		return false, err
	}
	n.closers = append(n.closers, w.Close)
	if restored = commits > records.Commits(); restored {
		log.Error("the node's data is older than its containers: an older copy was restored, or the newest changes were lost",
			"commits", records.Commits(), "expected_commits", commits, "remedy", "see `doze doctor`: containers without a record are in quarantine")
		records.AdvanceCommits(commits)
	}
	records.Witness(w.record)
	return restored, nil
}

// start makes the Uplink and has the Manager recover the sandboxes.
func (n *Node) start(ctx context.Context, parts Parts) error {
	uplink, err := n.config.Uplink(ctx, parts)
	if err != nil {
		return err
	}
	n.closers = append(n.closers, uplink.Close)
	if err := n.Manager.Start(ctx, uplink); err != nil {
		// Before the parts that the Manager uses are closed.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), failedStartLimit)
		defer cancel()
		return errors.Join(fmt.Errorf("recover the sandboxes: %w", err), n.Manager.Close(ctx))
	}
	return nil
}

func (n *Node) openFreezer(engine *podman.Engine, log *slog.Logger) (sandbox.Freezer, error) {
	if n.config.Cgroup == "" {
		log.Warn("no cgroup subtree was found: sandboxes sleep and wake slowly, and their limits are not enforced",
			"remedy", "start the node with packaging/host/enter or packaging/doze.service")
		return podman.NewPauser(engine), nil
	}
	f, err := freezer.Open(n.config.Cgroup)
	if err != nil {
		return nil, err
	}
	n.closers = append(n.closers, f.Close)
	return f, nil
}

// removeStaleCgroups removes the cgroups of sandboxes that no longer exist. They cost only
// a little of the kernel's memory, so a failure does not prevent the node from starting.
func (n *Node) removeStaleCgroups(sandboxFreezer sandbox.Freezer, log *slog.Logger) {
	f, ok := sandboxFreezer.(*freezer.Freezer)
	if !ok {
		return
	}
	removed, err := f.RemoveStale(n.Manager.Knows)
	if err != nil {
		log.Warn("failed to remove empty cgroups of sandboxes that are gone", "error", err)
	}
	if removed > 0 {
		log.Info("removed empty cgroups of sandboxes that are gone", "count", removed)
	}
}

// sandboxCgroup returns the sandboxes' cgroup as /proc/PID/cgroup names it, or "" without
// a subtree.
func sandboxCgroup(cgroup string) string {
	if cgroup == "" {
		return ""
	}
	return strings.TrimPrefix(cgroup, freezer.MountPoint) + "/sandboxes"
}

// Token returns the API token. Never log it.
func (n *Node) Token() string { return n.token }

// Home returns the node's folder, an absolute path.
func (n *Node) Home() string { return n.config.Home }

// Apply changes the configuration of the running node. It returns the error of Check, and
// then changes nothing.
func (n *Node) Apply(cfg Config) error {
	if err := n.Check(cfg); err != nil {
		return err
	}
	if err := cfg.fill(); err != nil {
		return err
	}
	return n.Manager.Configure(cfg.Sandbox)
}

// Check returns the error that Apply would return. It changes nothing.
func (n *Node) Check(cfg Config) error { return n.config.CheckChange(cfg) }

// CheckChange checks whether a running node can change from configuration c to next. It
// returns a FixedError for each option that only a restart can change, joined by "; ", or
// the error of next.Sandbox.Validate.
func (c Config) CheckChange(next Config) error {
	if err := errors.Join(c.fill(), next.fill()); err != nil {
		return err
	}
	var refused error
	for _, c := range []struct{ option, have, want string }{
		{"data", c.Home, next.Home},
		{"token_file", c.TokenFile, next.TokenFile},
		{"guest", c.Guest, next.Guest},
		{"netns_helper", c.NetnsHelper, next.NetnsHelper},
		{"podman_socket", c.PodmanSocket, next.PodmanSocket},
		{"cgroup", c.Cgroup, next.Cgroup},
	} {
		switch fixed := (FixedError{c.option, c.have, c.want}); {
		case c.have == c.want:
		case refused == nil:
			refused = fixed
		default:
			refused = fmt.Errorf("%w; %w", refused, fixed)
		}
	}
	if refused != nil {
		return refused
	}
	return next.Sandbox.Validate()
}

// FixedError reports an option that only a restart can change.
type FixedError struct{ Option, Have, Want string }

func (e FixedError) Error() string {
	return fmt.Sprintf("%s cannot change from %q to %q while the node runs: restart it", e.Option, e.Have, e.Want)
}

// Close puts the running sandboxes to sleep and closes the node. The next node on the same
// home resumes them.
func (n *Node) Close(ctx context.Context) error {
	var errs []error
	if n.Manager != nil {
		errs = append(errs, n.Manager.Close(ctx))
	}
	for i := len(n.closers) - 1; i >= 0; i-- {
		errs = append(errs, n.closers[i]())
	}
	n.closers = nil
	return errors.Join(errs...)
}
