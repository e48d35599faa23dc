package helper

import (
	"sync"

	"github.com/doze-run/doze/runtime/bucket/bucketfs"
)

// sandboxes are the sandboxes that have mounts.
type sandboxes struct {
	resources *bucketfs.Resources

	mu   sync.Mutex
	byID map[string]*sandbox
}

// sandbox is a sandbox that has mounts. The fields are guarded by sandboxes.mu.
type sandbox struct {
	share *bucketfs.Share
	users int
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
		sb = &sandbox{share: s.resources.NewShare()}
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
