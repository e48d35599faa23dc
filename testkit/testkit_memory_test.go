//go:build !race

package testkit_test

import (
	"runtime"
	"testing"

	"github.com/doze-run/doze/testkit"
)

func TestMemoryHeapGrowthCountsWhatIsReachable(t *testing.T) {
	var kept []byte
	if grown := testkit.HeapGrowth(t, func() { kept = make([]byte, 64<<20) }); grown < 60<<20 || grown > 80<<20 {
		t.Errorf("grown by %d bytes", grown)
	}
	runtime.KeepAlive(kept)
	if grown := testkit.HeapGrowth(t, func() {
		for range 64 {
			kept = make([]byte, 1<<20)
		}
		kept = nil
	}); grown > 16<<20 {
		t.Errorf("garbage counts: %d bytes", grown)
	}
}

func TestMemoryResidentGrowthCountsWhatIsMapped(t *testing.T) {
	var kept []byte
	grown := testkit.ResidentGrowth(t, func() {
		kept = make([]byte, 64<<20)
		for i := 0; i < len(kept); i += 4096 {
			kept[i] = 1
		}
	})
	if grown < 56<<20 || grown > 96<<20 {
		t.Errorf("grown by %d bytes", grown)
	}
	runtime.KeepAlive(kept)
}
