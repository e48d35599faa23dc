package policy

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	. "github.com/doze-run/doze/egress/internal/wat"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// responder returns a policy that handles responses, too, so that an exchange holds its
// instance until the end.
func responder() []byte { return Handler(nil, "", pass, after(nil)).Binary() }

// inTime runs a test with a fake clock (synctest), which advances when all goroutines wait.
func inTime(t *testing.T, change func(*Config), f func(t *testing.T, h *Host)) {
	synctest.Test(t, func(t *testing.T) {
		f(t, newHost(t, func(c *Config) {
			c.CacheDir = ""
			change(c)
		}))
	})
}

// hold occupies an instance of each policy with an exchange, until release is called.
func hold(t *testing.T, policies ...*Policy) (release func()) {
	inside, leave := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	for _, p := range policies {
		wg.Go(func() {
			if _, x := exchange(p, request("GET", "/"), func(http.ResponseWriter, *http.Request) {
				inside <- struct{}{}
				<-leave
			}); x.Denied != nil {
				t.Errorf("denied: %+v", x.Denied)
			}
		})
		<-inside
	}
	return func() {
		close(leave)
		wg.Wait()
	}
}

func TestInstancesAreBoundedAndWaitersAreDeniedInTime(t *testing.T) {
	inTime(t, func(c *Config) { c.Instances = 2 }, func(t *testing.T, h *Host) {
		p := configure(t, compile(t, h, "responder", responder()), "")
		release := hold(t, p, p)
		began := time.Now()
		_, x := exchange(p, request("GET", "/"), nil)
		if x.Denied == nil || x.Denied.Code != problem.PolicyUnavailable || !strings.HasPrefix(x.Denied.Reason, "busy") {
			t.Errorf("got %+v", x.Denied)
		}
		if waited := time.Since(began); waited != h.config.WaitLimit {
			t.Errorf("it waited %v", waited)
		}
		release()
		if n := len(h.instances); n != 2 {
			t.Errorf("%d instances", n)
		}
		if _, x = exchange(p, request("GET", "/"), nil); x.Denied != nil {
			t.Errorf("denied: %+v", x.Denied)
		}
	})
}

// After a replacement, the first requests wait until instances have started, which may
// take longer than TimeLimit.
func TestWaitingForAnInstanceMayTakeLongerThanACall(t *testing.T) {
	inTime(t, func(c *Config) { c.Instances, c.InstancesInAll = 1, 2 }, func(t *testing.T, h *Host) {
		m := compile(t, h, "responder", responder())
		one, other, another := configure(t, m, ""), configure(t, m, ""), configure(t, m, "")
		for name, p := range map[string]*Policy{"of the policy": one, "of all": another} {
			release := hold(t, one, other)
			answered := make(chan *Denial)
			go func() {
				_, x := exchange(p, request("GET", "/"), nil)
				answered <- x.Denied
			}()
			time.Sleep(10 * h.config.TimeLimit)
			synctest.Wait()
			select {
			case d := <-answered:
				t.Errorf("%s: it did not wait: %+v", name, d)
				release()
			default:
				release()
				if d := <-answered; d != nil {
					t.Errorf("%s: denied: %+v", name, d)
				}
			}
		}
		if n := len(h.instances); n > 2 || h.short.Load() != 0 {
			t.Errorf("%d instances, %d wait", n, h.short.Load())
		}
	})
}

// A client that slowly sends a body to a policy must not block the policy's other users.
func TestASharerHasAQuarterOfAPolicysInstances(t *testing.T) {
	inTime(t, func(c *Config) { c.Instances = 8 }, func(t *testing.T, h *Host) {
		p := configure(t, compile(t, h, "responder", responder()), "")
		leave := make(chan struct{})
		var wg sync.WaitGroup
		var inside atomic.Int64
		try := func(sharer string) *Denial {
			x := run(httptest.NewRecorder(), request("GET", "/"), Info{}, []Step{{Policy: p, Sharer: sharer}}, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
				inside.Add(1)
				<-leave
			}))
			return x.Denied
		}
		for range 10 {
			wg.Go(func() {
				if d := try("ann"); d != nil && !strings.HasPrefix(d.Reason, "busy") {
					t.Errorf("denied: %+v", d)
				}
			})
		}
		synctest.Wait()
		if n := inside.Load(); n != 2 {
			t.Errorf("ann has %d instances", n)
		}
		for _, sharer := range []string{"bob", ""} {
			wg.Go(func() {
				if d := try(sharer); d != nil {
					t.Errorf("%q: denied: %+v", sharer, d)
				}
			})
		}
		synctest.Wait()
		if n := inside.Load(); n != 4 {
			t.Errorf("with two others there are %d", n)
		}
		close(leave)
		wg.Wait()
		if n := inside.Load(); n != 12 || len(p.slots) != 0 || len(p.shares["ann"]) != 0 {
			t.Errorf("%d had one, %d slots and %d of ann are in use", n, len(p.slots), len(p.shares["ann"]))
		}
	})
}

