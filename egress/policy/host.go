// Package policy runs the policies that requests of sandboxes pass: WebAssembly
// modules under the http-wasm handler ABI (https://http-wasm.io/http-handler-abi/)
// with one more module of host functions, doze_egress_v1.
//
// A Host compiles modules, a Module with a configuration is a Policy, and Serve
// runs policies around a handler. Guests are not trusted: their memory, time,
// output and number are bounded, and whatever goes wrong in one denies the
// exchange that it was part of, and nothing else.
package policy

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doze-run/doze/runtime/store/document"
)

// Config of a Host. The values of Defaults replace zero values.
type Config struct {
	// CacheDir keeps machine code between runs of the node; empty: none is kept.
	// Programs that can write there can run code as the node.
	CacheDir string
	// CacheLimit is how many bytes CacheDir may take. The least recently used code is
	// removed first.
	CacheLimit int64
	// Compiler is the program that compiles modules, one that has this package in it;
	// empty: the running one.
	Compiler string
	// MaxModule is how many bytes a module may have.
	MaxModule int
	// CompileLimit is how much time of a processor it may take to compile one, in
	// whole seconds, and CompileMemory how many bytes of memory.
	CompileLimit  time.Duration
	CompileMemory int
	// MemoryLimit is how many bytes of memory an instance may have.
	MemoryLimit int
	// TimeLimit is how long a call may run, without the time that it waits for a
	// body or for a processor.
	TimeLimit time.Duration
	// StartLimit is how long an instance may take to start, which happens once
	// for many exchanges.
	StartLimit time.Duration
	// RequestLimit and ResponseLimit are how many bytes of a body a policy may
	// have in the host's memory: one that it buffers, or that it writes.
	RequestLimit, ResponseLimit int
	// Instances that a Policy may have, and InstancesInAll of all policies. An
	// exchange holds one until its response has ended, if the policy handles
	// responses.
	Instances, InstancesInAll int
	// WaitLimit is how long an exchange waits for an instance when all are in use,
	// by the clock.
	WaitLimit time.Duration
	// IdleLimit is how long instances stay without use.
	IdleLimit time.Duration
	// Documents keeps what policies store; nil: it is kept in memory only.
	Documents document.Store
	// Log takes what policies write.
	Log *slog.Logger
	// Now is the time that policies see, and by which what they store expires.
	Now func() time.Time
}

// Defaults of a Host.
func Defaults() Config {
	return Config{
		CacheLimit:     512 << 20, // machine code is 3 to 5 times its module: some 60 of Go
		MaxModule:      16 << 20,
		CompileLimit:   30 * time.Second, // the largest of Go take 7 s, and 280 MiB
		CompileMemory:  1 << 30,
		MemoryLimit:    16 << 20, // Go's runtime has 4 MiB after its start
		TimeLimit:      50 * time.Millisecond,
		StartLimit:     2 * time.Second,
		RequestLimit:   1 << 20,
		ResponseLimit:  1 << 20,
		Instances:      64,
		InstancesInAll: 512, // 2 GiB of Go's; 8 GiB if all grow to their limit
		// A policy that has replaced another has one instance. Under load 64 have to
		// start: 0.1 s of a processor, and that is not all theirs.
		WaitLimit: 5 * time.Second,
		IdleLimit: time.Minute,
		Log:       slog.New(slog.DiscardHandler),
	}
}

func (c Config) withDefaults() Config {
	d := Defaults()
	set(&c.CacheLimit, d.CacheLimit)
	set(&c.MaxModule, d.MaxModule)
	set(&c.CompileLimit, d.CompileLimit)
	set(&c.CompileMemory, d.CompileMemory)
	set(&c.MemoryLimit, d.MemoryLimit)
	set(&c.TimeLimit, d.TimeLimit)
	set(&c.StartLimit, d.StartLimit)
	set(&c.RequestLimit, d.RequestLimit)
	set(&c.ResponseLimit, d.ResponseLimit)
	set(&c.Instances, d.Instances)
	set(&c.InstancesInAll, d.InstancesInAll)
	set(&c.WaitLimit, d.WaitLimit)
	set(&c.IdleLimit, d.IdleLimit)
	set(&c.Log, d.Log)
	if c.Now == nil {
		c.Now = time.Now
	}
	return c
}

