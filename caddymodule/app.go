// Package caddymodule contains the Caddy modules: the app that owns the node, the
// handlers of the API, previews and the proxy, and the permission for certificates.
// They register, parse, provision, validate and clean up; the behavior is in
// packages api, wakeproxy, egress and runtime.
package caddymodule

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"

	"github.com/doze-run/doze/api"
	"github.com/doze-run/doze/egress/proxy"
	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/wakeproxy"
)

func init() {
	caddy.RegisterModule(new(App))
}

// App owns the node: its store, its container engine and its sandboxes. The
// node outlives changes of the configuration: a reload touches no sandbox.
type App struct {
	// The folder with the node's data. Only one node at a time can use it. Default:
	// `$DOZE_HOME`.
	Data string `json:"data,omitempty"`
	// The file with the API token. The node creates it, with mode 0600, if it is missing.
	// Default: `token` in the data folder.
	TokenFile string `json:"token_file,omitempty"`
	// The socket of a Podman API service. If no service responds there, or its OCI runtime
	// is not `run/doze-crun` in the data folder, the node starts and supervises one.
	// Default: the user's own socket.
	PodmanSocket string `json:"podman_socket,omitempty"`
	// The program `doze-guest`, which becomes the first process of every sandbox. Default:
	// in the folder of the running program.
	Guest string `json:"guest,omitempty"`
	// The program `doze-netns`, which dials into sandboxes and starts them within their
	// quotas. Default: in the folder of the running program.
	NetnsHelper string `json:"netns_helper,omitempty"`
	// The program `doze-disk`, which takes and restores snapshots. Default: in the folder of the running program.
	DiskHelper string `json:"disk_helper,omitempty"`
	// The program `doze-backup`, which stores and restores backups. Default: in the folder of the running program.
	BackupHelper string `json:"backup_helper,omitempty"`
	// The program `doze-bucket`, which mounts buckets. Default: in the folder of the running program.
	BucketHelper string `json:"bucket_helper,omitempty"`
	// The cgroup v2 subtree of the node's user, such as `/sys/fs/cgroup/doze`. Without one,
	// sandboxes sleep and wake slowly and have no limits. Default: `$DOZE_CGROUP`.
	Cgroup string `json:"cgroup,omitempty"`

	// A short name of an image that sandboxes may use, and its reference. Repeatable; the
	// first one replaces the default. Default: `base`, `full`, `node` and `python` for
	// `localhost/doze/base:latest` and so on, which are [built on the node's
	// machine](../images.md).
	Images map[string]string `json:"images,omitempty"`
	// Patterns of other images that sandboxes may use, such as `docker.io/library/*`. `*`
	// matches anything but `/`; a last part `**` everything below; `**` alone every image.
	// Repeatable. Default: none.
	AllowImages []string `json:"allow_images,omitempty"`
	// The image of sandboxes that name none. Default: `base`.
	DefaultImage string `json:"default_image,omitempty"`
	// The limits of sandboxes of a size. A block for a built-in size changes the given
	// limits and keeps its other ones. Repeatable. Default: `lite` (0.25 CPUs, 256 MiB, 128
	// processes, 5 GiB of disk in 500,000 files), `basic` (1, 1 GiB, 512, 10 GiB in 1,000,000),
	// `standard` (2, 4 GiB, 1024, 20 GiB in 2,000,000).
	Sizes map[string]*Size `json:"sizes,omitempty"`
	// The size of sandboxes that name none. Default: `basic`.
	DefaultSize string `json:"default_size,omitempty"`

	// The idle time (`1s` to `365d`) after which a sandbox falls asleep; `0` means never by
	// itself. A sandbox can be created with another time. Default: `60s`.
	SleepAfter *caddy.Duration `json:"sleep_after,omitempty"`
	// The time asleep after which a sandbox is stopped, which frees its memory; `0` means
	// never by itself. A sandbox can be created with another time. Default: `24h`.
	StopAfter *caddy.Duration `json:"stop_after,omitempty"`
	// The time stopped (`1s` to `365d`) after which the disk of a sandbox is moved to the object
	// store of `backups`: its next use [downloads the disk](../backups.md#archive). `0` means
	// never by itself. A sandbox can be created with another time. Default: `0`.
	ArchiveAfter *caddy.Duration `json:"archive_after,omitempty"`
	// The share of one CPU core above which a sandbox is not idle. Default: `0.05`.
	IdleCPU *float64 `json:"idle_cpu,omitempty"`
	// The time asleep (`1s` to `365d`) after which the memory of a sandbox is moved to swap, where
	// [the machine has some](../operations.md#memory); `0` means never. Default: `1m`.
	ReclaimAfter *caddy.Duration `json:"reclaim_after,omitempty"`
	// The share of memory that stays available: below it, the sandboxes that have been asleep
	// longest are stopped, one at a time. `0%` disables this and `memory_stall`. Default: `5%`.
	MemoryReserve *float64 `json:"memory_reserve,omitempty"`
	// Sleeping sandboxes are also stopped when programs waited for memory for this share of the
	// last 10 seconds and less than four times `memory_reserve` is available; `0%` means never.
	// Default: `10%`.
	MemoryStall *float64 `json:"memory_stall,omitempty"`
	// Disk space to reserve. If less is free, the node refuses new sandboxes, uploads, and snapshots of
	// running sandboxes, and stops the sandbox whose disk grows most. Default: 5% of the file system, but at most
	// `2GiB`.
	DiskReserve int64 `json:"disk_reserve,omitempty"`
	// The time after which a wake has failed. Default: `1m`.
	WakeTimeout caddy.Duration `json:"wake_timeout,omitempty"`
	// The time after which a creation has failed, the pull of its image included. Default:
	// `15m`.
	CreateTimeout caddy.Duration `json:"create_timeout,omitempty"`
	// The time between SIGTERM and SIGKILL when a sandbox stops. Default: `10s`.
	StopGracePeriod caddy.Duration `json:"stop_grace_period,omitempty"`

	// The maximum number of sandboxes. Further ones are refused. Default: `20000`.
	MaxSandboxes int `json:"max_sandboxes,omitempty"`
	// The maximum number of requests that wait for wakes. Further ones get 503 with
	// Retry-After. Default: `16384`.
	MaxWaiters int `json:"max_waiters,omitempty"`
	// The maximum number of requests that wait for the wake of one sandbox. Default: `4096`.
	MaxWaitersPerSandbox int `json:"max_waiters_per_sandbox,omitempty"`

	// The domain of previews. `doze_api` never responds under it. Default:
	// `preview.doze.localhost`.
	PreviewDomain string `json:"preview_domain,omitempty"`
	// The port in the URLs of previews, as visitors use it. Default: `443`.
	PreviewPort int `json:"preview_port,omitempty"`

	// The rules and settings of outgoing traffic. Default: public addresses are reachable.
	Egress *Egress `json:"egress,omitempty"`

	// The object store for backups of sandboxes. Default: none.
	Backups *Backups `json:"backups,omitempty"`
	// A bucket that sandboxes may mount, under the name that clients of the API use. Repeatable. Default: none.
	Buckets map[string]*Bucket `json:"buckets,omitempty"`

	ctx      caddy.Context
	config   node.Config
	previews wakeproxy.Domains // all domains that a handler of this configuration serves previews under
	held     *heldNode         // nil until acquired
	live     atomic.Pointer[live]
}