// An instance of a policy that does not handle responses is free while the response
// streams.
func TestAnInstanceIsHeldOnlyForResponsesThatItHandles(t *testing.T) {
	h := newHost(t, func(c *Config) { c.Instances = 1 })
	for name, p := range map[string]*Policy{
		"empty handle_response": configure(t, compile(t, h, "deaf", Handler(nil, "", pass, none).Binary()), ""),
		"feature":               scripted(t, h, "start enable 65536"),
	} {
		_, x := exchange(p, request("GET", "/"), func(http.ResponseWriter, *http.Request) {
			if _, x := exchange(p, request("GET", "/"), nil); x.Denied != nil {
				t.Errorf("%s: denied: %+v", name, x.Denied)
			}
		})
		if x.Denied != nil {
			t.Errorf("%s: denied: %+v", name, x.Denied)
		}
	}
}

func TestIdleInstancesEnd(t *testing.T) {
	h := newHost(t, func(c *Config) { c.IdleLimit = time.Hour })
	p := configure(t, compile(t, h, "responder", responder()), "")
	if n := len(h.instances); n != 1 {
		t.Fatalf("%d instances", n)
	}
	p.trim(time.Now().Add(-time.Minute))
	if n := len(h.instances); n != 1 {
		t.Errorf("%d instances: one was used just now", n)
	}
	if n := p.Memory(); n != pageSize {
		t.Errorf("%d bytes of memory", n)
	}
	p.trim(time.Now())
	if n := len(h.instances); n != 0 {
		t.Errorf("%d instances", n)
	}
}

func TestAllPoliciesTogetherAreBounded(t *testing.T) {
	inTime(t, func(c *Config) { c.InstancesInAll = 2 }, func(t *testing.T, h *Host) {
		m := compile(t, h, "responder", responder())
		var all []*Policy
		for range 4 { // idle instances of others end
			all = append(all, configure(t, m, ""))
		}
		release := hold(t, all[0], all[1])
		if _, x := exchange(all[2], request("GET", "/"), nil); x.Denied == nil || !strings.HasPrefix(x.Denied.Reason, "busy") {
			t.Errorf("got %+v", x.Denied)
		}
		release()
		if _, x := exchange(all[3], request("GET", "/"), nil); x.Denied != nil {
			t.Errorf("denied: %+v", x.Denied)
		}
		if n := len(h.instances); n > 2 {
			t.Errorf("%d instances", n)
		}
	})
}

func TestPoliciesShareNoMemory(t *testing.T) {
	h := newHost(t, nil)
	// The guest traps if it was called before.
	m := compile(t, h, "once", Handler(nil, "", Code(I32Const(0), Load(0), If, Unreachable, End, I32Const(0), I32Const(1), Store(0), pass), none).Binary())
	for range 3 {
		if _, x := exchange(configure(t, m, ""), request("GET", "/"), nil); x.Denied != nil {
			t.Errorf("denied: %+v", x.Denied)
		}
	}
}

func TestGuestsThatExhaustTheirMemoryAreDenied(t *testing.T) {
	h := newHost(t, nil)
	_, x := exchange(scripted(t, h, "request hoard 20"), request("GET", "/"), nil)
	if x.Denied == nil || !strings.Contains(x.Denied.Reason, "out of memory") {
		t.Errorf("got %+v", x.Denied)
	}
}

