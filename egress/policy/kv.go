package policy

import (
	"encoding/binary"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doze-run/doze/egress/secret"
)

// Limits on a namespace of a policy.
const (
	maxKeys       = 1024
	maxKey        = 256     // bytes
	maxValue      = 4 << 10 // bytes
	maxStored     = 1 << 20 // bytes of keys and values
	maxNamespaces = 10_000  // of all policies; further namespaces cannot store values
	// maxTotal bounds the bytes that all policies store in namespaces of one name, which is
	// their owner's: an owner may push a hundred policies.
	maxTotal = 16 << 20
)

// kv holds the stored values of all policies.
type kv struct {
	persistence
	mu     sync.Mutex
	spaces map[string]*space
	totals map[string]*atomic.Int64 // bytes by namespace
}

// space holds the values that one policy has stored in one namespace.
type space struct {
	mu      sync.Mutex
	entries map[string]entry
	size    int
	total   *atomic.Int64 // size of all spaces of the namespace; may be nil
	gone    bool          // no longer in kv

	changed uint16 // a bit for each page that has changed since it was written; see mark
	notify  chan<- struct{}
	stored  bool      // documents of it may exist
	due     time.Time // earliest time at which changes may be written
}

type entry struct {
	value   []byte
	expires time.Time // zero: never
}

func (e entry) expired(now time.Time) bool { return !e.expires.IsZero() && !now.Before(e.expires) }

// spaceName returns the name of a policy's space for a namespace.
func spaceName(policy, namespace string) string { return policy + "\x00" + namespace }

// use calls f with the locked space of a name. It returns false if a new space would exceed
// maxNamespaces.
func (k *kv) use(name string, now time.Time, f func(*space)) bool {
	for {
		s := k.space(name, now)
		if s == nil {
			return false
		}
		if s.use(f) {
			return true
		}
	}
}

// use calls f, which may panic, with the space locked. It returns false if the space was
// removed from kv.
func (s *space) use(f func(*space)) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return false
	}
	f(s)
	return true
}

func (k *kv) space(name string, now time.Time) *space {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s := k.spaces[name]; s != nil {
		return s
	}
	if len(k.spaces) >= maxNamespaces && !k.sweep(now) {
		return nil
	}
	if k.spaces == nil {
		k.spaces, k.totals = map[string]*space{}, map[string]*atomic.Int64{}
	}
	_, namespace, _ := strings.Cut(name, "\x00")
	if k.totals[namespace] == nil {
		k.totals[namespace] = new(atomic.Int64)
	}
	s := &space{entries: map[string]entry{}, total: k.totals[namespace], notify: k.changed}
	k.spaces[name] = s
	return s
}

// forget removes a space with all its values.
func (k *kv) forget(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s := k.spaces[name]; s != nil {
		s.mu.Lock()
		s.grow(-s.size)
		clear(s.entries) // trim may still hold this space, and would subtract the sizes of its entries again
		s.gone = true
		s.mu.Unlock()
		delete(k.spaces, name)
	}
}

// sweep removes empty spaces without unwritten changes. It reports whether it found any.
func (k *kv) sweep(now time.Time) (found bool) {
	for name, s := range k.spaces {
		s.mu.Lock()
		if s.expire(now); k.unused(s) {
			s.gone, found = true, true
			delete(k.spaces, name)
		}
		s.mu.Unlock()
	}
	return found
}

// unused reports whether a locked space is empty, without unwritten changes.
func (k *kv) unused(s *space) bool {
	return len(s.entries) == 0 && !s.gone && (k.documents == nil || s.changed == 0)
}

// trim is sweep for the janitor. It locks k.mu for each space that may be removed only: there may
// be millions of values.
func (k *kv) trim(now time.Time) {
	k.mu.Lock()
	spaces := maps.Clone(k.spaces)
	k.mu.Unlock()
	for name, s := range spaces {
		s.mu.Lock()
		s.expire(now)
		unused := k.unused(s)
		s.mu.Unlock()
		if unused {
			k.remove(name, s)
		}
	}
}

// remove removes a space that is still unused.
func (k *kv) remove(name string, s *space) {
	k.mu.Lock()
	defer k.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if k.unused(s) {
		s.gone = true
		delete(k.spaces, name)
	}
}

func (s *space) expire(now time.Time) {
	for key, e := range s.entries {
		if e.expired(now) {
			s.remove(key)
		}
	}
}

func (s *space) remove(key string) {
	s.grow(-len(key) - len(s.entries[key].value))
	delete(s.entries, key)
	s.mark(1 << pageOf(key))
}

// mark schedules the write of pages. It notifies the writer only of the first change: the
// writer knows of the space until the changes are written.
func (s *space) mark(pages uint16) {
	if s.changed == 0 {
		select {
		case s.notify <- struct{}{}:
		default:
		}
	}
	s.changed |= pages
}

func (s *space) get(key string, now time.Time) ([]byte, bool) {
	e, ok := s.entries[key]
	if !ok || e.expired(now) {
		return nil, false
	}
	return e.value, true
}

func (s *space) set(key string, value []byte, ttl time.Duration, now time.Time) error {
	if len(key) == 0 || len(key) > maxKey || len(value) > maxValue || ttl < 0 {
		return secret.ErrBadArgument
	}
	if !s.reserve(key, value) {
		if s.expire(now); !s.reserve(key, value) {
			return secret.ErrLimit
		}
	}
	e := entry{value: append([]byte(nil), value...)}
	if ttl > 0 {
		e.expires = now.Add(ttl)
	}
	s.entries[key] = e
	s.mark(1 << pageOf(key))
	return nil
}

// reserve counts a value that is stored next, or returns false if it exceeds a limit.
func (s *space) reserve(key string, value []byte) bool {
	count, growth := len(s.entries)+1, len(key)+len(value)
	if old, ok := s.entries[key]; ok {
		count--
		growth -= len(key) + len(old.value)
	}
	if count > maxKeys || s.size+growth > maxStored {
		return false
	}
	if total := s.grow(growth); growth > 0 && total > maxTotal {
		s.grow(-growth)
		return false
	}
	return true
}

// grow adds n bytes to the sizes, and returns the size of the namespace.
func (s *space) grow(n int) (total int64) {
	s.size += n
	if s.total == nil {
		return 0
	}
	return s.total.Add(int64(n))
}

// add adds delta to a counter and returns the sum. A counter is 8 bytes, little-endian,
// and starts at 0. Its ttl starts when it is created.
func (s *space) add(key string, delta int64, ttl time.Duration, now time.Time) (int64, error) {
	value, ok := s.get(key, now)
	if !ok {
		return delta, s.set(key, binary.LittleEndian.AppendUint64(nil, uint64(delta)), ttl, now)
	}
	if len(value) != 8 {
		return 0, secret.ErrBadArgument
	}
	old := int64(binary.LittleEndian.Uint64(value))
	sum := old + delta
	if (sum > old) != (delta > 0) && delta != 0 { // overflow
		return 0, secret.ErrLimit
	}
	binary.LittleEndian.PutUint64(value, uint64(sum))
	s.mark(1 << pageOf(key))
	return sum, nil
}
