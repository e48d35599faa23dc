// Package node assembles a node: the store, the engine, the freezer, the access to the
// sandboxes' networks, the Manager that uses them, egress, previews and the API.
package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/doze-run/doze/api"
	"github.com/doze-run/doze/api/signedurl"
	"github.com/doze-run/doze/egress"
	"github.com/doze-run/doze/egress/proxy"
	"github.com/doze-run/doze/runtime/backup"
	"github.com/doze-run/doze/runtime/bucket"
	"github.com/doze-run/doze/runtime/disk"
	"github.com/doze-run/doze/runtime/doctor"
	"github.com/doze-run/doze/runtime/freezer"
	"github.com/doze-run/doze/runtime/memory"
	"github.com/doze-run/doze/runtime/netns"
	"github.com/doze-run/doze/runtime/podman"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store"
	"github.com/doze-run/doze/runtime/store/document"
	"github.com/doze-run/doze/wakeproxy"
)

// Operator owns all sandboxes as long as the node has one token.
const Operator = "operator"

// signedURLKey is the name of the key from which the keys of signed URLs are derived.
const signedURLKey = "signed_urls"

// Config of a node. Home, Sandbox and Egress are required.
type Config struct {
	// Home is the folder with all of the node's data. One node at a time may use it.
	Home string
	// TokenFile holds the API token and is created if it is missing. Default: Home/token.
	TokenFile string
	// Guest, NetnsHelper, DiskHelper, BackupHelper and BucketHelper are the paths of doze-guest, doze-netns,
	// doze-disk, doze-backup and doze-bucket. Default: in the folder of the running program.
	Guest, NetnsHelper, DiskHelper, BackupHelper, BucketHelper string
	// PodmanSocket of the Podman service to use. Default: the user's own; if that does
	// not respond, the node starts one.
	PodmanSocket string
	// Cgroup is the cgroup v2 subtree that belongs to the node's user. Default:
	// $DOZE_CGROUP. Without one, Podman freezes the sandboxes, which takes about 100
	// times as long, and no limits are enforced.
	Cgroup string
	// Sandbox configures the Manager. Open replaces its RunDir and GuestBinary.
	Sandbox sandbox.Config
	// Egress configures what sandboxes may send out.
	Egress egress.Settings
	// PolicyCompiler is the program that compiles policies. Default: the running program.
	PolicyCompiler string
	// Backups is where backups of sandboxes are stored; nil: nowhere.
	Backups *Backups
	// Buckets are the buckets that sandboxes may mount, by name.
	Buckets map[string]bucket.Bucket
}

// Backups is an object store and the password for the backups in it.
type Backups struct {
	backup.ObjectStore
	Password string
}

// String describes the object store, without secrets.
func (b *Backups) String() string {
	if b == nil {
		return "none"
	}
	return describeStore(b.Endpoint, b.Bucket, b.Prefix, b.Region)
}

func describeStore(endpoint, bucket, prefix, region string) string {
	description := endpoint + "/" + bucket + "/" + prefix
	if region != "" {
		description += " in " + region
	}
	return description
}

// describeBuckets describes buckets in the order of their names, without secrets.
func describeBuckets(buckets map[string]bucket.Bucket) string {
	if len(buckets) == 0 {
		return "none"
	}
	var list []string
	for _, name := range slices.Sorted(maps.Keys(buckets)) {
		b := buckets[name]
		description := name + ": " + describeStore(b.Endpoint, b.Bucket, b.Prefix, b.Region)
		if b.ReadOnly {
			description += ", read-only"
		}
		list = append(list, description)
	}
	return strings.Join(list, "; ")
}

// equal compares all settings.
func (b *Backups) equal(other *Backups) bool {
	return b == other || b != nil && other != nil && *b == *other
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
	c.TokenFile = cmp.Or(c.TokenFile, filepath.Join(c.Home, "token"))
	c.Guest = cmp.Or(c.Guest, filepath.Join(programs, "doze-guest"))
	c.NetnsHelper = cmp.Or(c.NetnsHelper, filepath.Join(programs, "doze-netns"))
	c.DiskHelper = cmp.Or(c.DiskHelper, filepath.Join(programs, "doze-disk"))
	c.BackupHelper = cmp.Or(c.BackupHelper, filepath.Join(programs, "doze-backup"))
	c.BucketHelper = cmp.Or(c.BucketHelper, filepath.Join(programs, "doze-bucket"))
	c.Cgroup = cmp.Or(c.Cgroup, os.Getenv("DOZE_CGROUP"))
	c.Sandbox.RunDir = filepath.Join(c.Home, "run")
	c.Sandbox.GuestBinary = filepath.Join(c.Home, "guest", "doze-guest")
	return nil
}

// Node is a running node. Close ends it.
type Node struct {
	Sandboxes *sandbox.Manager
	Egress    *egress.Egress
	Previews  *wakeproxy.Proxy

	config      Config
	token       string
	signer      *signedurl.Signer
	log         *slog.Logger
	apiMetrics  *api.Metrics
	requests    context.Context // ends with EndRequests
	endAPICalls context.CancelFunc
	closers     closers
}

