package policy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/experimental"

	"github.com/doze-run/doze/egress/policy/meter"
)

// compileWorkers: with more than one, wazero checks its context before each
// function.
const compileWorkers = 2

// limits are the limits for the compilation of a module.
type limits struct {
	pages   uint32 // of memory per instance
	seconds uint64 // of processor time
	bytes   uint64 // of memory
	// nice is the nice value of the compiler.
	nice uint64
}

// compilerError is a mistake in a module. Other compilation errors are problems of the
// node.
type compilerError struct{ reason string }

func (e *compilerError) Error() string { return e.reason }

// build loads the module's code. If the code is not in the cache, or is damaged there,
// another process compiles the module first: compilation time is unpredictable, and a
// goroutine that runs the compiler cannot be stopped.
func (p *program) build(ctx context.Context, m *meter.Module) error {
	h := p.host
	if h.cache == nil {
		dir, err := os.MkdirTemp("", "doze-policy-*")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		return p.compileAndLoad(ctx, m, filepath.Join(dir, p.digest))
	}
	dir := filepath.Join(h.cache.dir, p.digest)
	// The cache holds only modules that a compiler has parsed within its limits.
	if _, err := os.Stat(dir); err != nil || p.load(m, dir) != nil {
		if err := p.compileAndLoad(ctx, m, dir); err != nil {
			return err
		}
	}
	h.cache.used(p.digest)
	return nil
}

// compileAndLoad compiles the module in another process, and loads the code. dir exists
// only once it is complete.
func (p *program) compileAndLoad(ctx context.Context, m *meter.Module, dir string) error {
	h := p.host
	select {
	case h.compiling <- struct{}{}:
		defer func() { <-h.compiling }()
	case <-ctx.Done():
		return ctx.Err()
	}
	begun := dir + ".new"
	if err := errors.Join(os.RemoveAll(dir), os.RemoveAll(begun)); err != nil {
		return fmt.Errorf("remove a policy's code: %w", err)
	}
	defer os.RemoveAll(begun)
	l := limits{h.pages(), uint64(max(1, h.config.CompileLimit.Seconds())), uint64(h.config.CompileMemory), 0}
	if h.cache != nil { // a node, whose other work comes first
		l.nice = 10
	}
	if err := runCompiler(ctx, h.config.Compiler, m.Binary, begun, l); err != nil {
		return err
	}
	if err := os.Rename(begun, dir); err != nil {
		return fmt.Errorf("store a policy's code: %w", err)
	}
	if err := p.load(m, dir); err != nil {
		return fmt.Errorf("load a policy's code: %w", err)
	}
	return nil
}

// compileInto compiles a module into a folder, in this process.
func compileInto(ctx context.Context, binary []byte, dir string, pages uint32) (err error) {
	cache, err := wazero.NewCompilationCacheWithDir(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cache.Close(ctx)) }()
	runtime := wazero.NewRuntimeWithConfig(ctx, runtimeConfig(pages).WithCompilationCache(cache))
	defer func() { err = errors.Join(err, runtime.Close(ctx)) }()
	_, err = runtime.CompileModule(experimental.WithCompilationWorkers(ctx, compileWorkers), binary)
	if err != nil {
		return &compilerError{err.Error()}
	}
	return nil
}

func runtimeConfig(pages uint32) wazero.RuntimeConfig {
	return wazero.NewRuntimeConfig().WithMemoryLimitPages(pages).WithDebugInfoEnabled(false)
}

// ended is a canceled context: with it, wazero loads code from its cache, and
// compiles nothing.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// load makes the runtime with the host's modules, and loads the code from a folder. It
// parses the module as the compiler did first, so it takes no longer than the
// compilation.
func (p *program) load(m *meter.Module, dir string) (err error) {
	if p.cache, err = wazero.NewCompilationCacheWithDir(dir); err != nil {
		return err
	}
	ctx := context.Background()
	p.runtime = wazero.NewRuntimeWithConfig(ctx, runtimeConfig(p.host.pages()).WithCompilationCache(p.cache))
	defer func() {
		if err != nil {
			_ = p.close()
			p.runtime, p.cache, p.compiled = nil, nil, nil
		}
	}()
	for name, functions := range hostModules {
		b := p.runtime.NewHostModuleBuilder(name)
		for _, f := range functions {
			b.NewFunctionBuilder().WithGoModuleFunction(f.bind(), f.params, f.results).WithName(f.name).Export(f.name)
		}
		if _, err = b.Instantiate(ctx); err != nil {
			return fmt.Errorf("make the host's module %s: %w", name, err)
		}
	}
	p.compiled, err = p.runtime.CompileModule(experimental.WithCompilationWorkers(ended, compileWorkers), m.Binary)
	return err
}
