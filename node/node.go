// Package node puts the parts of a node together: the store, the engine, the
// freezer, the way into the sandboxes, and the Manager over them.
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

// Config of a node. Only Home is required.
type Config struct {
	// Home is the folder with all that the node keeps. One node at a time uses it.
	Home string
	// TokenFile holds the API token and is made if it is missing. Default: Home/token.
	TokenFile string
	// Guest and NetnsHelper are the paths of doze-guest and doze-netns.
	// Default: beside the running program.
	Guest, NetnsHelper string
	// PodmanSocket of a Podman service to use. Default: the user's own; where
	// it does not answer, the node starts one.
	PodmanSocket string
	// Cgroup is the cgroup v2 subtree that belongs to the node's user. Default:
	// $DOZE_CGROUP. Without one, sandboxes are frozen by Podman, which takes
	// about 100 times as long, and have no limits.
	Cgroup string
	// Sandbox configures the Manager; its RunDir and GuestBinary are set here.
	Sandbox sandbox.Config
	// Uplink makes the sandboxes' way out, before any sandbox is recovered; the
	// node closes it. Without one, sandboxes have none.
	Uplink func(context.Context, Parts) (Uplink, error)
}

// Parts of a node that its Uplink works with. They live longer than it.
type Parts struct {
	Folder    string // the Uplink's own, below Home
	Documents Documents
	Devices   Devices
	Log       *slog.Logger
}

// Documents are kept in the node's store; the comments of store.Badger are the
// contract.
type Documents interface {
	PutDocument(ctx context.Context, kind, name string, value []byte) error
	DeleteDocument(ctx context.Context, kind, name string) error
	Documents(ctx context.Context, kind string, yield func(name string, value []byte) error) error
}

// Devices makes network devices in sandboxes; the comments of netns.Client are the
// contract.
type Devices interface {
	TUN(ctx context.Context, id sandbox.ID, pid int) (device *os.File, listener *net.TCPListener, err error)
}

// Uplink is the sandboxes' way out, which needs the Manager as the Manager needs it.
type Uplink interface {
	sandbox.Uplink
	// Bind gives it the Manager, which has not started.
	Bind(*sandbox.Manager)
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
	beside := filepath.Dir(program)
	for _, d := range []struct {
		field *string
		value string
	}{
		{&c.TokenFile, filepath.Join(c.Home, "token")},
		{&c.Guest, filepath.Join(beside, "doze-guest")},
		{&c.NetnsHelper, filepath.Join(beside, "doze-netns")},
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

// failedStartLimit bounds the end of a node that could not recover.
const failedStartLimit = 30 * time.Second

// Open brings a node up: it takes the store, finds or starts Podman, and
// recovers what the last run left. A home that another node uses returns
// store.ErrInUse (wrapped).
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
			return nil, fmt.Errorf("making the node's folders: %w", err)
		}
	}
	restrict(cfg.Home, log)
	findings := checkHost(ctx, cfg)
	// The store is first: it is what keeps a second node out.
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
	frost, err := n.openFreezer(engine, log)
	if err != nil {
		return nil, err
	}
	inside, err := netns.Open(netns.Config{Helper: cfg.NetnsHelper, Cgroup: sandboxCgroup(cfg.Cgroup), Log: log})
	if err != nil {
		return nil, err
	}
	n.closers = append(n.closers, inside.Close)
	deps := sandbox.Deps{Engine: engine, Freezer: frost, Network: inside, Store: records, Restored: restored,
		Creations: creationsDir(storage, records.NodeID()), Origins: originsDir(storage, records.NodeID()), PublicRoots: publicRoots, Log: log}
	if err := n.open(ctx, deps, Parts{filepath.Join(cfg.Home, "egress"), records, inside, log}); err != nil {
		return nil, err
	}
	if err := n.Manager.Start(ctx); err != nil {
		// Before the parts that it works with are closed.
		closeCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), failedStartLimit)
		defer cancel()
		return nil, errors.Join(fmt.Errorf("recovering the sandboxes: %w", err), n.Manager.Close(closeCtx))
	}
	n.removeStaleCgroups(frost, log)
	return n, nil
}

