package bucketfs

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxHandles limits the open files and folders of a sandbox. A folder holds a page of its list, up to 400 KB.
	maxHandles = 1024
	// maxReadAhead limits the memory in bytes of the streams of a sandbox.
	maxReadAhead = 64 << 20
	// readAheadPool limits the memory of the streams of all sandboxes. Files are readable without it, with more requests.
	readAheadPool = 256 << 20
	// maxNodes limits the files and folders that the kernel knows, of a sandbox. A node uses 350 bytes, and its key twice.
	maxNodes = 256 << 10
	// nodePool limits the nodes of all sandboxes.
	nodePool = 1 << 20
	// pruneInterval is the minimum time between two calls of Share.prune: they visit all nodes.
	pruneInterval = time.Second
)

// Resources are what all sandboxes of the process use together. They are safe for concurrent use.
type Resources struct {
	scratch                          string
	space, readAhead, handles, nodes pool
}

// NewResources returns resources with the scratch folder dir, which must exist. limit bounds the size of the files that
// are being written, in bytes. They have no name in the folder, so that a crash leaves none.
func NewResources(dir string, limit int64) *Resources {
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil || files.Cur > 1<<20 {
		files.Cur = 1 << 20
	}
	// A file that is being written has a descriptor. Connections and devices use the other half.
	return &Resources{
		scratch: dir, space: pool{limit: limit}, readAhead: pool{limit: readAheadPool},
		handles: pool{limit: int64(files.Cur / 2)}, nodes: pool{limit: nodePool},
	}
}

// Share is the part of the resources that one sandbox may use, with all its mounts.
type Share struct {
	scratch               string
	space, handles, nodes *quota
	streams               *streams

	pruning atomic.Bool
	mu      sync.Mutex
	mounts  map[*mount]bool
}

// NewShare returns the share of a sandbox without mounts.
func (r *Resources) NewShare() *Share {
	return &Share{
		scratch: r.scratch,
		space:   &quota{pool: &r.space, max: r.space.limit},
		handles: &quota{pool: &r.handles, max: maxHandles},
		nodes:   &quota{pool: &r.nodes, max: maxNodes},
		streams: newStreams(&quota{pool: &r.readAhead, max: maxReadAhead}),
		mounts:  map[*mount]bool{},
	}
}

// add adds a mount. remove removes it.
func (s *Share) add(m *mount) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mounts[m] = true
}

func (s *Share) remove(m *mount) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mounts, m)
}

// prune makes the kernel forget nodes of all mounts.
func (s *Share) prune() {
	s.mu.Lock()
	mounts := slices.Collect(maps.Keys(s.mounts))
	s.mu.Unlock()
	for _, m := range mounts {
		m.prune()
	}
}

// pool is an amount of a resource, such as bytes of memory.
type pool struct {
	limit int64

	mu   sync.Mutex
	used int64
}

// quota is what one sandbox uses of a pool: at most half of what the others leave, so that a part is always free for
// another one, and at most max.
type quota struct {
	pool *pool
	max  int64
	used int64 // guarded by pool.mu
}

// acquire reserves n units of the pool. It reports false, and reserves nothing, if the quota or the pool does not have them.
func (q *quota) acquire(n int64) bool {
	q.pool.mu.Lock()
	defer q.pool.mu.Unlock()
	if n > 0 && q.used+n > q.limit() {
		return false
	}
	q.used += n
	q.pool.used += n
	return true
}

// limit returns how much the sandbox may use now. The caller holds q.pool.mu.
func (q *quota) limit() int64 { return min(q.max, (q.pool.limit-(q.pool.used-q.used))/2) }

// isScarce reports whether the sandbox uses more than three quarters of its limit.
func (q *quota) isScarce() bool {
	q.pool.mu.Lock()
	defer q.pool.mu.Unlock()
	return q.used > q.limit()/4*3
}

func (q *quota) free(n int64) {
	q.pool.mu.Lock()
	defer q.pool.mu.Unlock()
	q.used -= n
	q.pool.used -= n
}

// inUse returns what the sandbox uses.
func (q *quota) inUse() int64 {
	q.pool.mu.Lock()
	defer q.pool.mu.Unlock()
	return q.used
}