// Size bounds the resources of a sandbox. A field that a new size omits has no limit,
// unless it has a default.
type Size struct {
	// CPU cores, at least 0.01. Default: no limit.
	CPUs float64 `json:"cpus,omitempty"`
	// Memory, at least 32 MiB. Default: no limit.
	Memory int64 `json:"memory,omitempty"`
	// Processes and threads, at least 16. Default: no limit.
	PIDs int64 `json:"pids,omitempty"`
	// Maximum disk space in addition to the image or snapshot, including logs and `/.doze/run`; at
	// least 16 MiB. A sandbox that exceeds it is [stopped](../operations.md#disks).
	// Default: no limit.
	Disk int64 `json:"disk,omitempty"`
	// Maximum number of files, folders and links, counted like `disk`; at least 100. Default: no limit.
	Files int64 `json:"files,omitempty"`
	// User namespaces that programs may create. Sandboxes within the sandbox need them
	// (bubblewrap, Chromium, `unshare --user`) if they run as another user than root. Beyond
	// the limit `unshare` and `clone` fail with ENOSPC ("No space left on device"). In its
	// own namespace every program has all capabilities, and so reaches more of the host's
	// kernel. Default: `0`.
	UserNamespaces int64 `json:"user_namespaces,omitempty"`
	// Inotify instances. Each program that watches files has at least one. Beyond the limit:
	// EMFILE. Default: `128`.
	InotifyInstances int64 `json:"inotify_instances,omitempty"`
	// Files and folders watched by inotify. Beyond the limit: ENOSPC. Default: `65536`.
	InotifyWatches int64 `json:"inotify_watches,omitempty"`
	// Queued signals and POSIX timers. Beyond the limit: EAGAIN. Default: `1024`.
	PendingSignals int64 `json:"pending_signals,omitempty"`
	// Bytes of POSIX message queues; a queue with the kernel's defaults takes 80 KiB. Beyond
	// the limit: EMFILE. Default: `200KiB`.
	MessageQueueBytes int64 `json:"message_queue_bytes,omitempty"`
}

