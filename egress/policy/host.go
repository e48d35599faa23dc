// Package policy runs the policies that requests of sandboxes pass: WebAssembly
// modules under the http-wasm handler ABI (https://http-wasm.io/http-handler-abi/)
// with one more module of host functions, doze_egress_v1.
//
// A Host compiles modules, a Module with a configuration is a Policy, and a Chain
// runs policies over a request and its response. Guests are not trusted: their memory,
// time, output and number are bounded, and a failure in a guest denies its own exchange
// and affects no other.
package policy

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doze-run/doze/runtime/store/document"
)

// Config configures a Host. The values of Defaults replace zero values.
type Config struct {
	// CacheDir stores machine code between runs of the node. If empty, none is stored.
	// Programs that can write there can run code as the node.
	CacheDir string
	// CacheLimit bounds the size of CacheDir, in bytes. The least recently used code is
	// removed first.
	CacheLimit int64
	// Compiler is the program that compiles modules. It must contain this package. If
	// empty, it is the running program.
	Compiler string
	// MaxModule bounds the size of a module, in bytes.
	MaxModule int
	// CompileLimit bounds the processor time to compile a module, in whole seconds, and
	// CompileMemory the memory, in bytes.
	CompileLimit  time.Duration
	CompileMemory int
	// MemoryLimit bounds the memory of an instance, in bytes.
	MemoryLimit int
	// TimeLimit bounds the running time of a call. The time in which it waits for a
	// body or for a processor does not count.
	TimeLimit time.Duration
	// StartLimit is TimeLimit for the start of an instance, which happens once for many
	// exchanges.
	StartLimit time.Duration
	// RequestLimit and ResponseLimit bound the body that a policy may have in the
	// host's memory, in bytes: one that it buffers, or that it writes.
	RequestLimit, ResponseLimit int
	// Instances bounds the instances of a Policy, and InstancesInAll the instances of all
	// policies together. If the policy handles responses, an exchange holds an instance
	// until its response has ended.
	Instances, InstancesInAll int
	// WaitLimit bounds the wall time for which an exchange waits for an instance when all
	// are in use.
	WaitLimit time.Duration
	// IdleLimit is the time after which unused instances end.
	IdleLimit time.Duration
	// Documents stores the values of policies. If nil, they are held in memory only.
	Documents document.Store
	// Log receives the lines that policies write.
	Log *slog.Logger
	// Now returns the time that policies see, and by which their stored values expire.
	Now func() time.Time
}

// Defaults returns the default configuration of a Host.
func Defaults() Config {
	return Config{
		CacheLimit:     512 << 20, // machine code has 3 to 5 times the size of its module: some 60 Go modules
		MaxModule:      16 << 20,
		CompileLimit:   30 * time.Second, // the largest Go modules take 7 s, and 280 MiB
		CompileMemory:  1 << 30,
		MemoryLimit:    16 << 20, // Go's runtime has 4 MiB after its start
		TimeLimit:      50 * time.Millisecond,
		StartLimit:     2 * time.Second,
		RequestLimit:   1 << 20,
		ResponseLimit:  1 << 20,
		Instances:      64,
		InstancesInAll: 512, // 2 GiB if all are Go's; 8 GiB if all grow to their limit
		// A policy that has just replaced another has one instance. Under load 64 have to
		// start, which takes 0.1 s of processor time, shared with other work.
		WaitLimit: 5 * time.Second,
		IdleLimit: time.Minute,
		Log:       slog.New(slog.DiscardHandler),
		Now:       time.Now,
	}
}

func (c Config) withDefaults() Config {
	fields, defaults := reflect.ValueOf(&c).Elem(), reflect.ValueOf(Defaults())
	for i := range fields.NumField() {
		if fields.Field(i).IsZero() {
			fields.Field(i).Set(defaults.Field(i))
		}
	}
	return c
}

const pageSize = 64 << 10 // of WebAssembly

// Host compiles modules and owns their policies and instances.
type Host struct {
	config    Config
	cache     *cache
	kv        kv
	compiling chan struct{} // semaphore of running compilers
	instances chan struct{} // semaphore of instances, in use or idle
	short     atomic.Int64  // number of callers that wait for an instance to end

	mu       sync.Mutex
	closed   bool
	programs map[string]*program      // by digest
	refused  map[string]error         // errors of recently refused modules, by digest
	pending  map[string]chan struct{} // running compilations by digest; closed when they end
	policies map[*Policy]struct{}     // that have not ended

	configuring sync.WaitGroup // running Configure calls; added to under mu, while the host is open

	unmap chan struct{} // signals that closed code is still mapped
	stop  chan struct{}
	done  sync.WaitGroup // janitor, collector and writer
}

