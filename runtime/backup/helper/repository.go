package helper

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	iofs "io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/blob"
	"github.com/kopia/kopia/repo/content"
	"github.com/kopia/kopia/repo/format"
	"github.com/kopia/kopia/repo/maintenance"
	"github.com/kopia/kopia/repo/manifest"
	"github.com/kopia/kopia/snapshot"
	"github.com/kopia/kopia/snapshot/snapshotmaintenance"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/wire"
)

const (
	formatBlob = "kopia.repository"
	// contentCache and metadataCache limit the cache on the disk of the node, in bytes.
	contentCache  = 256 << 20
	metadataCache = 256 << 20
	// abandoned is the time without maintenance by the owner after which another node maintains the
	// repository.
	abandoned = 7 * 24 * time.Hour
	// storageType is the name under which the store is registered with Kopia.
	storageType = "doze"
)

// Keys of manifests.
const (
	ownerTag  = "tag:owner"
	backupTag = "tag:backup"
)

// repository is an open Kopia repository.
type repository struct {
	store *store
	cache string // folder
	repo.DirectRepository
}

// connected is the store of this process, which serves one request.
var connected atomic.Pointer[store]

func init() {
	// The configuration file of a repository names the type. The credentials stay in memory.
	blob.AddSupportedStorage(storageType, struct{}{}, func(context.Context, *struct{}, bool) (blob.Storage, error) { return connected.Load(), nil })
}

// open opens the repository. If the repository does not exist, a request to create a backup creates it. For
// other requests, a missing repository is treated as empty: its DirectRepository is nil.
func open(ctx context.Context, request wire.Request) (*repository, error) {
	s, err := openStore(ctx, request.Store)
	if err != nil {
		return nil, err
	}
	return openIn(ctx, s, request)
}

// openIn is open with a connected store.
func openIn(ctx context.Context, s *store, request wire.Request) (*repository, error) {
	s.ctx = ctx
	connected.Store(s)
	r := &repository{store: s, cache: cacheFolder(request)}
	if _, err := s.GetMetadata(ctx, formatBlob); errors.Is(err, blob.ErrBlobNotFound) {
		if request.Operation != wire.Create {
			return r, nil
		}
		if err := s.initialize(ctx, request); err != nil {
			return nil, r.explain(fmt.Errorf("create the repository: %w", err))
		}
	} else if err != nil {
		return nil, err
	}
	config, err := configure(request)
	if err != nil {
		return nil, err
	}
	opened, err := repo.Open(ctx, config, request.Password, &repo.Options{OnFatalError: func(error) {}, DisableInternalLog: true})
	if errors.Is(err, repo.ErrInvalidPassword) {
		return nil, &wire.Error{Code: wire.Password, Message: "the password does not decrypt its parameters"}
	}
	if err != nil {
		return nil, r.explain(fmt.Errorf("open the repository: %w", err))
	}
	r.DirectRepository = opened.(repo.DirectRepository)
	return r, nil
}

