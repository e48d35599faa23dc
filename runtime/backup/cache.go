package backup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/disk/tree"
)

const (
	// cacheAge is how old the result of CacheBytes can be.
	cacheAge = time.Minute
	// measureLimit and maxCacheEntries bound a measurement. The helper bounds the bytes of the cache, which
	// usually has a few thousand files. Beyond these limits, CacheBytes returns what has been counted.
	measureLimit    = time.Second
	maxCacheEntries = 100_000
)

// cacheUsage is the last measurement of the cache.
type cacheUsage struct {
	mu    sync.Mutex // held during a measurement
	at    time.Time
	bytes int64
}

// CacheBytes implements sandbox.Backups.
func (c *Client) CacheBytes(ctx context.Context) (int64, error) {
	c.cache.mu.Lock()
	defer c.cache.mu.Unlock()
	if !c.cache.at.IsZero() && time.Since(c.cache.at) < cacheAge {
		return c.cache.bytes, nil
	}
	limited, cancel := context.WithTimeout(ctx, measureLimit)
	defer cancel()
	usage, err := tree.Measure(limited, c.cfg.Folder, tree.Usage{Entries: maxCacheEntries})
	switch {
	case errors.Is(err, os.ErrNotExist): // no backup yet
	case err != nil && (limited.Err() == nil || ctx.Err() != nil):
		return 0, fmt.Errorf("measure the cache of backups: %w", err)
	}
	c.cache.at, c.cache.bytes = time.Now(), usage.Bytes
	return usage.Bytes, nil
}

// bootID is a file with the id of the present boot.
const bootID = "/proc/sys/kernel/random/boot_id"

// discardStaleCache empties the cache of an earlier boot, once per run of the node. Kopia does not sync the cache, and does not detect all the
// damage that a loss of power does to it: with a damaged index, it reads no backup.
func (c *Client) discardStaleCache() error {
	c.fresh.mu.Lock()
	defer c.fresh.mu.Unlock()
	if c.fresh.checked {
		return nil
	}
	boot, err := os.ReadFile(bootID)
	if err != nil {
		return fmt.Errorf("read the id of the boot: %w", err)
	}
	note := filepath.Join(c.cfg.Folder, "boot")
	if last, err := os.ReadFile(note); err != nil || !bytes.Equal(last, boot) {
		entries, err := os.ReadDir(c.cfg.Folder)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := os.RemoveAll(filepath.Join(c.cfg.Folder, e.Name())); err != nil {
				return fmt.Errorf("empty the cache of backups: %w", err)
			}
		}
		if err := os.WriteFile(note, boot, 0o600); err != nil {
			return err
		}
	}
	c.fresh.checked = true
	return nil
}
