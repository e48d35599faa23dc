package helper

import (
	"sync"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/bucket/bucketfs"
)

// sandboxes are the sandboxes that have mounts.
type sandboxes struct {
	resources *bucketfs.Resources

	mu   sync.Mutex
	byID map[string]*sandbox
}

// sandbox is a sandbox that has mounts, or files that are open after an unmount.
type sandbox struct {
	share *bucketfs.Share
	users int // guarded by sandboxes.mu

	mounting sync.Mutex // held while a mount is attached or detached
	// served are the mounts by path, and all also the file systems that were unmounted or replaced while files are open.
	// Guarded by mounting.
	served map[string]*fileSystem
	all    map[*fileSystem]bool
}

// fileSystem is a file system that this helper serves.
type fileSystem struct {
	server *bucketfs.Server
	pid    int // of the sandbox's first process
	device uint64
}

// has reports whether a mount is of the file system.
func (fs *fileSystem) has(m *mountinfo.Info) bool {
	return unix.Mkdev(uint32(m.Major), uint32(m.Minor)) == fs.device
}

func newSandboxes(r *bucketfs.Resources) *sandboxes {
	return &sandboxes{resources: r, byID: map[string]*sandbox{}}
}

// join returns a sandbox. The caller calls drop.
func (s *sandboxes) join(id string) *sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	sb := s.byID[id]
	if sb == nil {
		sb = &sandbox{share: s.resources.NewShare(), served: map[string]*fileSystem{}, all: map[*fileSystem]bool{}}
		s.byID[id] = sb
	}
	sb.users++
	return sb
}

func (s *sandboxes) drop(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sb := s.byID[id]
	if sb.users--; sb.users == 0 {
		delete(s.byID, id)
	}
}
