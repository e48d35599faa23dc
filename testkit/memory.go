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
	refuseRace(t)
	before := heap()
	f()
	return heap() - before
}

// ResidentGrowth returns by how many bytes the process's resident memory grew while
// f ran, without memory that the Go runtime can return to the system. See HeapGrowth about -race.
func ResidentGrowth(t testing.TB, f func()) int64 {
	t.Helper()
	refuseRace(t)
	before := resident(t)
	f()
	return resident(t) - before
}

func refuseRace(t testing.TB) {
	t.Helper()
	if raceEnabled {
		t.Fatal("memory figures are meaningless under -race: put the test into a file *_memory_test.go with //go:build !race")
	}
}

func heap() int64 {
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
