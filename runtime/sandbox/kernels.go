package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/jupyter"
	"github.com/doze-run/doze/runtime/jupyter/zmtp"
)

const (
	// Kernels listen on ports above those that the system assigns to connections: 32768 to
	// 60999 by default.
	firstKernelPort = 61_000
	kernelPorts     = 5
	portBlocks      = (1<<16 - firstKernelPort) / kernelPorts

	// kernelTimeout bounds the start of a kernel. The slowest starts are of sandboxes with a
	// small share of a core.
	kernelTimeout = 60 * time.Second
	// connectPause is the time between two attempts to connect to a kernel that starts.
	connectPause = 3 * time.Millisecond
	// kernelGrace is what a kernel gets between SIGTERM and SIGKILL. ipykernel ends with
	// SIGTERM.
	kernelGrace = time.Second
	// abandonTimeout bounds the end of a kernel that did not start. A guest that is frozen
	// meanwhile does not respond.
	abandonTimeout = kernelGrace + deathWait
	// sparesWait is how long a requested sleep or stop waits for the start of spare kernels.
	sparesWait = 10 * time.Second
	// interruptTimeout bounds the wait for the end of code that was interrupted.
	interruptTimeout = 5 * time.Second
	// endingWait is how long the guest may take to report the end of a kernel whose connection
	// has ended.
	endingWait = 2 * time.Second

	// Memory for messages above 64 KiB that are being received, of one sandbox and of all.
	maxSandboxMessages = 48 << 20
	maxMessages        = 512 << 20

	// The node hashes and parses the messages of the kernels of a sandbox: at this rate that takes
	// less than half of a core. Two of the largest messages, or the output of most code, are
	// received without a delay.
	messageRate  = 32 << 20 // bytes per second
	messageBurst = 64 << 20

	// maxSparing is the weight of kernels.sparing: more than there are contexts.
	maxSparing = 1 << 10

	// exitMissing is the exit code of a kernel that is not installed, as a shell's.
	exitMissing = 127
)

// KernelError: the kernel of a context ended before it could execute code.
type KernelError struct {
	Language Language
	Ending   string // how it ended, such as "exited with code 1"
	Log      string // the end of its output
}

func (e *KernelError) Error() string {
	text := fmt.Sprintf("the interpreter of %s %s before it could execute code", e.Language, e.Ending)
	if e.Log != "" {
		text += ": " + e.Log
	}
	return text
}

// kernels are the clients of a sandbox's kernels, by the ids of their processes.
type kernels struct {
	slots  map[string]*kernelSlot
	limits zmtp.Limits // of all messages
	// sparing is held, with a weight of 1, while spare kernels start.
	sparing *semaphore.Weighted
}

// kernelSlot is the client of one kernel.
type kernelSlot struct {
	connecting *semaphore.Weighted // of weight 1; held while the kernel starts and is connected to
	kernel     *jupyter.Kernel     // nil before; guarded by liveSandbox.mu
}

// freePorts returns ports that no other kernel of the sandbox has.
func freePorts(contexts []Context) jupyter.Ports {
	for {
		p := uint16(firstKernelPort + kernelPorts*rand.N(portBlocks))
		if !slices.ContainsFunc(contexts, func(c Context) bool { return c.Kernel.Shell == p }) {
			return jupyter.Ports{Shell: p, IOPub: p + 1, Stdin: p + 2, Control: p + 3, Heartbeat: p + 4}
		}
	}
}

// kernelSlot returns the slot of a kernel, and adds it if there is none.
func (b *liveSandbox) kernelSlot(process string) *kernelSlot {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.kernels.slots[process]
	if s == nil {
		s = &kernelSlot{connecting: semaphore.NewWeighted(1)}
		if b.kernels.slots == nil {
			b.kernels.slots = map[string]*kernelSlot{}
		}
		b.kernels.slots[process] = s
	}
	return s
}

