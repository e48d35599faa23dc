// Package backup implements sandbox.Backups with a Kopia repository in an S3 bucket.
//
// The files of a sandbox belong to user ids that only Podman's user namespace has. Therefore each
// operation runs in a process in that namespace, the backup helper (command doze-backup), which
// ends with the operation.
package backup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/runtime/disk"
	"github.com/doze-run/doze/runtime/podman"
	"github.com/doze-run/doze/runtime/sandbox"
)

const (
	// maxTransfers limits concurrent backups and restores. Each of them uses up to 500 MB of memory.
	// maxQueries limits other concurrent operations. Operations beyond the limits wait.
	maxTransfers = 2
	maxQueries   = 4
	// queryLimit bounds an operation other than a backup or a restore.
	queryLimit = 5 * time.Minute
	// maintenanceInterval is how often the node checks whether maintenance of the repository is due.
	// Kopia runs most of it once a day.
	maintenanceInterval = time.Hour
	// firstMaintenance is the pause after the start, so that a node that restarts often maintains, too.
	firstMaintenance = 5 * time.Minute
	maintenanceLimit = 6 * time.Hour
)

// Config of a Client.
type Config struct {
	ObjectStore
	// Password from which the key of the repository is derived. The first backup creates the
	// repository with this password. Without the password, no backup can be read.
	Password string
	// Helper and NetnsHelper are the paths of doze-backup and doze-netns.
	Helper, NetnsHelper string
	// Disks stores the snapshots that Create reads and Restore creates.
	Disks *disk.Client
	// Folder for the repository's cache. The node's user can write to it.
	Folder string
	// Node is the id of the node. Several nodes can share a repository.
	Node string
	Log  *slog.Logger
}

// ObjectStore is a bucket of an S3-compatible object store.
type ObjectStore struct {
	// Endpoint is a URL such as https://s3.example.com.
	Endpoint string `json:"endpoint"`
	// Region of the bucket. Empty means the object store's default.
	Region string `json:"region,omitempty"`
	Bucket string `json:"bucket"`
	// Prefix of all keys, such as "node-1/"; may be empty.
	Prefix    string `json:"prefix,omitempty"`
	AccessKey string `json:"access_key"`
	SecretKey string `json:"secret_key"`
}

// Client implements sandbox.Backups. Create one with New.
type Client struct {
	cfg                Config
	transfers, queries *semaphore.Weighted

	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	running sync.WaitGroup
	mu      sync.Mutex
	closed  bool

	cache cacheUsage
	fresh struct {
		mu      sync.Mutex
		checked bool // the cache is of this boot
	}
}

// New returns a Client, which maintains the repository in the background until Close. The caller closes it.
func New(cfg Config) *Client {
	c := &Client{cfg: cfg, transfers: semaphore.NewWeighted(maxTransfers), queries: semaphore.NewWeighted(maxQueries)}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.running.Go(c.maintain)
	return c
}

// Close cancels all operations and waits for them to end. It is idempotent.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cancel()
	c.running.Wait()
	return nil
}

// maintain calls Maintain every maintenanceInterval until Close.
func (c *Client) maintain() {
	for wait := firstMaintenance; ; wait = maintenanceInterval {
		select {
		case <-c.ctx.Done():
			return
		case <-time.After(wait):
		}
		if err := c.Maintain(c.ctx); err != nil && c.ctx.Err() == nil {
			c.cfg.Log.Warn("failed to maintain the backup repository, trying again later", "error", err)
		}
	}
}

// Maintain runs the maintenance that is due: it removes content that no backup uses, and compacts the
// repository.
func (c *Client) Maintain(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, maintenanceLimit)
	defer cancel()
	_, err := c.run(ctx, c.queries, wire.Request{Operation: wire.Maintain}, nil, nil)
	return err
}

// record is the JSON that the repository stores with each backup.
type record struct {
	sandbox.Backup
	Format int `json:"format"`
}

// Versions of the records and of the layout of backups. A node ignores backups of later versions: a node that does not
// support partial backups would replace the whole disk with one.
const (
	wholeFormat   = 1
	partialFormat = 2
)

func formatOf(b sandbox.Backup) int {
	if b.Partial() {
		return partialFormat
	}
	return wholeFormat
}

