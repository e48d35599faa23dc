package policy

import (
	"cmp"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// cache stores machine code on disk. Each program has its own folder, which is named
// after the module's digest and whose modification time is the time of the last use.
type cache struct {
	dir   string
	limit int64
	mu    sync.Mutex // locked while old code is removed
}

func (c *cache) remove(digest string) { _ = os.RemoveAll(filepath.Join(c.dir, digest)) }

// used marks a program as just used, and removes the least recently used ones until
// the rest fits into limit.
func (c *cache) used(digest string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	_ = os.Chtimes(filepath.Join(c.dir, digest), now, now)
	folders, err := os.ReadDir(c.dir)
	if err != nil {
		return // nothing is evicted; once the disk is full, code is compiled each time
	}
	var programs []fs.FileInfo
	var total int64
	for _, f := range folders {
		if info, err := f.Info(); err == nil {
			programs = append(programs, info)
			total += size(filepath.Join(c.dir, info.Name()))
		}
	}
	slices.SortFunc(programs, func(a, b fs.FileInfo) int {
		return cmp.Or(a.ModTime().Compare(b.ModTime()), cmp.Compare(a.Name(), b.Name()))
	})
	for _, p := range programs {
		if total <= c.limit {
			return
		}
		if p.Name() != digest {
			total -= size(filepath.Join(c.dir, p.Name()))
			c.remove(p.Name())
		}
	}
}

func size(dir string) (total int64) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if info, err := d.Info(); err == nil {
				total += info.Size()
			}
		}
		return nil
	})
	return total
}
