//go:build !race

package git

import (
	"bytes"
	"runtime"
	"testing"
)

// The git of a sandbox may print anything.
func TestMemoryOfHostileOutput(t *testing.T) {
	zeros := make([]byte, 4<<20)
	parents := append([]byte(hashA+"\x00"), bytes.Repeat([]byte("a "), 2<<20)...)
	for name, parse := range map[string]func(){
		"status":   func() { parseStatus(zeros, false) },
		"numstat":  func() { parseNumstat(zeros, false) },
		"log":      func() { parseLog(zeros, false) },
		"parents":  func() { parseLog(append(parents, "\x00A\x00a\x001\x00A\x00a\x001\x00m\x00"...), false) },
		"branches": func() { parseBranches(append(zeros, '\n'), false) },
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		parse()
		runtime.ReadMemStats(&after)
		if allocated := after.TotalAlloc - before.TotalAlloc; allocated > 16<<20 {
			t.Errorf("%s: allocated %d bytes for 4 MiB", name, allocated)
		}
	}
}