// initialize creates the repository unless another helper of the node has done so. Kopia would overwrite the keys
// of a repository that another helper creates at the same time.
func (s *store) initialize(ctx context.Context, request wire.Request) error {
	lock, err := os.OpenFile(filepath.Join(request.Cache, "create.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close() // releases the lock
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock the creation of the repository: %w", err)
	}
	if _, err := s.GetMetadata(ctx, formatBlob); !errors.Is(err, blob.ErrBlobNotFound) {
		return err
	}
	if err := s.removeRemnant(ctx); err != nil {
		return err
	}
	err = repo.Initialize(ctx, s, &repo.NewRepositoryOptions{BlockFormat: format.ContentFormat{Hash: "BLAKE3-256-128"}}, request.Password)
	if errors.Is(err, repo.ErrAlreadyInitialized) {
		return nil
	}
	return err
}

// removeRemnant deletes the configuration blob that an interrupted creation of the repository left. Kopia writes
// this blob first, and reports it without a repository as damage. If the bucket has packs or indexes, the
// repository is really damaged.
func (s *store) removeRemnant(ctx context.Context) error {
	found := errors.New("found")
	for _, prefix := range []blob.ID{"p", "q", "x"} { // packs and indexes
		err := s.ListBlobs(ctx, prefix, func(blob.Metadata) error { return found })
		if errors.Is(err, found) {
			return damaged(fmt.Errorf("the object %s is missing, but the bucket has content of a repository", formatBlob))
		}
		if err != nil {
			return err
		}
	}
	return s.DeleteBlob(ctx, format.KopiaBlobCfgBlobID)
}

// cacheOf returns the name of the cache folder of a repository. It differs from the cache of an earlier
// bucket or prefix, whose parameters do not apply.
func cacheOf(s wire.Store) string {
	sum := sha256.Sum256([]byte(s.Endpoint + "\x00" + s.Bucket + "\x00" + s.Prefix))
	return "cache-" + hex.EncodeToString(sum[:8])
}

func cacheFolder(request wire.Request) string {
	return filepath.Join(request.Cache, cacheOf(request.Store))
}

// configure writes the configuration file of the repository, and returns its path.
func configure(request wire.Request) (string, error) {
	config := repo.LocalConfig{
		Storage: &blob.ConnectionInfo{Type: storageType, Config: struct{}{}},
		Caching: &content.CachingOptions{
			CacheDirectory: cacheFolder(request), ContentCacheSizeBytes: contentCache, MetadataCacheSizeBytes: metadataCache,
		},
		ClientOptions: repo.ClientOptions{Hostname: "node-" + request.Node, Username: "doze", FormatBlobCacheDuration: -1},
	}
	text, err := json.Marshal(config)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(config.Caching.CacheDirectory, 0o700); err != nil {
		return "", err
	}
	file, err := os.CreateTemp(request.Cache, "config-*")
	if err != nil {
		return "", err
	}
	defer os.Remove(file.Name()) // unless it is renamed
	_, err = file.Write(text)
	path := filepath.Join(request.Cache, "repository.config")
	if err = errors.Join(err, file.Close()); err == nil {
		err = os.Rename(file.Name(), path) // atomic, because other helpers read the file
	}
	return path, err
}

func (r *repository) close() {
	if r.DirectRepository != nil {
		_ = r.Close(context.Background()) // all writes are flushed
	}
}

// discardContents removes what Kopia has cached of the content of files. No other restore is likely to need it, and the sync
// that makes a restored disk durable would write it to the disk, too. A restore that runs at the same time receives it again.
func (r *repository) discardContents() {
	_ = os.RemoveAll(filepath.Join(r.cache, "contents")) // Kopia limits what stays
}

// explain replaces an error by the failure of the object store that caused it, if there is one. If a
// read failed although the object store did not fail, the repository is damaged.
func (r *repository) explain(err error) error {
	if err == nil {
		return nil
	}
	if _, known := errors.AsType[*wire.Error](err); known {
		return err
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return &wire.Error{Code: wire.Full, Message: err.Error()}
	}
	if _, local := errors.AsType[*iofs.PathError](err); local {
		return err
	}
	if failure := r.store.failure(); failure != nil {
		return fmt.Errorf("%w", failure)
	}
	if _, unreadable := errors.AsType[*readError](err); unreadable {
		return damaged(err)
	}
	return err
}

// write calls f with a writer of the repository, and flushes the writer if f succeeds.
func (r *repository) write(ctx context.Context, f func(context.Context, repo.DirectRepositoryWriter) error) error {
	return repo.DirectWriteSession(ctx, r, repo.WriteSessionOptions{Purpose: "doze"}, f)
}

// list returns the backups of an owner.
func (r *repository) list(ctx context.Context, owner string) ([]wire.Backup, error) {
	manifests, err := r.find(ctx, map[string]string{ownerTag: owner})
	if err != nil {
		return nil, err
	}
	backups := make([]wire.Backup, 0, len(manifests))
	for _, m := range manifests {
		var b wire.Backup
		if err := json.Unmarshal([]byte(m.Description), &b); err != nil {
			return nil, damaged(fmt.Errorf("read the record of backup %s: %w", m.ID, err))
		}
		backups = append(backups, b)
	}
	return backups, nil
}

// find returns the manifests with these tags, none if the repository does not exist.
func (r *repository) find(ctx context.Context, tags map[string]string) ([]*snapshot.Manifest, error) {
	if r.DirectRepository == nil {
		return nil, nil
	}
	ids, err := snapshot.ListSnapshotManifests(ctx, r, nil, tags)
	if err != nil {
		return nil, unreadable(ctx, "records of backups", err)
	}
	manifests, err := snapshot.LoadSnapshots(ctx, r, ids)
	return manifests, unreadable(ctx, "records of backups", err)
}

// delete deletes the manifests of backups. Maintenance removes their content.
func (r *repository) delete(ctx context.Context, ids []string) error {
	var found []manifest.ID
	for _, id := range ids {
		manifests, err := r.find(ctx, map[string]string{backupTag: id})
		if err != nil {
			return err
		}
		for _, m := range manifests {
			found = append(found, m.ID)
		}
	}
	if len(found) == 0 {
		return nil
	}
	return r.write(ctx, func(ctx context.Context, w repo.DirectRepositoryWriter) error {
		for _, id := range found {
			if err := w.DeleteManifest(ctx, id); err != nil {
				return err
			}
		}
		return nil
	})
}

// maintain runs the maintenance that is due: it removes content that no backup uses, and compacts the
// repository. Only the node that owns the repository maintains it; see own.
func (r *repository) maintain(ctx context.Context) error {
	if r.DirectRepository == nil {
		return nil
	}
	return r.write(ctx, func(ctx context.Context, w repo.DirectRepositoryWriter) error {
		if err := own(ctx, w); err != nil {
			return err
		}
		err := snapshotmaintenance.Run(ctx, w, maintenance.ModeAuto, false, maintenance.SafetyFull)
		if _, other := errors.AsType[maintenance.NotOwnedError](err); other {
			return nil
		}
		return err
	})
}

// own records this node as the owner of the repository, which maintains it, unless another node is recorded
// that has maintained it within the last abandoned.
func own(ctx context.Context, w repo.DirectRepositoryWriter) error {
	has, err := maintenance.HasParams(ctx, w)
	if err != nil {
		return err
	}
	params, err := maintenance.GetParams(ctx, w)
	if err != nil {
		return err
	}
	self := w.ClientOptions().UsernameAtHost()
	if has && params.Owner == self {
		return nil
	}
	if has {
		schedule, err := maintenance.GetSchedule(ctx, w)
		if err != nil {
			return err
		}
		last := schedule.NextQuickMaintenanceTime
		if last.IsZero() { // the owner has not maintained the repository yet
			entries, err := w.FindManifests(ctx, map[string]string{"type": "maintenance"})
			if err != nil {
				return err
			}
			for _, e := range entries {
				if e.ModTime.After(last) {
					last = e.ModTime
				}
			}
		}
		if time.Since(last) < abandoned {
			return nil
		}
	}
	params.Owner = self
	return maintenance.SetParams(ctx, w, params)
}

// readError is a failure to read from the repository. Its cause is the object store or damage.
type readError struct{ err error }

func (e *readError) Error() string { return e.err.Error() }
func (e *readError) Unwrap() error { return e.err }

// unreadable wraps a failure to read from the repository in a readError that names what was read.
// After the end of ctx, unreadable returns err unchanged.
func unreadable(ctx context.Context, what string, err error) error {
	if err == nil || ctx.Err() != nil {
		return err
	}
	return &readError{fmt.Errorf("read %s: %w", what, err)}
}

// damaged returns the error for invalid data from the object store.
func damaged(err error) error { return &wire.Error{Code: wire.Damaged, Message: err.Error()} }
