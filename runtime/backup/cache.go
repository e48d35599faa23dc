package backup

import (
	"context"
	"errors"
	"fmt"
	"os"
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