// openKernel returns the connected client of a kernel, or nil.
func (b *liveSandbox) openKernel(process string) *jupyter.Kernel {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.kernels.slots[process]
	if s == nil || s.kernel == nil {
		return nil
	}
	select {
	case <-s.kernel.Done():
		return nil
	default:
		return s.kernel
	}
}

// dropKernel closes the client of a kernel.
func (b *liveSandbox) dropKernel(process string) {
	b.mu.Lock()
	s := b.kernels.slots[process]
	delete(b.kernels.slots, process)
	b.mu.Unlock()
	if s != nil && s.kernel != nil {
		s.kernel.Close()
	}
}

// dropKernels closes the clients of all kernels.
func (b *liveSandbox) dropKernels() {
	b.mu.Lock()
	slots := b.kernels.slots
	b.kernels.slots = nil
	b.mu.Unlock()
	for _, s := range slots {
		if s.kernel != nil {
			s.kernel.Close()
		}
	}
}

// openContext is startContext, which goes on when ctx ends: another call may wait for the kernel.
func (b *liveSandbox) openContext(ctx context.Context, spec ContextSpec) (Context, error) {
	var opened Context
	err := b.m.do(ctx, func(ctx context.Context) error {
		lease, err := b.m.AcquireRunning(b.id)
		if err != nil {
			return err
		}
		defer lease.Release()
		if opened, err = b.startContext(ctx, spec); err == nil {
			b.replaceSpare(opened.Language)
		}
		return err
	})
	if err != nil { // it may go on
		return Context{}, err
	}
	return opened, nil
}

// startContext starts the kernel of a new context, or of one that has ended, or uses a spare
// one. It returns when the kernel is ready. After an error the context does not exist, or is
// the one that had ended.
func (b *liveSandbox) startContext(ctx context.Context, spec ContextSpec) (Context, error) {
	ctx, cancel := context.WithTimeout(ctx, kernelTimeout)
	defer cancel()
	ended, _ := b.view.Load().Context(spec.ID) // with spec.replaces
	c, spare, err := b.claimContext(spec, true)
	if err != nil {
		return Context{}, err
	}
	if spare {
		if _, err := b.connectKernel(ctx, c); err == nil {
			return c, nil
		}
		b.abandonKernel(ctx, c)
		spec.replaces = ""
		if c, _, err = b.claimContext(spec, false); err != nil {
			b.restoreEnded(ended)
			return Context{}, err
		}
	}
	err = b.startKernel(ctx, c)
	if err == nil {
		_, err = b.connectKernel(ctx, c)
	}
	if err == nil {
		return c, nil
	}
	if lost, ok := errors.AsType[*ContextError](err); ok && lost.Known != nil {
		err = b.startError(ctx, *lost.Known)
	}
	b.abandonKernel(ctx, c)
	b.restoreEnded(ended)
	return Context{}, err
}

// restoreEnded restores the context that a failed start was to replace, if it had ended.
func (b *liveSandbox) restoreEnded(c Context) {
	if c.Process != "" && c.State != guest.ProcessRunning {
		b.restoreContext(c)
	}
}

// abandonKernel ends and forgets a kernel that did not start, also when ctx has ended.
func (b *liveSandbox) abandonKernel(ctx context.Context, c Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abandonTimeout)
	defer cancel()
	if err := b.endKernel(ctx, c); err != nil {
		b.m.log.Warn("failed to end a kernel that did not start", "sandbox", b.id, "error", err)
	}
	b.removeConnectionFile(ctx, c)
	b.forgetContext(c.Process)
}

func (b *liveSandbox) removeConnectionFile(ctx context.Context, c Context) {
	if err := b.guest.Remove(ctx, connectionFile(c), false, ""); err != nil && !isGuestError(err, guest.CodeNotFound) {
		b.m.log.Warn("failed to remove the connection file of a kernel", "sandbox", b.id, "error", err)
	}
}