// live is what handlers serve with once the node is open.
type live struct {
	*heldNode
	api   *api.API
	proxy *proxy.Handler
}

const (
	defaultPreviewDomain = "preview.doze.localhost"
	// A node with many sandboxes recovers in about 2 s; the rest is for Podman
	// to start on a busy machine.
	openTimeout = 2 * time.Minute
)

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "doze", New: func() caddy.Module { return new(App) }}
}

// Provision sets defaults. If the node is open already, as in a reload, it is
// acquired here, so that handlers serve from their first request; otherwise Start
// opens it, and a mere validation does not. While a node is open, other data folders are refused
// here, because Caddy may start the servers of a configuration before Start fails.
func (a *App) Provision(ctx caddy.Context) error {
	a.ctx = ctx
	warnOfPlainLogs(ctx.Logger())
	a.PreviewDomain = canonical(cmp.Or(a.PreviewDomain, defaultPreviewDomain))
	a.previews = wakeproxy.Domains{a.PreviewDomain}
	a.PreviewPort = cmp.Or(a.PreviewPort, 443)
	events, err := ctx.App("events")
	if err != nil {
		return err
	}
	if err := events.(*caddyevents.App).On("stopping", endStreams{a}); err != nil {
		return err
	}
	if a.config, err = a.nodeConfig(); err != nil {
		return err
	}
	held, err := loadOpenNode(a.config.Home)
	if held == nil || err != nil {
		return err
	}
	return a.serve(held)
}

// Validate checks the settings without opening anything.
func (a *App) Validate() error {
	if a.PreviewPort < 1 || a.PreviewPort > 65535 {
		return fmt.Errorf("preview_port is %d; a port is 1 to 65535", a.PreviewPort)
	}
	if err := wakeproxy.ValidateDomain(a.PreviewDomain); err != nil {
		return fmt.Errorf("preview_domain: %w", err)
	}
	cfg := a.config.Sandbox
	if _, named := cfg.Images.Names[cfg.Images.Default]; !named && len(cfg.Images.Allow) == 0 {
		return fmt.Errorf("default_image is %q, which no `image` names; name it, or choose another default", cfg.Images.Default)
	}
	return cfg.Validate()
}

// Start opens the node, or applies changed settings to the open one. It refuses an address
// that another process listens on, and a setting that cannot change while the node runs:
// then the reload fails and everything stays as it was.
func (a *App) Start() error {
	if err := a.checkListeners(); err != nil {
		return err
	}
	if a.held == nil {
		held, err := openNode(a)
		if err != nil {
			return fmt.Errorf("open the node: %w", err)
		}
		if err := a.serve(held); err != nil {
			return err
		}
	}
	if err := a.held.apply(a); err != nil {
		return err
	}
	captureStandardLog(a.held.Log())
	return nil
}