// Create implements sandbox.Backups.
func (c *Client) Create(ctx context.Context, b sandbox.Backup, snapshot sandbox.SnapshotID, progress func(sandbox.BackupProgress)) (sandbox.Backup, error) {
	layers, err := c.cfg.Disks.Layers(ctx, snapshot)
	if err != nil {
		return sandbox.Backup{}, err
	}
	b.Layers = layers.Image
	request := createRequest(b, layers)
	if request.Record, err = recordOf(b); err != nil {
		return sandbox.Backup{}, err
	}
	return c.upload(ctx, b, request, progress, nil)
}

// CreateRunning implements sandbox.Backups.
func (c *Client) CreateRunning(ctx context.Context, b sandbox.Backup, stop sandbox.StopPrograms, progress func(sandbox.BackupProgress)) (sandbox.Backup, error) {
	layers, err := c.cfg.Disks.DiskLayers(ctx, b.Sandbox)
	if err != nil {
		return sandbox.Backup{}, err
	}
	request := createRequest(b, layers)
	request.Running = true
	created, err := c.upload(ctx, b, request, progress, func(ctx context.Context, capture func(context.Context) error) (json.RawMessage, error) {
		frozen, origin, err := stop(ctx, func(ctx context.Context) error {
			if now, err := c.cfg.Disks.DiskLayers(ctx, b.Sandbox); err != nil {
				return err
			} else if !slices.Equal(now.Folders, layers.Folders) {
				return fmt.Errorf("the sandbox has another disk: %w", sandbox.ErrNeedsSnapshot)
			}
			b.CreatedAt = time.Now().UTC()
			return capture(ctx)
		})
		if err != nil {
			return nil, err
		}
		b.Frozen, b.Origin, b.Layers = frozen, origin, layers.Image
		return recordOf(b)
	})
	if err != nil {
		return sandbox.Backup{}, err
	}
	created.CreatedAt, created.Frozen, created.Origin, created.Layers = b.CreatedAt, b.Frozen, b.Origin, b.Layers
	return created, nil
}

// createRequest returns the request for a backup without its record.
func createRequest(b sandbox.Backup, layers disk.Layers) wire.Request {
	return wire.Request{
		Operation: wire.Create, Owner: b.Owner, IDs: []string{string(b.ID)}, Limit: sandbox.MaxBackups, Sandbox: string(b.Sandbox), Time: b.CreatedAt, Layers: layers.Folders, Below: layers.Below,
		Paths: b.Paths, Shift: uint32(podman.MappedIDs.HostID - podman.MappedIDs.ContainerID), Excludes: b.Excludes, Gitignore: b.Gitignore,
	}
}

func recordOf(b sandbox.Backup) (json.RawMessage, error) { return json.Marshal(record{b, formatOf(b)}) }

// upload runs a request to create the backup b, and returns b with its size and duration.
func (c *Client) upload(ctx context.Context, b sandbox.Backup, request wire.Request, progress func(sandbox.BackupProgress), stop stopPrograms) (sandbox.Backup, error) {
	result, err := c.run(ctx, c.transfers, request, report(progress, sandbox.BackupUpload), stop)
	if err != nil {
		return sandbox.Backup{}, fmt.Errorf("back up sandbox %s: %w", b.Sandbox, err)
	}
	b.Usage, b.Stored, b.Duration = sandbox.DiskUsage(result.Usage), result.Stored, sandbox.Duration(result.Duration)
	return b, nil
}

// report returns a function that passes the helper's progress on to progress.
func report(progress func(sandbox.BackupProgress), phase sandbox.BackupPhase) func(wire.Progress) {
	return func(p wire.Progress) {
		progress(sandbox.BackupProgress{Phase: phase, Done: sandbox.DiskUsage(p.Done), Total: sandbox.DiskUsage(p.Total)})
	}
}

