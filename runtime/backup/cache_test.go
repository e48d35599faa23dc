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
