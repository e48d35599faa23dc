package tree_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/testkit"
)

const files = 20_000

// file returns the path of one of the files of newTree.
func file(source string, n int) string {
	return filepath.Join(source, fmt.Sprintf("%04d", n/100), fmt.Sprint(n))
}

// newTree returns a folder with files of a size in folders of 100.
func newTree(b *testing.B, size int) string {
	source := b.TempDir()
	for n := range files {
		path := file(source, n)
		if n%100 == 0 {
			testkit.NoError(b, "make a folder", os.Mkdir(filepath.Dir(path), 0o755))
		}
		testkit.NoError(b, "make a file", os.WriteFile(path, make([]byte, size), 0o644))
	}
	return source
}

// BenchmarkComplete is the time for which programs stop while a tree of 20,000 files is copied that does not change.
func BenchmarkComplete(b *testing.B) {
	source := newTree(b, 0)
	c := tree.New(source, filepath.Join(b.TempDir(), "copy"))
	testkit.NoError(b, "prefetch", c.Prefetch(b.Context()))
	_, err := c.Complete(b.Context()) // copies what had just been made during Prefetch
	testkit.NoError(b, "complete", err)
	for b.Loop() {
		_, err := c.Complete(b.Context())
		testkit.NoError(b, "complete", err)
	}
}

// BenchmarkCompleteAfterChanges is the time for which programs stop while a tree of 20,000 files is copied, after they have changed
// 100 files in each second of the passes before.
func BenchmarkCompleteAfterChanges(b *testing.B) {
	source := newTree(b, 11_800)
	var stopped time.Duration
	var rounds int
	for b.Loop() {
		copied := filepath.Join(b.TempDir(), fmt.Sprint(rounds))
		c := tree.New(source, copied)
		ctx, stop := context.WithCancel(b.Context())
		var program sync.WaitGroup
		program.Go(func() {
			every := time.NewTicker(10 * time.Millisecond)
			defer every.Stop()
			for n := 0; ; n++ {
				select {
				case <-every.C:
				case <-ctx.Done():
					return
				}
				if err := os.WriteFile(file(source, n*997%files), make([]byte, 11_800), 0o644); err != nil {
					b.Error(err)
				}
			}
		})
		testkit.NoError(b, "prefetch", c.Prefetch(b.Context()))
		stop()
		program.Wait()
		began := time.Now()
		_, err := c.Complete(b.Context())
		stopped += time.Since(began)
		testkit.NoError(b, "complete", err)
		testkit.NoError(b, "remove the copy", os.RemoveAll(copied))
		rounds++
	}
	b.ReportMetric(float64(stopped.Milliseconds())/float64(rounds), "ms-stopped/op")
}
