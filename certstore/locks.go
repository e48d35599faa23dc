package certstore

import (
	"context"
	"fmt"
	"io/fs"
	"sync"
)

// locks are named locks. They are in memory: one process at a time has the store open, so a
// lock that a killed process held has ended with it. None has to expire.
type locks struct {
	mu   sync.Mutex
	held map[string]chan struct{} // closed when the lock is released
}

// acquire acquires the lock and returns nil, or returns a channel that is closed when its
// holder releases it.
func (l *locks) acquire(name string) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if released, held := l.held[name]; held {
		return released
	}
	if l.held == nil {
		l.held = map[string]chan struct{}{}
	}
	l.held[name] = make(chan struct{})
	return nil
}

// Lock implements certmagic.Locker.
func (s *Storage) Lock(ctx context.Context, name string) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		released := s.locks.acquire(name)
		if released == nil {
			return nil
		}
		select {
		case <-released:
		case <-ctx.Done():
		}
	}
}

// TryLock implements certmagic.TryLocker.
func (s *Storage) TryLock(ctx context.Context, name string) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	return s.locks.acquire(name) == nil, nil
}

// Unlock implements certmagic.Locker. A lock that is not held is fs.ErrNotExist (wrapped).
// It works after the store was closed.
func (s *Storage) Unlock(_ context.Context, name string) error {
	s.locks.mu.Lock()
	defer s.locks.mu.Unlock()
	released, held := s.locks.held[name]
	if !held {
		return fmt.Errorf("the lock is not held: %w", fs.ErrNotExist)
	}
	delete(s.locks.held, name)
	close(released)
	return nil
}
