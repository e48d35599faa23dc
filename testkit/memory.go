package testkit

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"testing"
)

// HeapGrowth returns by how many bytes the live heap grew while f ran. Memory
// that stays reachable counts, garbage does not.
//
// The race detector changes memory figures, so under -race it ends the test: put the
// test into a file *_memory_test.go with the constraint !race and name it TestMemory….
func HeapGrowth(t testing.TB, f func()) int64 {
	t.Helper()
	return growth(t, f, heap)
}

// ResidentGrowth returns by how many bytes the process's resident memory grew while
// f ran, without memory that the Go runtime can return to the system. See HeapGrowth about -race.
func ResidentGrowth(t testing.TB, f func()) int64 {
	t.Helper()
	return growth(t, f, resident)
}

func growth(t testing.TB, f func(), measure func(testing.TB) int64) int64 {
	t.Helper()
	if raceEnabled {
		t.Fatal("memory figures are meaningless under -race: put the test into a file *_memory_test.go with //go:build !race")
	}
	before := measure(t)
	f()
	return measure(t) - before
}

func heap(testing.TB) int64 {
	runtime.GC()
	runtime.GC() // sync.Pool drops its victims with the second
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func resident(t testing.TB) int64 {
	t.Helper()
	debug.FreeOSMemory()
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	var total, pages int64
	if _, err := fmt.Sscan(string(b), &total, &pages); err != nil {
		t.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}