func set[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

const pageSize = 64 << 10 // of WebAssembly

// Host compiles modules and owns all that runs of them.
type Host struct {
	config    Config
	cache     *cache
	kv        kv
	compiling chan struct{} // compilers that run
	instances chan struct{} // as many as there are, in use or idle
	short     atomic.Int64  // of instances: that many wait for one to end

	mu       sync.Mutex
	closed   bool
	programs map[string]*program      // by digest
	refused  map[string]error         // why modules cannot be used, by digest; some of the latest
	pending  map[string]chan struct{} // digests that are compiled now; closed when that has ended
	policies map[*Policy]struct{}     // that have not ended

	configuring sync.WaitGroup // begins under mu, while it is not closed

	unmap chan struct{} // code was closed that is still mapped
	stop  chan struct{}
	done  sync.WaitGroup // janitor, collector and writer
}

// NewHost makes a host, which Close ends.
func NewHost(config Config) (*Host, error) {
	config = config.withDefaults()
	if config.MemoryLimit < pageSize || config.MemoryLimit > 1<<30 {
		return nil, fmt.Errorf("a policy's memory of %d bytes: from 64 KiB to 1 GiB make sense", config.MemoryLimit)
	}
	h := &Host{
		config:    config,
		compiling: make(chan struct{}, maxCompilers),
		instances: make(chan struct{}, config.InstancesInAll),
		programs:  map[string]*program{},
		refused:   map[string]error{},
		pending:   map[string]chan struct{}{},
		policies:  map[*Policy]struct{}{},
		unmap:     make(chan struct{}, 1),
		stop:      make(chan struct{}),
	}
	h.kv.documents, h.kv.log, h.kv.changed = config.Documents, config.Log, make(chan struct{}, 1)
	if err := h.kv.load(context.Background(), time.Now()); err != nil {
		return nil, err
	}
	if config.CacheDir != "" {
		if err := os.MkdirAll(config.CacheDir, 0o700); err != nil {
			return nil, fmt.Errorf("make the cache of compiled policies: %w", err)
		}
		h.cache = &cache{dir: config.CacheDir, limit: config.CacheLimit}
	}
	h.done.Go(h.janitor)
	h.done.Go(h.collector)
	if config.Documents != nil {
		h.done.Go(func() { h.kv.writer(h.stop, h.kv.write) })
	}
	return h, nil
}

// pages of memory that an instance may have.
func (h *Host) pages() uint32 { return uint32(h.config.MemoryLimit / pageSize) }

// Close ends the host and everything of it. No exchange may be under way; a Configure
// may, and Close waits for it.
func (h *Host) Close() error {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return nil
	}
	h.closed = true
	policies, programs := h.policies, h.programs
	h.policies, h.programs = nil, nil
	h.mu.Unlock()
	close(h.stop)
	h.done.Wait()
	h.configuring.Wait() // a guest that starts has its memory
	for p := range policies {
		p.drain()
	}
	errs := []error{h.kv.write(context.Background(), time.Now(), true)}
	for _, p := range programs {
		errs = append(errs, p.close())
	}
	return errors.Join(errs...)
}

// janitor ends instances that are not used. It is the host's and ends with it.
func (h *Host) janitor() {
	ticker := time.NewTicker(max(h.config.IdleLimit/2, time.Millisecond))
	defer ticker.Stop()
	for {
		select {
		case <-h.stop:
			return
		case now := <-ticker.C:
			for _, p := range h.live() {
				p.trim(now.Add(-h.config.IdleLimit))
			}
			h.kv.trim(now)
		}
	}
}

// collectPause is how many times as long as a collection took the next one waits. A
// collection takes one processor of four, so all take a sixteenth of the node's at most.
const collectPause = 3

// collector runs Go's garbage collector when code was closed: that is what unmaps the
// code, 10 MB of a policy in Go, which does not count as garbage. It is the host's and
// ends with it.
func (h *Host) collector() {
	for {
		select {
		case <-h.stop:
			return
		case <-h.unmap:
		}
		began := time.Now()
		runtime.GC()
		select {
		case <-h.stop:
			return
		case <-time.After(collectPause * time.Since(began)):
		}
	}
}

func (h *Host) live() []*Policy {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := make([]*Policy, 0, len(h.policies))
	for p := range h.policies {
		all = append(all, p)
	}
	return all
}