func TestAModuleIsCompiledOnceAndClosedAfterItsLastUse(t *testing.T) {
	h := newHost(t, nil)
	a, err := h.Compile(t.Context(), "a", responder())
	if err != nil {
		t.Fatal(err)
	}
	b, err := h.Compile(t.Context(), "b", responder())
	if err != nil {
		t.Fatal(err)
	}
	if a.program != b.program || a.program.digest != b.program.digest || len(a.program.digest) != 64 {
		t.Error("it was compiled twice")
	}
	p, err := b.Configure(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	a.Release()
	a.Release()
	b.Release()
	if _, x := exchange(p, request("GET", "/"), func(http.ResponseWriter, *http.Request) {
		p.Release() // during an exchange
	}); x.Denied != nil {
		t.Errorf("denied: %+v", x.Denied)
	}
	if len(h.programs) != 0 || len(h.policies) != 0 || len(h.instances) != 0 {
		t.Errorf("left: %d programs, %d policies, %d instances", len(h.programs), len(h.policies), len(h.instances))
	}
	if p.Retain() {
		t.Error("it is retained after its end")
	}
}

// current replaces policies as a node does.
type current struct {
	sync.RWMutex
	policy *Policy
}

func (c *current) replace(p *Policy) {
	c.Lock()
	old := c.policy
	c.policy = p
	c.Unlock()
	if old != nil {
		old.Release()
	}
}

func (c *current) use() *Policy {
	c.RLock()
	defer c.RUnlock()
	c.policy.Retain()
	return c.policy
}

// replace makes ten modules from base, and replaces a policy with each in turn, under
// load. It returns the growth of the process after the first tenth, in bytes, and the
// number of requests.
func replace(t testing.TB, h *Host, base []byte, times, clients int) (grown, requests int64) {
	var c current
	next := func(n int) {
		m, err := h.Compile(t.Context(), "replaced", append(bytes.Clone(base), fmt.Appendf(nil, "\x00\x06\x05%05d", n)...))
		if err != nil {
			t.Fatal(err)
		}
		p, err := m.Configure(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		m.Release()
		c.replace(p)
	}
	goroutines := runtime.NumGoroutine()
	next(0)
	var done atomic.Bool
	var count atomic.Int64
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for !done.Load() {
				p := c.use()
				_, x := exchange(p, request("GET", "/"), nil)
				p.Release()
				if x.Denied != nil || x.Cut {
					t.Errorf("a request failed: %+v, cut %v", x.Denied, x.Cut)
					return
				}
				count.Add(1)
				runtime.Gosched() // does not wait, but lets the compilation proceed
			}
		})
	}
	var before int64
	for n := range times {
		if n == times/10 {
			before = resident(t)
		}
		next(n % 10)
	}
	grown = resident(t) - before
	done.Store(true)
	wg.Wait()
	c.replace(nil)
	if len(h.programs) != 0 || len(h.instances) != 0 {
		t.Errorf("left: %d programs, %d instances", len(h.programs), len(h.instances))
	}
	// The goroutines of a compiler's process and its pipes end shortly after it.
	testkit.Eventually(t, "the goroutines of compilers to end", func() bool { return runtime.NumGoroutine() <= goroutines }, testkit.Stacks)
	return grown, count.Load()
}

// resident returns the resident memory of the process, in bytes.
func resident(t testing.TB) int64 {
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

// TestMemoryOfAThousandReplacements makes more replacements, without the race detector.
func TestReplacementsUnderLoadFailNoRequestAndLeakNothing(t *testing.T) {
	_, requests := replace(t, newHost(t, func(c *Config) { c.CacheDir = "" }), responder(), 250, 2)
	t.Logf("%d requests", requests)
}

// Machine code is not on Go's heap, but only a collection unmaps it, and it must not wait
// for one that garbage triggers. The test runs in a separate process that has no other
// code, because code of other tests may be unmapped at any time.
func TestCodeOfAPolicyThatEndedIsUnmapped(t *testing.T) {
	const own = "DOZE_TEST_CODE_MAPPINGS"
	if os.Getenv(own) == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.count=1")
		cmd.Env = append(os.Environ(), own+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	h := newHost(t, nil)
	before := codeBytes(t)
	m := compile(t, h, "x", responder())
	p, err := m.Configure(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	m.Release()
	if n := codeBytes(t); n <= before {
		t.Fatalf("%d bytes of code with a policy, %d without", n, before)
	}
	collections := countCollections()
	p.Release()
	testkit.Eventually(t, "the code to be unmapped", func() bool {
		if countCollections() > collections { // it may have run while the policy was still on a stack
			select {
			case h.unmap <- struct{}{}:
			default:
			}
		}
		return codeBytes(t) <= before
	})
}

// countCollections returns the number of garbage collections so far.
func countCollections() uint32 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.NumGC
}

// codeBytes returns the size of the executable memory that is not mapped from a file. It
// counts bytes, not mappings, because the kernel merges adjacent mappings.
func codeBytes(t *testing.T) (n uint64) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if f := strings.Fields(line); len(f) == 5 && strings.Contains(f[1], "x") {
			var from, to uint64
			if _, err := fmt.Sscanf(f[0], "%x-%x", &from, &to); err != nil {
				t.Fatal(err)
			}
			n += to - from
		}
	}
	return n
}

