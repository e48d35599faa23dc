//go:build !race

package feed_test

import (
	"fmt"
	"testing"

	"github.com/doze-run/doze/egress/feed"
	"github.com/doze-run/doze/testkit"
)

// Memory is released when more sources share the total.
func TestMemoryOfSourcesIsReleased(t *testing.T) {
	const total, size = 4 << 20, 1 << 10
	type large struct {
		entry
		padding [size]byte
	}
	f := feed.New[string](feed.Config[large]{
		Entries: 1000, Bytes: 1 << 20, TotalBytes: total,
		Size:   func(*large) int { return size },
		Header: func(e *large) feed.Header { return feed.Header{Seq: &e.Seq, Time: &e.Time, Dropped: &e.Dropped} },
	})
	grown := testkit.HeapGrowth(t, func() {
		for n := range 64 {
			for range 1000 {
				f.Add(fmt.Sprint(n), &large{})
			}
		}
	})
	if grown > 5*total/2 {
		t.Errorf("%d MiB for a total of %d MiB", grown>>20, total>>20)
	}
	if len(f.Entries("0", func(*large) bool { return true })) == 0 {
		t.Error("the first source has no entry")
	}
}
