package backup

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/doze-run/doze/testkit"
)

func TestSizeOfTheCacheIsMeasuredOnceAMinute(t *testing.T) {
	c := &Client{cfg: Config{Folder: filepath.Join(t.TempDir(), "backups")}}
	if bytes, err := c.CacheBytes(t.Context()); bytes != 0 || err != nil {
		t.Errorf("before the first backup: %d, %v", bytes, err)
	}
	testkit.NoError(t, "Mkdir", os.MkdirAll(filepath.Join(c.cfg.Folder, "cache"), 0o700))
	testkit.NoError(t, "WriteFile", os.WriteFile(filepath.Join(c.cfg.Folder, "cache", "f"), make([]byte, 1<<20), 0o600))
	if bytes, err := c.CacheBytes(t.Context()); bytes != 0 || err != nil {
		t.Errorf("within a minute: %d, %v", bytes, err)
	}
	c.cache.at = c.cache.at.Add(-cacheAge)
	if bytes, err := c.CacheBytes(t.Context()); bytes < 1<<20 || bytes > 2<<20 || err != nil {
		t.Errorf("a minute later: %d, %v", bytes, err)
	}
	c.cache.at = time.Time{}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.CacheBytes(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of the context: %v", err)
	}
}

// TestCacheOfAnEarlierBootIsDiscarded: a loss of power may have damaged it.
func TestCacheOfAnEarlierBootIsDiscarded(t *testing.T) {
	folder := t.TempDir()
	cached, note := filepath.Join(folder, "cache-1", "index"), filepath.Join(folder, "boot")
	use := func() (kept bool) {
		t.Helper()
		testkit.NoError(t, "Mkdir", os.MkdirAll(filepath.Dir(cached), 0o700))
		testkit.NoError(t, "WriteFile", os.WriteFile(cached, nil, 0o600))
		c := &Client{cfg: Config{Folder: folder}}
		testkit.NoError(t, "discard", c.discardStaleCache())
		_, err := os.Stat(cached)
		return err == nil
	}
	if use() {
		t.Error("a cache of an unknown boot stays")
	}
	if !use() {
		t.Error("the cache of this boot was discarded")
	}
	testkit.NoError(t, "WriteFile", os.WriteFile(note, []byte("another\n"), 0o600))
	if use() {
		t.Error("the cache of another boot stays")
	}
	if !use() {
		t.Error("the cache of this boot was discarded")
	}
}