// serve makes the node available to the handlers of this configuration.
func (a *App) serve(held *heldNode) error {
	a.held = held
	routes, err := held.API(a.previewURL, version())
	if err != nil {
		return err
	}
	// The registry belongs to this configuration, the numbers to the node.
	registry := a.ctx.GetMetricsRegistry()
	for _, collector := range held.Collectors() {
		if err := registry.Register(collector); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	a.live.Store(&live{heldNode: held, api: routes, proxy: held.ExplicitProxy()})
	return nil
}

// Stop does nothing: Cleanup releases the node, after the next configuration has
// acquired it.
func (a *App) Stop() error { return nil }

// Cleanup releases the node. The last configuration that held it closes it, which
// puts the running sandboxes to sleep.
func (a *App) Cleanup() error {
	if a.held == nil {
		return nil
	}
	err := a.held.release(a)
	// The end of a configuration with a log of its own for the standard logger leads
	// that to stderr, although the next configuration has begun.
	captureStandardLog(a.held.Log())
	return err
}

// errNotOpen: a request came before the node was open.
var errNotOpen = errors.New("the node is starting")

// node returns the open node.
func (a *App) node() (*live, error) {
	if l := a.live.Load(); l != nil {
		return l, nil
	}
	return nil, errNotOpen
}

// notOpen is the response to requests that come before the node is open.
var notOpen = problem.New(problem.NodeUnavailable, "Try again in a moment.").WithHeader("Retry-After", "1")

// misdirected is the response to a request for the API or the proxy over a connection
// for a preview. A browser that shares connections makes another one.
var misdirected = problem.New(problem.RequestMisdirected, "The connection was made for the name of a preview. Connect with the name of this site.")

// serveOwn serves a request for the node itself, whose context ends with the node's
// requests. It refuses one over a TLS connection for the name of a preview.
func (a *App) serveOwn(w http.ResponseWriter, r *http.Request, handler func(*live) http.Handler) error {
	skipAccessLog(r)
	if r.TLS != nil && a.previews.Contains(r.TLS.ServerName) {
		misdirected.Write(w, r)
		return nil
	}
	node, err := a.node()
	if err != nil {
		notOpen.Write(w, r)
		return nil
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	defer context.AfterFunc(node.Requests(), func() { cancel(sandbox.ErrClosed) })()
	handler(node).ServeHTTP(w, r.WithContext(ctx))
	return nil
}

func (a *App) previewURL(sb sandbox.Sandbox, port sandbox.Port) string {
	return wakeproxy.URL(a.PreviewDomain, a.PreviewPort, sb, port)
}

// domains returns a handler's own domains, or else the app's, in lower case.
func (a *App) domains(own []string) []string {
	if len(own) == 0 {
		return []string{a.PreviewDomain}
	}
	domains := make([]string, len(own))
	for i, d := range own {
		domains[i] = canonical(d)
	}
	return domains
}

func canonical(domain string) string { return strings.ToLower(strings.TrimSuffix(domain, ".")) }

// nodeConfig translates the settings. It checks those that it converts.
func (a *App) nodeConfig() (node.Config, error) {
	settings, err := a.Egress.settings()
	if err != nil {
		return node.Config{}, err
	}
	backups, err := a.Backups.settings()
	if err != nil {
		return node.Config{}, err
	}
	buckets, err := a.bucketSettings()
	if err != nil {
		return node.Config{}, err
	}
	if err := a.checkArchiveAfter(); err != nil {
		return node.Config{}, err
	}
	home, err := a.home()
	if err != nil {
		return node.Config{}, err
	}
	sb := sandbox.DefaultConfig()
	for name, size := range a.Sizes {
		if size == nil {
			return node.Config{}, fmt.Errorf("size %q is null; write {} for one without limits of its own", name)
		}
		limits, known := sb.Sizes[name]
		if !known {
			limits.Quotas = sandbox.DefaultQuotas()
		}
		set(&limits.CPUs, size.CPUs)
		set(&limits.Memory, size.Memory)
		set(&limits.PIDs, size.PIDs)
		set(&limits.Disk, size.Disk)
		set(&limits.Files, size.Files)
		set(&limits.UserNamespaces, size.UserNamespaces)
		set(&limits.InotifyInstances, size.InotifyInstances)
		set(&limits.InotifyWatches, size.InotifyWatches)
		set(&limits.PendingSignals, size.PendingSignals)
		set(&limits.MessageQueueBytes, size.MessageQueueBytes)
		sb.Sizes[name] = limits
	}
	sb.Images.Names = a.Images
	if len(a.Images) == 0 {
		sb.Images.Names = map[string]string{}
		for _, name := range []string{"base", "full", "node", "python"} {
			sb.Images.Names[name] = "localhost/doze/" + name + ":latest"
		}
	}
	sb.Images.Allow = a.AllowImages
	set(&sb.Images.Default, a.DefaultImage)
	set(&sb.DefaultSize, a.DefaultSize)
	if a.SleepAfter != nil {
		sb.SleepAfter = time.Duration(*a.SleepAfter)
	}
	if a.StopAfter != nil {
		sb.StopAfter = time.Duration(*a.StopAfter)
	}
	if a.ArchiveAfter != nil {
		sb.ArchiveAfter = time.Duration(*a.ArchiveAfter)
	}
	if a.IdleCPU != nil {
		sb.IdleCPU = *a.IdleCPU
	}
	if a.ReclaimAfter != nil {
		sb.ReclaimAfter = time.Duration(*a.ReclaimAfter)
	}
	if a.MemoryReserve != nil {
		sb.MemoryReserve = *a.MemoryReserve
	}
	if a.MemoryStall != nil {
		sb.MemoryStall = *a.MemoryStall
	}
	set(&sb.DiskReserve, a.DiskReserve)
	set(&sb.WakeTimeout, time.Duration(a.WakeTimeout))
	set(&sb.CreateTimeout, time.Duration(a.CreateTimeout))
	set(&sb.StopGrace, time.Duration(a.StopGracePeriod))
	set(&sb.MaxSandboxes, a.MaxSandboxes)
	set(&sb.MaxWaiters, a.MaxWaiters)
	set(&sb.MaxWaitersPerSandbox, a.MaxWaitersPerSandbox)
	return node.Config{
		Home:         home,
		TokenFile:    a.TokenFile,
		Guest:        a.Guest,
		NetnsHelper:  a.NetnsHelper,
		DiskHelper:   a.DiskHelper,
		BackupHelper: a.BackupHelper,
		BucketHelper: a.BucketHelper,
		PodmanSocket: a.PodmanSocket,
		Cgroup:       a.Cgroup,
		Sandbox:      sb,
		Egress:       settings,
		Backups:      backups,
		Buckets:      buckets,
	}, nil
}

// set replaces a default, unless the value is zero.
func set[T comparable](field *T, value T) { *field = cmp.Or(value, *field) }

// exitGrace is the time that requests in flight get to finish when the process exits.
const exitGrace = 3 * time.Second

// endStreams ends the streams when the process exits: Caddy waits for requests in
// flight, and a stream may be in flight indefinitely. A reload ends none.
type endStreams struct{ *App }

// Handle implements caddyevents.Handler.
func (e endStreams) Handle(context.Context, caddy.Event) error {
	if l := e.live.Load(); l != nil && caddy.Exiting() {
		time.AfterFunc(exitGrace, l.EndRequests)
	}
	return nil
}

// Interface guards
var (
	_ caddy.App           = (*App)(nil)
	_ caddy.Provisioner   = (*App)(nil)
	_ caddy.Validator     = (*App)(nil)
	_ caddy.CleanerUpper  = (*App)(nil)
	_ caddyevents.Handler = endStreams{}
)