// witness has every commit of the store noted beside Podman's containers. restored
// says that the store is older than what is noted there.
func (n *Node) witness(storage string, records *store.Badger, log *slog.Logger) (restored bool, err error) {
	w, commits, err := openWitness(storage, records.NodeID(), n.config.Home, log)
	if err != nil {
		return false, err
	}
	n.closers = append(n.closers, w.Close)
	if restored = commits > records.Commits(); restored {
		log.Error("the node's data is older than its containers: a copy was put back, or the newest changes were lost",
			"commits", records.Commits(), "expected_commits", commits, "remedy", "see `doze doctor`: containers without a record are in quarantine")
		records.AdvanceCommits(commits)
	}
	records.Witness(w.note)
	return restored, nil
}

// open makes the Manager and its Uplink.
func (n *Node) open(ctx context.Context, deps sandbox.Deps, parts Parts) error {
	var uplink Uplink
	if n.config.Uplink != nil {
		var err error
		if uplink, err = n.config.Uplink(ctx, parts); err != nil {
			return err
		}
		n.closers = append(n.closers, uplink.Close)
		deps.Uplink = uplink
	}
	var err error
	if n.Manager, err = sandbox.New(n.config.Sandbox, deps); err != nil {
		return err
	}
	if uplink != nil {
		uplink.Bind(n.Manager)
	}
	return nil
}

func (n *Node) openFreezer(engine *podman.Engine, log *slog.Logger) (sandbox.Freezer, error) {
	if n.config.Cgroup == "" {
		log.Warn("no cgroup subtree: sandboxes sleep and wake slowly, and nothing limits them",
			"remedy", "start the node by packaging/host/enter or by packaging/doze.service")
		return podman.NewPauser(engine), nil
	}
	f, err := freezer.Open(n.config.Cgroup)
	if err != nil {
		return nil, err
	}
	n.closers = append(n.closers, f.Close)
	return f, nil
}

// removeStaleCgroups removes what earlier runs left of sandboxes that are gone. It is
// only a little memory of the kernel's, so a failure keeps no node from starting.
func (n *Node) removeStaleCgroups(frost sandbox.Freezer, log *slog.Logger) {
	f, ok := frost.(*freezer.Freezer)
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

// sandboxCgroup names the sandboxes' cgroup as /proc/PID/cgroup does.
func sandboxCgroup(cgroup string) string {
	if cgroup == "" {
		return ""
	}
	return strings.TrimPrefix(cgroup, freezer.MountPoint) + "/sandboxes"
}

// Token is the API token. Never log it.
func (n *Node) Token() string { return n.token }

// Home is the node's folder.
func (n *Node) Home() string { return n.config.Home }

// Apply changes the configuration of the running node. What only a restart can
// change is refused, and then nothing is changed.
func (n *Node) Apply(cfg Config) error {
	if err := n.Check(cfg); err != nil {
		return err
	}
	if err := cfg.fill(); err != nil {
		return err
	}
	return n.Manager.Configure(cfg.Sandbox)
}

// Check returns the error that Apply would. It changes nothing.
func (n *Node) Check(cfg Config) error { return n.config.CheckChange(cfg) }

// CheckChange checks whether a running node with the configuration c can have the next
// one: a FixedError for each option that only a restart can change.
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

// FixedError is about an option that only a restart can change.
type FixedError struct{ Option, Have, Want string }

func (e FixedError) Error() string {
	return fmt.Sprintf("%s cannot change from %q to %q while the node runs: restart it", e.Option, e.Have, e.Want)
}

// Close puts the running sandboxes to sleep and ends the node. The next node
// on the same home resumes them.
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
