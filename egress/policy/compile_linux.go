package policy

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// compilerName is argument 0 of this program when it runs as the compiler.
const compilerName = "doze-policy-compiler"

// limitsFormat is the form of the limits in argument 2.
const limitsFormat = "pages=%d seconds=%d bytes=%d nice=%d"

// Every program that runs policies is its own compiler unless Config.Compiler names
// another. So both have the same version, and no file has to be found.
func init() {
	if len(os.Args) == 3 && os.Args[0] == compilerName {
		os.Exit(compilerMain(os.Args[1:], os.Stdin, os.Stderr))
	}
}

// Exit codes of the compiler. Go's runtime exits with 2 when memory is exhausted.
const (
	exitInvalid  = 1 // the module is invalid; the reason is on stderr
	exitNoMemory = 2 // memory is exhausted, or the compiler has a defect
	exitTooLong  = 3
	exitFailed   = 70 // the compiler failed for another reason
)

// maxCompilerOutput bounds the compiler's output that is read, in bytes.
const maxCompilerOutput = 4 << 10

// patience is the ratio of a compiler's wall time limit to its processor time limit. It
// allows for a compiler that waits for a disk or a processor.
const patience = 20

// runCompiler compiles a module into a folder, within limits, in a separate process.
// Errors: *compilerError, ctx.Err(), or the reason why the process could not run.
func runCompiler(ctx context.Context, program string, binary []byte, dir string, l limits) error {
	limited, cancel := context.WithTimeout(ctx, patience*time.Duration(l.seconds)*time.Second)
	defer cancel()
	c := exec.CommandContext(limited, cmp.Or(program, "/proc/self/exe"))
	c.Args = []string{compilerName, dir, fmt.Sprintf(limitsFormat, l.pages, l.seconds, l.bytes, l.nice)}
	// The node's own environment may contain secrets and is not passed on.
	c.Env = []string{"GOTRACEBACK=none", "GOMAXPROCS=" + strconv.Itoa(compileWorkers), "GOMEMLIMIT=" + fmt.Sprint(l.bytes*3/4)}
	c.Stdin = bytes.NewReader(binary)
	_, err := c.Output() // none; the start of stderr is in the error
	exit, exited := errors.AsType[*exec.ExitError](err)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case limited.Err() != nil:
		return errors.New("compile a policy: the node is too busy; try again later")
	case !exited:
		return fmt.Errorf("compile a policy: %w", err)
	}
	output := string(exit.Stderr[:min(len(exit.Stderr), maxCompilerOutput)])
	switch {
	case exit.ExitCode() == exitTooLong || killedTooLate(exit, l.seconds):
		return &compilerError{fmt.Sprintf("compiling it takes more than %d s of processor time: split its largest functions, or make it smaller", l.seconds)}
	case exit.ExitCode() == exitInvalid:
		return &compilerError{output}
	case noMemory(exit, output, l.bytes):
		return &compilerError{fmt.Sprintf("compiling it takes more than %d MiB of memory: split its largest functions, or make it smaller", l.bytes>>20)}
	}
	return fmt.Errorf("compile a policy: %w: %s", err, firstLine(output))
}

// killedTooLate reports whether the kernel killed the compiler at the hard limit of its
// processor time. This happens if the compiler gets no processor to exit by itself.
func killedTooLate(exit *exec.ExitError, seconds uint64) bool {
	status, ok := exit.Sys().(syscall.WaitStatus)
	used := exit.UserTime() + exit.SystemTime()
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL && used >= time.Duration(seconds)*time.Second
}

// noMemory reports whether the compiler ran out of memory. Go's runtime has several
// messages for it. One is that it cannot start a thread; that may be a problem of the
// node, unless the compiler has used much of its limit.
func noMemory(exit *exec.ExitError, output string, limit uint64) bool {
	if exit.ExitCode() != exitNoMemory {
		return false
	}
	usage, ok := exit.SysUsage().(*syscall.Rusage)
	much := ok && uint64(usage.Maxrss)<<10 >= limit/4
	return strings.Contains(output, "memory") || much && strings.Contains(output, "thread")
}

// compilerMain is the main function of the compiler's process, and returns its exit
// code. args are the folder and the limits.
func compilerMain(args []string, in io.Reader, out io.Writer) int {
	err := func() error {
		var l limits
		if _, err := fmt.Sscanf(args[1], limitsFormat, &l.pages, &l.seconds, &l.bytes, &l.nice); err != nil {
			return err
		}
		if err := limit(l); err != nil {
			return fmt.Errorf("limit the compiler: %w", err)
		}
		binary, err := io.ReadAll(in)
		if err != nil {
			return err
		}
		return compileInto(context.Background(), binary, args[0], l.pages)
	}()
	if err == nil {
		return 0
	}
	fmt.Fprintln(out, strings.TrimSpace(err.Error()))
	if invalid := (*compilerError)(nil); errors.As(err, &invalid) {
		return exitInvalid
	}
	return exitFailed
}

// limit bounds this process, lowers its priority, and makes it the first candidate of the
// OOM killer.
func limit(l limits) error {
	before, err := dataSize()
	if err != nil {
		return err
	}
	tooLong := make(chan os.Signal, 1)
	signal.Notify(tooLong, unix.SIGXCPU)
	go func() { // ends with the process
		<-tooLong
		os.Exit(exitTooLong)
	}()
	most := before + l.bytes
	for resource, limit := range map[int]unix.Rlimit{
		unix.RLIMIT_DATA: {Cur: most, Max: most},
		unix.RLIMIT_CPU:  {Cur: l.seconds, Max: l.seconds + 5},
		unix.RLIMIT_CORE: {},
	} {
		if err := unix.Setrlimit(resource, &limit); err != nil {
			return err
		}
	}
	_ = unix.Setpriority(unix.PRIO_PROCESS, 0, int(l.nice))
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("1000"), 0)
	return nil
}

// dataSize returns the memory of this process that counts toward RLIMIT_DATA, in bytes.
func dataSize() (uint64, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	_, value, _ := strings.Cut(string(status), "\nVmData:")
	var kilobytes uint64
	if _, err := fmt.Sscan(value, &kilobytes); err != nil {
		return 0, fmt.Errorf("read VmData in /proc/self/status: %w", err)
	}
	return kilobytes << 10, nil
}
