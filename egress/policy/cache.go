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
	type cached struct {
		name string
		size int64
		last time.Time
	}
	var all []cached
	var total int64
	for _, f := range folders {
		info, err := f.Info()
		if err != nil {
			continue
		}
		k := cached{f.Name(), size(filepath.Join(c.dir, f.Name())), info.ModTime()}
		total += k.size
		all = append(all, k)
	}
	slices.SortFunc(all, func(a, b cached) int { return cmp.Or(a.last.Compare(b.last), cmp.Compare(a.name, b.name)) })
	for _, k := range all {
		if total <= c.limit {
			return
		}
		if k.name != digest {
			c.remove(k.name)
			total -= k.size
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