// closers are in the order of opening.
type closers []func() error

// close closes in the reverse order.
func (c *closers) close() error {
	var errs []error
	for _, closeOne := range slices.Backward(*c) {
		errs = append(errs, closeOne())
	}
	*c = nil
	return errors.Join(errs...)
}

// failedStartLimit bounds the end of a node that could not recover.
const failedStartLimit = 30 * time.Second

// Open is OpenOn with a store that it opens with OpenStore, and that ends with the node.
func Open(ctx context.Context, cfg Config, log *slog.Logger) (*Node, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	records, err := OpenStore(cfg.Home, log)
	if err != nil {
		return nil, err
	}
	n, err := OpenOn(ctx, cfg, records, log)
	if err != nil {
		return nil, errors.Join(err, records.Close())
	}
	n.closers = append(closers{records.Close}, n.closers...)
	return n, nil
}

// OpenOn starts a node on its store: it finds or starts Podman, and recovers what the last
// run left. The caller closes the store after the node.
func OpenOn(ctx context.Context, cfg Config, records *store.Badger, log *slog.Logger) (_ *Node, err error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	var opened closers
	defer func() {
		if err != nil {
			err = errors.Join(err, opened.close())
		}
	}()
	if err := os.MkdirAll(cfg.Sandbox.RunDir, 0o700); err != nil {
		return nil, fmt.Errorf("create the node's folders: %w", err)
	}
	findings := checkHost(ctx, cfg)
	token, err := readToken(cfg.TokenFile)
	if err != nil {
		return nil, err
	}
	if err := installGuest(cfg.Guest, cfg.Sandbox.GuestBinary); err != nil {
		return nil, err
	}
	engine, err := podman.Open(ctx, podman.Config{Node: records.NodeID(), RunDir: cfg.Sandbox.RunDir, Socket: cfg.PodmanSocket, Helper: cfg.NetnsHelper, Log: log})
	var images podman.Storage
	if err == nil {
		opened = append(opened, engine.Close)
		images, err = engine.Storage(ctx)
	}
	checked := <-findings
	if err == nil {
		checked = append(checked, doctor.StorageDriver(images.Driver))
	}
	if fatal := report(checked, log); fatal != nil {
		return nil, fatal // with remedies, unlike the engine's error
	}
	if err != nil {
		return nil, err
	}
	storage := images.GraphRoot
	w, commits, err := openWitness(storage, records.NodeID(), cfg.Home, log)
	if err != nil {
		return nil, err
	}
	opened = append(opened, w.Close)
	restored := w.watch(records, commits)
	var sandboxFreezer sandbox.Freezer = podman.NewPauser(engine)
	var cgroups *freezer.Freezer // nil without a subtree
	var sandboxCgroup string     // as /proc/PID/cgroup names it
	if cfg.Cgroup == "" {
		log.Warn("no cgroup subtree was found: sandboxes sleep and wake slowly, and their limits are not enforced",
			"remedy", "start the node with packaging/host/enter or packaging/doze.service")
	} else {
		if cgroups, err = freezer.Open(cfg.Cgroup); err != nil {
			return nil, err
		}
		opened = append(opened, cgroups.Close)
		sandboxFreezer = cgroups
		sandboxCgroup = strings.TrimPrefix(cfg.Cgroup, freezer.MountPoint) + "/sandboxes"
	}
	network, err := netns.Open(netns.Config{Helper: cfg.NetnsHelper, Cgroup: sandboxCgroup, Log: log})
	if err != nil {
		return nil, err
	}
	opened = append(opened, network.Close)
	disks := disk.New(disk.Config{
		Helper: cfg.DiskHelper, NetnsHelper: cfg.NetnsHelper, Storage: images, Folder: filepath.Join(nodesDir(storage), records.NodeID()+".disks"),
		Run: cfg.Sandbox.RunDir, Node: records.NodeID(), Log: log,
	})
	opened = append(opened, disks.Close)
	var backups sandbox.Backups // nil without an object store
	if cfg.Backups != nil {
		client := backup.New(backup.Config{
			ObjectStore: cfg.Backups.ObjectStore, Password: cfg.Backups.Password, Helper: cfg.BackupHelper, NetnsHelper: cfg.NetnsHelper,
			Disks: disks, Folder: filepath.Join(cfg.Home, "backups"), Node: records.NodeID(), Log: log,
		})
		opened = append(opened, client.Close)
		backups = client
	}
	var buckets sandbox.Buckets // nil without any
	if len(cfg.Buckets) > 0 {
		client := bucket.New(bucket.Config{
			Buckets: cfg.Buckets, Helper: cfg.BucketHelper, NetnsHelper: cfg.NetnsHelper, Cgroup: sandboxCgroup, Scratch: filepath.Join(cfg.Home, "buckets"), Log: log,
		})
		opened = append(opened, client.Close)
		buckets = client
	}
	n, err := Assemble(ctx, cfg, Backends{
		Deps: sandbox.Deps{
			Engine: engine, Disks: disks, Backups: backups, Buckets: buckets, Freezer: sandboxFreezer, Memory: memory.New(freezer.MountPoint, cfg.Cgroup), Network: network, Store: records, PublicRoots: publicRoots, Restored: restored, Log: log,
			Creations: filepath.Join(nodesDir(storage), records.NodeID()+".creating"),
			Origins:   filepath.Join(nodesDir(storage), records.NodeID()+".origins"),
		},
		Documents: records, Device: network.TUN, Token: token,
	})
	if err != nil {
		return nil, err
	}
	n.closers = append(opened, n.closers...)
	if cgroups != nil {
		n.removeStaleCgroups(cgroups)
	}
	return n, nil
}