// NewHost returns a host. The caller must close it.
func NewHost(config Config) (*Host, error) {
	config = config.withDefaults()
	if config.MemoryLimit < pageSize || config.MemoryLimit > 1<<30 {
		return nil, fmt.Errorf("memory limit of policies is %d bytes; use 64 KiB to 1 GiB", config.MemoryLimit)
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

// pages returns the number of memory pages that an instance may have.
func (h *Host) pages() uint32 { return uint32(h.config.MemoryLimit / pageSize) }

// Close ends the host, its policies and its programs. No exchange may be in progress.
// Close waits for running Configure calls.
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
	h.configuring.Wait() // a starting guest still uses its memory
	for p := range policies {
		p.drain()
	}
	errs := []error{h.kv.write(context.Background(), time.Now(), true)}
	for _, p := range programs {
		errs = append(errs, p.close())
	}
	return errors.Join(errs...)
}

// janitor ends idle instances. It runs until the host is closed.
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

// collectPause is the ratio of the pause after a collection to its duration. A
// collection takes one processor of four, so all together take at most a sixteenth of the
// node's processors.
const collectPause = 3

// collector runs Go's garbage collector after code is closed: only a collection unmaps the
// code, which takes 10 MB for a policy in Go and does not count as garbage. It runs until
// the host is closed.
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
	return slices.Collect(maps.Keys(h.policies))
}

// Forget deletes the values that policies of a name have stored in a namespace, which is
// their owner's. Values that exchanges in progress store there later are dropped, and so are
// their lines. If Forget returns an error, the stored values remain.
func (h *Host) Forget(ctx context.Context, name, namespace string) error {
	for _, p := range h.live() { // first, so that concurrently stored values are erased, too
		if p.name == name && p.owner == namespace {
			p.forgotten.Store(true)
		}
	}
	return h.kv.erase(ctx, spaceName(name, namespace))
}

// Modules returns the number of modules whose code is in memory.
func (h *Host) Modules() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.programs)
}

// Compilers returns the number of running compilers.
func (h *Host) Compilers() int { return len(h.compiling) }

var errClosed = errors.New("the policy host is closed")

// maxCompilers is the maximum number of concurrent compilers. Each takes a core or two,
// and at most CompileMemory. An owner has at most one, so only this many other owners can
// delay an owner.
const maxCompilers = 4

// Compile compiles WebAssembly to a module. name is the policy's name, for messages
// and for its stored values. The same bytes are compiled once for as long as their code
// is in use. Errors: *CompileError for a mistake in the module, with the remedy;
// ctx.Err(); others for problems of the node.
//
// The caller owns the module and must release it.
func (h *Host) Compile(ctx context.Context, name string, wasm []byte) (*Module, error) {
	if len(wasm) > h.config.MaxModule {
		return nil, &CompileError{name, fmt.Errorf("it has %d bytes; use at most %d: build without debug information, and without packages that are large (net/http, fmt)", len(wasm), h.config.MaxModule)}
	}
	sum := sha256.Sum256(wasm)
	p, err := h.program(ctx, hex.EncodeToString(sum[:]), wasm)
	if invalid, ok := errors.AsType[*compilerError](err); ok {
		return nil, &CompileError{name, invalid}
	}
	if err != nil {
		return nil, err
	}
	return newModule(name, p), nil
}

// maxRefused bounds the cache of refused modules, which saves compiling them again.
const maxRefused = 1000

// program returns the program of a module, with one more reference. It compiles the module
// unless it is compiled, or was refused, already. Other callers with the same digest wait
// until then. Errors: *compilerError, ctx.Err(), or a problem of the node.
func (h *Host) program(ctx context.Context, digest string, wasm []byte) (*program, error) {
	for {
		h.mu.Lock()
		p, err, running := h.programs[digest], h.refused[digest], h.pending[digest]
		switch {
		case p != nil:
			p.references++
		case err == nil && running == nil:
			h.pending[digest] = make(chan struct{})
		}
		h.mu.Unlock()
		switch {
		case p != nil || err != nil:
			return p, err
		case running == nil:
			return h.newProgram(ctx, digest, wasm)
		}
		select {
		case <-running:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// newProgram compiles a module that is pending.
func (h *Host) newProgram(ctx context.Context, digest string, wasm []byte) (*program, error) {
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		close(h.pending[digest])
		delete(h.pending, digest)
	}()
	p, err := h.compile(ctx, digest, wasm)
	if err != nil && ctx.Err() != nil {
		return nil, ctx.Err()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch _, invalid := errors.AsType[*compilerError](err); {
	case invalid:
		if len(h.refused) >= maxRefused {
			clear(h.refused)
		}
		h.refused[digest] = err
	case err == nil && h.closed:
		err = errors.Join(errClosed, p.close())
	case err == nil:
		h.programs[digest] = p
	}
	return p, err
}

// Compiled returns the module of a digest (sha256:<hex>) under a name, if its code is
// already in use; otherwise nil. The caller owns the module and must release it.
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

// CompileError reports why a module cannot be used as a policy.
type CompileError struct {
	Name string
	Err  error
}

func (e *CompileError) Error() string {
	return fmt.Sprintf("policy %.80s cannot be used: %v", e.Name, e.Err)
}
func (e *CompileError) Unwrap() error { return e.Err }
