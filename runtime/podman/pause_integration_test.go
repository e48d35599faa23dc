//go:build integration

package podman

import (
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/freezertest"
	"github.com/doze-run/doze/testkit"
)

func TestPauserConformance(t *testing.T) {
	freezertest.Run(t, func(t *testing.T) freezertest.System {
		p := &paused{n: open(t), byID: make(map[sandbox.ID]*counters)}
		return freezertest.System{Freezer: NewPauser(p.n.Engine), Start: p.start}
	})
}

// paused starts the suite's counters. They are threads of the first process of each
// sandbox's container, which count in a page that it shares with the test.
type paused struct {
	n    *node
	byID map[sandbox.ID]*counters
}

// counters of one sandbox. The page's first word is the requested number of counters; each
// of the others belongs to one counter.
type counters struct {
	n    *node
	t    testing.TB
	spec sandbox.ContainerSpec
	page []byte
}

// counter is one word of the page.
type counter struct {
	*counters
	word int
}

const (
	counterFile = "counters"
	maxCounters = 8
)

func (p *paused) start(t testing.TB, id sandbox.ID, cgroupParent string) freezertest.Counter {
	t.Helper()
	c := p.byID[id]
	if c == nil || c.page == nil {
		c = p.boot(t, id, cgroupParent)
		p.byID[id] = c
	}
	return counter{c, int(atomic.AddUint64(word(c.page, 0), 1))}
}

func (p *paused) boot(t testing.TB, id sandbox.ID, cgroupParent string) *counters {
	t.Helper()
	if cgroupParent != "" {
		t.Errorf("Prepare returned %q", cgroupParent)
	}
	// Podman needs a cgroup to pause. On a host that needs this Freezer it creates one
	// itself; here the test has to name one.
	spec := p.n.specIn(t, id, cgroup(t, id))
	spec.Env["DOZE_TEST_PROBE"] = "count"
	file := filepath.Join(spec.RunDir, counterFile)
	if err := os.WriteFile(file, make([]byte, os.Getpagesize()), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(file, 0o666); err != nil {
		t.Fatal(err)
	}
	c := &counters{n: p.n, t: t, spec: spec, page: mapPage(file)}
	ctx := testkit.Context(t)
	if err := p.n.Create(ctx, spec); err != nil {
		t.Fatal(err)
	}
	if _, err := p.n.Start(ctx, id, limits); err != nil {
		t.Fatal(err)
	}
	return c
}

func (c counter) Count() uint64 {
	if c.page == nil {
		return 0
	}
	return atomic.LoadUint64(word(c.page, c.word))
}

// Stop removes the container, with all its counters.
func (c counter) Stop() {
	if c.page == nil {
		return
	}
	if err := c.n.Remove(testkit.Context(c.t), c.spec.ID); err != nil {
		c.t.Error(err)
	}
	removeCgroup(c.t, c.spec.CgroupParent)
	page := c.page
	c.page = nil
	if err := unix.Munmap(page); err != nil {
		c.t.Error(err)
	}
}

// count is the first process. It runs the number of counters that the page requests.
func count() int {
	page := mapPage(filepath.Join(guest.RunDir, counterFile))
	for running := 0; ; {
		if want := int(atomic.LoadUint64(word(page, 0))); running < min(want, maxCounters) {
			running++
			go func(w int) { // ends with the process
				for {
					atomic.AddUint64(word(page, w), 1)
				}
			}(running)
		}
	}
}

func mapPage(path string) []byte {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		panic(err)
	}
	defer f.Close()
	page, err := unix.Mmap(int(f.Fd()), 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	return page
}

func word(page []byte, n int) *uint64 {
	return (*uint64)(unsafe.Pointer(&page[8*n]))
}
