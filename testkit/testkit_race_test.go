//go:build race

package testkit_test

import (
	"testing"

	"github.com/doze-run/doze/testkit"
)

func TestMemoryFiguresAreRefusedUnderTheRaceDetector(t *testing.T) {
	wantFatal(t, run(func(t *fakeT) { testkit.HeapGrowth(t, func() {}) }), "_memory_test.go")
	wantFatal(t, run(func(t *fakeT) { testkit.ResidentGrowth(t, func() {}) }), "_memory_test.go")
}
