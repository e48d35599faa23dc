package quota_test

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/quota"
)

func TestChildAcquiresFromItselfAndItsParent(t *testing.T) {
	parent := quota.New(3)
	a, b := parent.Child(2), parent.Child(2)
	acquire := func(p *quota.Pool, n int64, want error) {
		t.Helper()
		if err := p.TryAcquire(n); err != want {
			t.Errorf("acquire %d: %v, want %v", n, err, want)
		}
	}
	acquire(a, 2, nil)
	acquire(a, 1, quota.ErrExceeded)
	acquire(b, 1, nil)
	acquire(b, 1, quota.ErrTotalExceeded)
	acquire(parent, 1, quota.ErrExceeded)
	if a.Used() != 2 || b.Used() != 1 || parent.Used() != 3 {
		t.Errorf("a failed acquisition counts: %d, %d of %d", a.Used(), b.Used(), parent.Used())
	}
	a.Release(2)
	b.Release(1)
	if a.Used() != 0 || b.Used() != 0 || parent.Used() != 0 {
		t.Errorf("in use after release: %d, %d of %d", a.Used(), b.Used(), parent.Used())
	}
	a.SetLimit(1)
	acquire(a, 2, quota.ErrExceeded)
}

func TestPoolIsNeverExceededConcurrently(t *testing.T) {
	const limit = 3
	parent := quota.New(limit)
	var acquired atomic.Int64
	var callers sync.WaitGroup
	for range 8 {
		p := parent.Child(2)
		callers.Go(func() {
			for range 1000 {
				if p.TryAcquire(1) == nil {
					if n := acquired.Add(1); n > limit {
						t.Errorf("%d acquired of %d", n, limit)
					}
					acquired.Add(-1)
					p.Release(1)
				}
			}
		})
	}
	callers.Wait()
	if n := parent.Used(); n != 0 {
		t.Errorf("%d in use after release", n)
	}
}

func TestRefusedAcquisitionRefusesNoOther(t *testing.T) {
	p := quota.New(2)
	var refused sync.WaitGroup
	end := make(chan struct{})
	for range 4 {
		refused.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
					p.TryAcquire(3)
				}
			}
		})
	}
	for range 100_000 {
		if err := p.TryAcquire(1); err != nil {
			t.Error(err)
			break
		}
		p.Release(1)
	}
	close(end)
	refused.Wait()
}

func TestKeyedBoundsEachKeyAndAll(t *testing.T) {
	var k quota.Keyed[string]
	acquire := func(key string, limit, total int, want error) {
		t.Helper()
		if err := k.TryAcquire(key, limit, total); err != want {
			t.Errorf("acquire for %s: %v, want %v", key, err, want)
		}
	}
	acquire("a", 2, 3, nil)
	acquire("a", 2, 3, nil)
	acquire("a", 2, 3, quota.ErrExceeded)
	acquire("b", 2, 3, nil)
	acquire("c", 2, 3, quota.ErrTotalExceeded)
	acquire("c", 2, 4, nil) // a caller with another limit
	k.Release("c")
	k.Release("b")
	if total, keys := k.Used(); total != 2 || keys != 1 {
		t.Errorf("%d in use by %d keys, want 2 by 1", total, keys)
	}
	acquire("b", 2, 3, nil)
}

func TestTryAcquireAllocatesNothing(t *testing.T) {
	p := quota.New(1).Child(1)
	if n := testing.AllocsPerRun(100, func() {
		if p.TryAcquire(1) == nil {
			p.Release(1)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