// Forget drops what policies of that name have stored in a namespace, their owner's, and
// what they store there from then on in exchanges that are under way. With an error
// nothing that was stored is dropped.
func (h *Host) Forget(ctx context.Context, name, namespace string) error {
	for _, p := range h.live() { // before: what is stored meanwhile is erased
		if p.name == name && p.owner == namespace {
			p.forgotten.Store(true)
		}
	}
	return h.kv.erase(ctx, spaceName(name, namespace))
}

// Modules whose code is in memory.
func (h *Host) Modules() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.programs)
}

// Compilers that run now.
func (h *Host) Compilers() int { return len(h.compiling) }

// Instances that there are now, of all policies.
func (h *Host) Instances() int { return len(h.instances) }

var errClosed = errors.New("the policy host is closed")

// maxCompilers run concurrently. Each takes a core or two and CompileMemory at most. An
// owner has one, so that it takes as many owners to keep another waiting.
const maxCompilers = 4

// Compile makes a module of WebAssembly. Its name is the policy's, for messages
// and for what it stores. The same bytes are compiled once for as long as something
// uses them. Errors: *CompileError for a mistake in the module, with what would be
// right; ctx's; others for problems of the node.
//
// The caller owns the module and releases it.
func (h *Host) Compile(ctx context.Context, name string, wasm []byte) (*Module, error) {
	if len(wasm) > h.config.MaxModule {
		return nil, &CompileError{name, fmt.Errorf("it has %d bytes: at most %d fit; build without debug information, and without packages that are large (net/http, fmt)", len(wasm), h.config.MaxModule)}
	}
	sum := sha256.Sum256(wasm)
	digest := hex.EncodeToString(sum[:])
	done, p, err := h.begin(ctx, digest)
	if invalid := (*compilerError)(nil); errors.As(err, &invalid) {
		return nil, &CompileError{name, err}
	}
	if err != nil {
		return nil, err
	}
	if p != nil {
		return newModule(name, p), nil
	}
	defer done()
	p, err = h.compile(ctx, digest, wasm)
	if err != nil && ctx.Err() != nil {
		return nil, ctx.Err()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if invalid := (*compilerError)(nil); errors.As(err, &invalid) {
		if len(h.refused) >= maxRefused {
			clear(h.refused)
		}
		h.refused[digest] = invalid
		return nil, &CompileError{name, invalid}
	}
	if err != nil {
		return nil, err
	}
	if h.closed {
		return nil, errors.Join(errClosed, p.close())
	}
	h.programs[digest] = p
	return newModule(name, p), nil
}

// maxRefused bounds the cache of modules that cannot be used: they take a compiler's time
// only once.
const maxRefused = 1000

// begin returns an existing program, with one more reference, or lets the caller compile
// it until done is called. Other callers with the same digest wait meanwhile. Errors: the
// *compilerError of a module that was refused before, or ctx's.
func (h *Host) begin(ctx context.Context, digest string) (done func(), p *program, err error) {
	for {
		h.mu.Lock()
		if p := h.programs[digest]; p != nil {
			p.references++
			h.mu.Unlock()
			return nil, p, nil
		}
		if err := h.refused[digest]; err != nil {
			h.mu.Unlock()
			return nil, nil, err
		}
		other := h.pending[digest]
		if other == nil {
			mine := make(chan struct{})
			h.pending[digest] = mine
			h.mu.Unlock()
			return func() {
				h.mu.Lock()
				delete(h.pending, digest)
				h.mu.Unlock()
				close(mine)
			}, nil, nil
		}
		h.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
}

// Compiled returns the module of a digest (sha256:<hex>) under a name, if something
// uses its code already; otherwise nil. The caller owns the module and releases it.
func (h *Host) Compiled(name, digest string) *Module {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.programs[strings.TrimPrefix(digest, "sha256:")]
	if p == nil {
		return nil
	}
	p.references++
	return newModule(name, p)
}

// CompileError is why a module cannot be a policy.
type CompileError struct {
	Name string
	Err  error
}

func (e *CompileError) Error() string {
	return fmt.Sprintf("policy %.80s cannot be used: %v", e.Name, e.Err)
}
func (e *CompileError) Unwrap() error { return e.Err }
