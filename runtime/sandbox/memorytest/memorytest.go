// Package memorytest is the conformance suite of sandbox.Memory.
package memorytest

import (
	"sync"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// Run runs the suite. Each test opens a Memory of its own.
func Run(t *testing.T, open func(t *testing.T) sandbox.Memory) {
	read := func(t *testing.T, m sandbox.Memory) sandbox.MemoryState {
		t.Helper()
		s, err := m.Read()
		testkit.NoError(t, "Read", err)
		return s
	}
	t.Run("SomeOfItIsAvailable", func(t *testing.T) {
		if s := read(t, open(t)); s.Total <= 0 || s.Available <= 0 || s.Available > s.Total || s.Swap < 0 {
			t.Errorf("%+v", s)
		}
	})
	t.Run("TimeAndStallsOnlyGrow", func(t *testing.T) {
		m := open(t)
		before := read(t, m)
		for range 10 {
			now := read(t, m)
			if !now.At.After(before.At) || now.Stalled < before.Stalled || now.Stalls != before.Stalls {
				t.Fatalf("%+v, then %+v", before, now)
			}
			before = now
		}
	})
	t.Run("ConcurrentReadsAreSafe", func(t *testing.T) {
		m := open(t)
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range 20 {
					if _, err := m.Read(); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
	})
}