// Restore implements sandbox.Backups.
func (c *Client) Restore(ctx context.Context, b sandbox.Backup, snapshot sandbox.SnapshotID, anyImage bool, progress func(sandbox.BackupProgress)) (sandbox.DiskUsage, error) {
	if b.Partial() {
		return sandbox.DiskUsage{}, fmt.Errorf("restore backup %s: it has only a part of a disk", b.ID)
	}
	image := disk.Image{Layers: b.Layers, Name: b.Origin.ImageRef, OtherLayers: anyImage}
	mismatch := func(err error) error {
		if errors.Is(err, disk.ErrNoImage) {
			return &sandbox.ImageMismatchError{Image: b.Origin.Image}
		}
		return err
	}
	if err := c.cfg.Disks.HasImage(ctx, image); err != nil { // before the transfer
		return sandbox.DiskUsage{}, mismatch(err)
	}
	usage, err := c.Download(ctx, b, snapshot, progress)
	if err != nil {
		return sandbox.DiskUsage{}, err
	}
	if err := mismatch(c.cfg.Disks.Adopt(ctx, snapshot, image)); err != nil {
		return sandbox.DiskUsage{}, fmt.Errorf("restore backup %s: %w", b.ID, err)
	}
	return usage, nil
}

// Download implements sandbox.Backups.
func (c *Client) Download(ctx context.Context, b sandbox.Backup, snapshot sandbox.SnapshotID, progress func(sandbox.BackupProgress)) (sandbox.DiskUsage, error) {
	target, err := c.cfg.Disks.Staging(ctx, snapshot)
	if err != nil {
		return sandbox.DiskUsage{}, err
	}
	result, err := c.run(ctx, c.transfers, wire.Request{Operation: wire.Restore, IDs: []string{string(b.ID)}, Target: target}, report(progress, sandbox.BackupDownload), nil)
	if err != nil {
		return sandbox.DiskUsage{}, fmt.Errorf("restore backup %s: %w", b.ID, err)
	}
	return sandbox.DiskUsage(result.Usage), nil
}

// List implements sandbox.Backups.
func (c *Client) List(ctx context.Context, owner string) ([]sandbox.Backup, error) {
	result, err := c.query(ctx, wire.Request{Operation: wire.List, Owner: owner})
	if err != nil {
		return nil, fmt.Errorf("list the backups: %w", err)
	}
	list := make([]sandbox.Backup, 0, len(result.Backups))
	for _, stored := range result.Backups {
		var r record
		if err := json.Unmarshal(stored.Record, &r); err != nil {
			return nil, fmt.Errorf("list the backups: %w", err)
		}
		if r.Format > partialFormat {
			c.cfg.Log.Warn("ignoring backup of a newer version of doze", "backup", r.ID)
			continue
		}
		r.Usage, r.Stored, r.Duration = sandbox.DiskUsage(stored.Usage), stored.Stored, sandbox.Duration(stored.Duration)
		list = append(list, r.Backup)
	}
	return list, nil
}

// Delete implements sandbox.Backups.
func (c *Client) Delete(ctx context.Context, ids []sandbox.BackupID) error {
	request := wire.Request{Operation: wire.Delete, IDs: make([]string, len(ids))}
	for i, id := range ids {
		request.IDs[i] = string(id)
	}
	if _, err := c.query(ctx, request); err != nil {
		return fmt.Errorf("delete backups: %w", err)
	}
	return nil
}

// query runs a request other than a backup or a restore. If the request does not end within queryLimit,
// query returns *sandbox.ObjectStoreError.
func (c *Client) query(ctx context.Context, request wire.Request) (wire.Result, error) {
	limited, cancel := context.WithTimeout(ctx, queryLimit)
	defer cancel()
	result, err := c.run(limited, c.queries, request, nil, nil)
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		err = &sandbox.ObjectStoreError{Failure: sandbox.ObjectStoreUnreachable, Err: fmt.Errorf("no response within %s", queryLimit)}
	}
	return result, err
}

// complete sets the fields that all requests have in common, and creates the cache folder.
func (c *Client) complete(request *wire.Request) error {
	endpoint, err := url.Parse(c.cfg.Endpoint)
	if err != nil {
		return err
	}
	request.Store = wire.Store{
		Endpoint: endpoint.Host, TLS: endpoint.Scheme != "http", Region: c.cfg.Region, Bucket: c.cfg.Bucket, Prefix: c.cfg.Prefix,
		AccessKey: c.cfg.AccessKey, SecretKey: c.cfg.SecretKey,
	}
	request.Password, request.Cache, request.Node = c.cfg.Password, c.cfg.Folder, c.cfg.Node
	if err := os.MkdirAll(c.cfg.Folder, 0o700); err != nil {
		return err
	}
	return c.discardStaleCache()
}

var _ sandbox.Backups = (*Client)(nil)