// startSpares starts a spare kernel for each of the languages that has none, in the background.
// They wait for the next contexts. The sandbox runs.
func (b *liveSandbox) startSpares(languages []Language) {
	if len(languages) == 0 || !b.kernels.sparing.TryAcquire(1) {
		return
	}
	lease, err := b.m.AcquireRunning(b.id)
	if err != nil {
		b.kernels.sparing.Release(1)
		return
	}
	release := func() {
		lease.Release()
		b.kernels.sparing.Release(1)
	}
	if !b.m.spawn(func(ctx context.Context) {
		defer release()
		for _, language := range languages {
			b.startSpare(ctx, language)
		}
	}) {
		release()
	}
}

// startSpare starts a spare kernel, unless the language has one with the present environment.
func (b *liveSandbox) startSpare(ctx context.Context, language Language) {
	old, has := b.supersedeSpare(language)
	if has {
		return
	}
	if old.Process != "" {
		b.abandonKernel(ctx, old)
	}
	if !b.hasSpareMemory(ctx) {
		b.m.log.Info("skipped a spare interpreter for lack of memory", "sandbox", b.id, "language", language)
		return
	}
	if _, err := b.startContext(ctx, ContextSpec{Language: language, spare: true}); err != nil && !errors.Is(err, ErrContextExists) {
		b.m.log.Warn("failed to start a spare interpreter", "sandbox", b.id, "language", language, "error", err)
	}
}

// replaceSpare starts another spare kernel if a context of that language may have used one.
func (b *liveSandbox) replaceSpare(used Language) {
	b.startSpares(slices.DeleteFunc(slices.Clone(b.view.Load().Warm), func(l Language) bool {
		return interpreters[l].missing != interpreters[used].missing
	}))
}

// hasSpareMemory reports whether the sandbox uses less than half of its memory, so that a spare
// kernel, which takes 70 MB, does not end the programs of a client for lack of it.
func (b *liveSandbox) hasSpareMemory(ctx context.Context) bool {
	limit := b.view.Load().Limits.Memory
	used, err := b.m.deps.Freezer.Memory(ctx, b.id)
	return limit == 0 || err == nil && used < limit/2
}

// awaitSpares waits until the sandbox starts no spare kernel, at most sparesWait. A start holds a
// lease, which a client that requests a sleep or a stop does not expect.
func (b *liveSandbox) awaitSpares(ctx context.Context, how mode) error {
	if how != modeRequested {
		return nil
	}
	waitCtx, cancel := context.WithTimeout(ctx, sparesWait)
	defer cancel()
	if err := b.kernels.sparing.Acquire(waitCtx, maxSparing); err != nil {
		return ctx.Err() // nil after sparesWait: then the sandbox is busy
	}
	b.kernels.sparing.Release(maxSparing)
	return nil
}

// startError returns the error of a kernel that ended before it could execute code.
func (b *liveSandbox) startError(ctx context.Context, c Context) error {
	if c.State == guest.ProcessExited && c.ExitCode != nil && *c.ExitCode == exitMissing {
		return &InterpreterError{Language: c.Language}
	}
	return &KernelError{Language: c.Language, Ending: c.ending(), Log: b.lastOutput(ctx, c.Process)}
}

// connectionFile is the path of a kernel's connection file in the sandbox. The kernel reads it
// when it starts; then the node removes it.
func connectionFile(c Context) string { return "/tmp/doze-kernel-" + c.Process + ".json" }

// startKernel starts the process of a context.
func (b *liveSandbox) startKernel(ctx context.Context, c Context) error {
	in := interpreters[c.Language]
	file := connectionFile(c)
	if _, err := b.guest.WriteFile(ctx, file, 0o600, bytes.NewReader(c.Kernel.File())); err != nil {
		return fmt.Errorf("write a kernel's connection file: %w", err)
	}
	env := map[string]string{}
	maps.Copy(env, in.env)
	maps.Copy(env, c.Env)
	p, err := b.startProcess(ctx, guest.ProcessSpec{
		Command: guest.Command{Argv: in.argv(file), Cwd: c.Cwd, Env: env},
		ID:      c.Process, Name: "context-" + strings.TrimPrefix(c.Process, "p-"), Restart: guest.RestartNever,
	})
	if isGuestError(err, guest.CodeNoCommand) {
		return &InterpreterError{Language: c.Language}
	}
	if err == nil {
		b.noteProcess(p)
	}
	return err
}