// Backends are what a node uses. The caller closes them after the node. egress.Config
// documents the fields without a comment.
type Backends struct {
	sandbox.Deps
	Documents document.Store
	Device    egress.DeviceFunc
	// Uplink replaces the node's egress in tests whose sandboxes have no network
	// namespaces. Default: the node's egress.
	Uplink sandbox.Uplink
	Token  string // of the API
}

// Assemble starts a node on backends and recovers the sandboxes of the last run.
func Assemble(ctx context.Context, cfg Config, b Backends) (_ *Node, err error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	n := &Node{config: cfg, token: b.Token, log: b.Log, apiMetrics: api.NewMetrics()}
	n.requests, n.endAPICalls = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			// The Manager is closed before what it works with.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), failedStartLimit)
			defer cancel()
			err = errors.Join(err, n.Close(ctx))
		}
	}()
	if n.Sandboxes, err = sandbox.New(cfg.Sandbox, b.Deps); err != nil {
		return nil, err
	}
	n.Previews = wakeproxy.New(wakeproxy.Of(n.Sandboxes), b.Log)
	n.Egress, err = egress.Open(ctx, egress.Config{
		Folder: egressFolder(cfg.Home), Documents: b.Documents, Device: b.Device, Sandboxes: egress.ManagedSandboxes(n.Sandboxes),
		Operator: Operator, Settings: cfg.Egress, Log: b.Log, PolicyCompiler: cfg.PolicyCompiler,
	})
	if err != nil {
		return nil, err
	}
	n.closers = closers{n.Egress.Close}
	secret, err := n.Egress.NodeKey(ctx, signedURLKey)
	if err != nil {
		return nil, err
	}
	n.signer = signedurl.New(secret, api.TokenGeneration(n.token))
	uplink := b.Uplink
	if uplink == nil {
		uplink = n.Egress
	}
	if err := n.Sandboxes.Start(ctx, uplink); err != nil {
		return nil, fmt.Errorf("recover the sandboxes: %w", err)
	}
	return n, nil
}

// removeStaleCgroups removes the cgroups of sandboxes that no longer exist. They cost only
// a little of the kernel's memory, so a failure does not prevent the node from starting.
func (n *Node) removeStaleCgroups(cgroups *freezer.Freezer) {
	removed, err := cgroups.RemoveStale(n.Sandboxes.Knows)
	if err != nil {
		n.log.Warn("failed to remove empty cgroups of sandboxes that are gone", "error", err)
	}
	if removed > 0 {
		n.log.Info("removed empty cgroups of sandboxes that are gone", "count", removed)
	}
}

// API returns the HTTP API of the node. All APIs of a node count into its metrics.
func (n *Node) API(previewURL func(sandbox.Sandbox, sandbox.Port) string, version string) (*api.API, error) {
	return api.New(api.Config{
		Sandboxes:  n.Sandboxes,
		Egress:     n.Egress,
		Auth:       api.SingleToken(n.token, Operator),
		Signer:     n.signer,
		PreviewURL: previewURL,
		Version:    version,
		Log:        n.log,
		Metrics:    n.apiMetrics,
	})
}

// ExplicitProxy returns the HTTP proxy for programs outside of sandboxes.
func (n *Node) ExplicitProxy() *proxy.Handler {
	return &proxy.Handler{Authenticate: api.SingleToken(n.token, Operator), Egress: n.Egress}
}

// Collectors are the node's metrics.
func (n *Node) Collectors() []prometheus.Collector {
	return []prometheus.Collector{n.Sandboxes, n.Egress.Flows, n.apiMetrics}
}

// Log returns the node's log.
func (n *Node) Log() *slog.Logger { return n.log }

// Requests ends when the node no longer serves requests to its API.
func (n *Node) Requests() context.Context { return n.requests }

// EndRequests ends all requests to the API and to previews.
func (n *Node) EndRequests() {
	n.endAPICalls()
	if n.Previews != nil {
		n.Previews.Close()
	}
}

// Close ends all requests, puts the running sandboxes to sleep and ends the node. The
// next node on the same home resumes them.
func (n *Node) Close(ctx context.Context) error {
	n.EndRequests()
	var err error
	if n.Sandboxes != nil {
		err = n.Sandboxes.Close(ctx)
	}
	return errors.Join(err, n.closers.close())
}
