package store

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

// BenchmarkOpenAndLoad10000 measures how much the store adds to the start of a node, and
// how much memory it uses afterwards.
func BenchmarkOpenAndLoad10000(b *testing.B) {
	dir := b.TempDir()
	fill(b, dir, 10_000)
	for b.Loop() {
		s, err := Open(dir, nil)
		if err != nil {
			b.Fatal(err)
		}
		n := 0
		if err := s.Sandboxes(b.Context(), func(sandbox.Sandbox) error { n++; return nil }); err != nil || n != 10_000 {
			b.Fatal(n, err)
		}
		b.StopTimer()
		reportMemory(b)
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

func BenchmarkPutSandbox(b *testing.B) {
	s, err := Open(b.TempDir(), nil)
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	b.Run("one at a time", func(b *testing.B) {
		for b.Loop() {
			if err := s.PutSandbox(b.Context(), testRecord(1)); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("64 concurrently", func(b *testing.B) {
		var n atomic.Int64
		b.SetParallelism(32)
		b.RunParallel(func(pb *testing.PB) {
			sb := testRecord(int(n.Add(1)))
			for pb.Next() {
				if err := s.PutSandbox(b.Context(), sb); err != nil {
					b.Error(err)
					return
				}
			}
		})
	})
}

func BenchmarkAppendEvent(b *testing.B) {
	s, err := Open(b.TempDir(), nil)
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	events := testEvents(1, 1, 1)
	for b.Loop() {
		events[0].Time = time.Now()
		if err := s.AppendEvents(b.Context(), events); err != nil {
			b.Fatal(err)
		}
		events[0].Seq++
	}
}

func fill(b *testing.B, dir string, records int) {
	s, err := Open(dir, nil)
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	var n atomic.Int64
	b.SetParallelism(64)
	done := make(chan error)
	for range 64 {
		go func() {
			for {
				i := int(n.Add(1))
				if i > records {
					done <- nil
					return
				}
				if err := s.PutSandbox(b.Context(), testRecord(i)); err != nil {
					done <- err
					return
				}
			}
		}()
	}
	for range 64 {
		if err := <-done; err != nil {
			b.Fatal(err)
		}
	}
}

// reportMemory reports the process's memory as the kernel counts it.
func reportMemory(b *testing.B) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		fields := strings.Fields(line)
		if kib, err := strconv.ParseFloat(fields[min(1, len(fields)-1)], 64); err == nil {
			switch fields[0] {
			case "RssAnon:":
				b.ReportMetric(kib/1024, "MiB-anon")
			case "RssFile:":
				b.ReportMetric(kib/1024, "MiB-file")
			}
		}
	}
}