// connectKernel returns the client of a context's kernel, and connects it first if it is not.
// Errors: *ContextError.
func (b *liveSandbox) connectKernel(ctx context.Context, c Context) (*jupyter.Kernel, error) {
	s := b.kernelSlot(c.Process)
	if err := s.connecting.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	defer s.connecting.Release(1)
	if k := b.openKernel(c.Process); k != nil {
		return k, nil
	}
	k, err := b.dialKernel(ctx, c)
	if err != nil {
		if b.kernelEnd(c) != nil {
			b.dropKernel(c.Process) // no later call needs its slot
		}
		return nil, err
	}
	if setup := interpreters[c.Language].setup; setup != "" {
		if err := setUp(ctx, k, setup); err != nil {
			k.Close()
			return nil, err
		}
	}
	b.removeConnectionFile(ctx, c)
	b.mu.Lock()
	current := b.kernels.slots[c.Process] == s
	if current {
		s.kernel = k
	}
	b.mu.Unlock()
	if !current { // closed meanwhile
		k.Close()
		return nil, &ContextError{Context: c.ID, Closed: true}
	}
	return k, nil
}

// setUp executes code without results.
func setUp(ctx context.Context, k *jupyter.Kernel, code string) error {
	x, err := k.Execute(ctx, code, jupyter.Options{Silent: true})
	if err != nil {
		return err
	}
	select {
	case <-x.Done():
		return nil
	case <-k.Done():
		return jupyter.ErrLost
	case <-ctx.Done():
		return ctx.Err()
	}
}

// dialKernel connects to a kernel that may still be starting.
func (b *liveSandbox) dialKernel(ctx context.Context, c Context) (*jupyter.Kernel, error) {
	deadline := time.Now().Add(kernelTimeout)
	for {
		k, err := jupyter.Connect(ctx, c.Kernel, b.dialLoopback, b.kernels.limits)
		if err == nil {
			return k, nil
		}
		if errors.Is(err, jupyter.ErrLost) {
			return nil, b.afterLoss(ctx, c, err)
		}
		if ended := b.kernelEnd(c); ended != nil {
			return nil, ended
		}
		if !errors.Is(err, syscall.ECONNREFUSED) || time.Now().After(deadline) {
			return nil, err
		}
		if pauseErr := pause(ctx, connectPause); pauseErr != nil {
			return nil, pauseErr
		}
	}
}

// kernelEnd returns the *ContextError of a context whose kernel has ended, or nil.
func (b *liveSandbox) kernelEnd(c Context) error {
	for _, known := range b.view.Load().Contexts {
		if known.Process == c.Process && known.State == guest.ProcessRunning {
			return nil
		}
		if known.Process == c.Process {
			return &ContextError{Context: c.ID, Known: &known}
		}
	}
	return &ContextError{Context: c.ID, Closed: b.state() != StateDestroyed}
}

// afterLoss returns the error of a context whose connection has ended with err: why its kernel
// has ended, if it has.
func (b *liveSandbox) afterLoss(ctx context.Context, c Context, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endingWait)
	defer cancel()
	for {
		if ended := b.kernelEnd(c); ended != nil {
			return ended
		}
		if pause(ctx, 5*time.Millisecond) != nil {
			return err
		}
	}
}

// endKernel ends the process of a context, unless it has ended.
func (b *liveSandbox) endKernel(ctx context.Context, c Context) error {
	ctx, cancel := context.WithTimeout(ctx, abandonTimeout)
	defer cancel()
	defer b.dropKernel(c.Process)
	p, err := b.guest.StopProcess(ctx, c.Process, kernelGrace)
	if isGuestError(err, guest.CodeNoProcess) {
		return nil
	}
	if err == nil {
		p.ID = c.Process
		b.noteProcess(p)
	}
	return err
}