func TestTheCacheEvictsTheLeastRecentlyUsedCode(t *testing.T) {
	dir := t.TempDir()
	h := newHost(t, func(c *Config) { c.CacheDir = dir })
	var digests []string
	for i := range 3 {
		m := compile(t, h, "x", append(responder(), fmt.Appendf(nil, "\x00\x02\x01%d", i)...))
		digests = append(digests, m.program.digest)
		past := time.Now().Add(time.Duration(i-10) * time.Hour)
		if err := os.Chtimes(filepath.Join(dir, m.program.digest), past, past); err != nil {
			t.Fatal(err)
		}
	}
	h.cache.limit = size(dir) - 1
	h.cache.used(digests[0]) // the first is now the most recently used
	for i, want := range []bool{true, false, true} {
		if _, err := os.Stat(filepath.Join(dir, digests[i])); (err == nil) != want {
			t.Errorf("module %d exists: %v", i, err == nil)
		}
	}
}

func TestDamagedCachedCodeIsCompiledAgain(t *testing.T) {
	dir := t.TempDir()
	compileOnce := func() {
		h, err := NewHost(Config{CacheDir: dir})
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		m, err := h.Compile(t.Context(), "x", responder())
		if err != nil {
			t.Fatal(err)
		}
		p, err := m.Configure(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, x := exchange(p, request("GET", "/"), nil); x.Denied != nil {
			t.Errorf("denied: %+v", x.Denied)
		}
	}
	compileOnce()
	files := 0
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			files++
			return os.WriteFile(path, []byte("WAZEVO damaged"), 0o600)
		}
		return err
	})
	if err != nil || files == 0 {
		t.Fatalf("%d files, %v", files, err)
	}
	compileOnce()
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir, nil, 0o600); err == nil {
		t.Cleanup(func() { _ = os.Remove(dir) })
	}
	if _, err := NewHost(Config{CacheDir: dir}); err == nil {
		t.Error("a file is not a cache")
	}
}

func TestOutputIsLoggedInBounds(t *testing.T) {
	var log bytes.Buffer
	change := func(c *Config) { c.Log, c.CacheDir = slog.New(slog.NewTextHandler(&log, nil)), codeCache() }
	lines := []string{"request print hello \x1b[31mred", "request print " + strings.Repeat("x", 5000), "request log at level info"}
	for range 100 {
		lines = append(lines, "request print more")
	}
	inTime(t, change, func(t *testing.T, h *Host) {
		if _, x := exchange(scripted(t, h, lines...), request("GET", "/"), nil); x.Denied != nil {
			t.Fatalf("denied: %+v", x.Denied)
		}
	})
	text := log.String()
	if !strings.Contains(text, `policy=script text="hello  [31mred"`) || !strings.Contains(text, "at level info") {
		t.Errorf("the log is %s", text)
	}
	if n := strings.Count(text, "\n"); n != logBurst {
		t.Errorf("%d lines", n)
	}
	if len(text) > 10<<10 {
		t.Errorf("%d bytes", len(text))
	}
}

func TestCloseEndsEverything(t *testing.T) {
	h, err := NewHost(Config{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := h.Compile(t.Context(), "x", responder())
	if err != nil {
		t.Fatal(err)
	}
	p, err := m.Configure(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	p.Release()
	m.Release()
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if n := len(h.instances); n != 0 {
		t.Errorf("%d instances", n)
	}
	if _, err := h.Compile(t.Context(), "x", responder()); err == nil {
		t.Error("it compiles after its end")
	}
}
