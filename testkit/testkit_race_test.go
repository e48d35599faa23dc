//go:build race

package testkit

import "testing"

func TestMemoryFiguresAreRefusedUnderTheRaceDetector(t *testing.T) {
	wantFatal(t, run(func(t *fakeT) { HeapGrowth(t, func() {}) }), "_memory_test.go")
	wantFatal(t, run(func(t *fakeT) { ResidentGrowth(t, func() {}) }), "_memory_test.go")
}
