package sandbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/jupyter"
	"github.com/doze-run/doze/runtime/jupyter/jupytertest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// withInterpreters makes the interpreters of sandboxes fake kernels.
func withInterpreters(t *testing.T) {
	t.Setenv("PATH", jupytertest.Install(t)+":"+os.Getenv("PATH"))
}

// runCode executes code in a context, and returns the text of its results and output.
func runCode(t *testing.T, m *sandbox.Manager, id sandbox.ID, name string, spec sandbox.CodeSpec) (string, error) {
	t.Helper()
	spec.Limit = 1 << 20
	r, err := m.RunCode(testkit.Context(t), id, name, spec)
	if err != nil {
		return "", err
	}
	defer r.Close()
	return readCode(t, r)
}

func readCode(t *testing.T, r *sandbox.CodeRun) (string, error) {
	var b strings.Builder
	for {
		ev, err := r.Next()
		if err != nil {
			return b.String(), err
		}
		switch ev.Kind {
		case jupyter.Result:
			var text string
			if err := json.Unmarshal(ev.Result.Data["text/plain"], &text); err != nil {
				t.Error(err)
			}
			b.WriteString(text)
		case jupyter.Failed:
			b.WriteString(ev.Error.Name)
		case jupyter.Complete:
			return b.String(), nil
		}
		b.WriteString(ev.Text)
	}
}

func mustRun(t *testing.T, m *sandbox.Manager, id sandbox.ID, name, code, want string) {
	t.Helper()
	if got, err := runCode(t, m, id, name, sandbox.CodeSpec{Code: code}); err != nil || got != want {
		t.Errorf("%q in %s: %q, error %v; want %q", code, name, got, err, want)
	}
}

func wantEnded(t *testing.T, err error, parts ...string) {
	t.Helper()
	ended, ok := errors.AsType[*sandbox.ContextError](err)
	if !ok || ended.Known == nil {
		t.Fatalf("error %v", err)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q does not contain %q", err, part)
		}
	}
}

func TestContextKeepsItsState(t *testing.T) {
	withInterpreters(t)
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	dir := t.TempDir()
	c, err := m.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{ID: "a", Language: sandbox.Python, Cwd: dir, Env: map[string]string{"GREETING": "hello"}})
	testkit.NoError(t, "OpenContext", err)
	if c.State != guest.ProcessRunning || c.Kernel.Shell < 61000 {
		t.Errorf("%+v", c)
	}
	mustRun(t, m, sb.ID, "a", "set x 7", "")
	mustRun(t, m, sb.ID, "a", "get x\nenv GREETING\ncwd", "7hello"+dir)
	mustRun(t, m, sb.ID, "a", "raise Error broken", "Error")
	_, err = m.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{ID: "a", Language: sandbox.Python})
	testkit.ErrorIs(t, "OpenContext", err, sandbox.ErrContextExists)
	// Another context has a state of its own.
	b, err := m.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{Language: sandbox.TypeScript})
	testkit.NoError(t, "OpenContext", err)
	mustRun(t, m, sb.ID, b.ID, "get x", "NameError")
	// The connection file, which has the key, is removed.
	if files, _ := filepath.Glob("/tmp/doze-kernel-" + c.Process + "*"); len(files) > 0 {
		t.Errorf("left %s", files)
	}
	restarted, err := m.RestartContext(t.Context(), sb.ID, "a")
	testkit.NoError(t, "RestartContext", err)
	if restarted.Process == c.Process || restarted.ID != "a" {
		t.Errorf("%+v", restarted)
	}
	mustRun(t, m, sb.ID, "a", "get x\nenv GREETING", "NameError")
	mustRun(t, m, sb.ID, "a", "env GREETING", "hello")
	closed, err := m.CloseContext(t.Context(), sb.ID, "a")
	testkit.NoError(t, "CloseContext", err)
	if closed.ID != "a" || closed.State != guest.ProcessExited {
		t.Errorf("%+v", closed)
	}
	_, err = runCode(t, m, sb.ID, "a", sandbox.CodeSpec{Code: "value 2"})
	if e, ok := errors.AsType[*sandbox.ContextError](err); !ok || e.Known != nil {
		t.Errorf("after its end: %v", err)
	}
}

func TestDefaultContextIsOpenedOnce(t *testing.T) {
	withInterpreters(t)
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	results := make(chan string, 4)
	for range cap(results) {
		go func() {
			got, err := runCode(t, m, sb.ID, "javascript", sandbox.CodeSpec{Code: "value 2"})
			if err != nil {
				got = err.Error()
			}
			results <- got
		}()
	}
	for range cap(results) {
		if got := testkit.Receive(t, "a result", results); got != "2" {
			t.Errorf("got %q", got)
		}
	}
	known, _ := m.ByID(sb.ID)
	if len(known.Contexts) != 1 || known.Contexts[0].ID != "javascript" || known.Contexts[0].Language != sandbox.JavaScript {
		t.Errorf("%+v", known.Contexts)
	}
}

func TestMissingInterpreterIsReported(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	const (
		python = "use the image doze/python, or install it with apt-get install python3-ipykernel or pip install ipykernel"
		deno   = "use the image doze/node, or install it with npm install -g deno"
	)
	for _, tt := range []struct {
		language             sandbox.Language
		interpreter, install string
	}{
		{sandbox.Python, "Python 3 with ipykernel, which executes python", python},
		{sandbox.JavaScript, "Deno, which executes javascript", deno},
		{sandbox.TypeScript, "Deno, which executes typescript", deno},
	} {
		for name, env := range map[string]map[string]string{
			"program": {"PATH": t.TempDir()},
			"package": {"PATH": jupytertest.Install(t), "KERNEL_EXIT": "127"},
		} {
			_, err := m.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{Language: tt.language, Env: env})
			missing, ok := errors.AsType[*sandbox.InterpreterError](err)
			if !ok {
				t.Fatalf("%s without its %s: %v", tt.language, name, err)
			}
			testkit.Diff(t, "error", missing.Error(), "the sandbox has no "+tt.interpreter)
			testkit.Diff(t, "remedy", missing.Remedy(), tt.install)
		}
	}
	_, err := m.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{Language: sandbox.Python, Env: map[string]string{"PATH": jupytertest.Install(t), "KERNEL_EXIT": "2"}})
	if failed, ok := errors.AsType[*sandbox.KernelError](err); !ok || !strings.Contains(failed.Error(), "exited with code 2") || failed.Log != "unknown option" {
		t.Errorf("failed start: %v", err)
	}
	if known, _ := m.ByID(sb.ID); len(known.Contexts) > 0 {
		t.Errorf("left %+v", known.Contexts)
	}
}

func TestTimeoutInterruptsTheCode(t *testing.T) {
	withInterpreters(t)
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	mustRun(t, m, sb.ID, "python", "set x 7", "")
	r, err := m.RunCode(t.Context(), sb.ID, "python", sandbox.CodeSpec{Code: "print on\nloop", Timeout: 50 * time.Millisecond, Limit: 1 << 10})
	testkit.NoError(t, "RunCode", err)
	if got, err := readCode(t, r); got != "on\nKeyboardInterrupt" || err != nil || !r.TimedOut() {
		t.Errorf("%q, error %v, timed out %v", got, err, r.TimedOut())
	}
	r.Close()
	mustRun(t, m, sb.ID, "python", "get x", "7")
}

func TestClientThatLeavesInterruptsItsCode(t *testing.T) {
	withInterpreters(t)
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	ctx, leave := context.WithCancel(t.Context())
	r, err := m.RunCode(ctx, sb.ID, "python", sandbox.CodeSpec{Code: "set x 7\nprint on\nloop", Limit: 1 << 10})
	testkit.NoError(t, "RunCode", err)
	if ev, err := r.Next(); err != nil || ev.Text != "on\n" {
		t.Fatalf("%+v, %v", ev, err)
	}
	_, err = runCode(t, m, sb.ID, "python", sandbox.CodeSpec{Code: "value 2", Timeout: 20 * time.Millisecond})
	testkit.ErrorIs(t, "code during other code", err, sandbox.ErrContextBusy)
	leave()
	_, err = r.Next()
	testkit.ErrorIs(t, "Next", err, context.Canceled)
	r.Close()
	mustRun(t, m, sb.ID, "python", "get x", "7")
}

func TestInterruptEndsTheCodeOfAnotherCaller(t *testing.T) {
	withInterpreters(t)
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	r, err := m.RunCode(testkit.Context(t), sb.ID, "python", sandbox.CodeSpec{Code: "print on\nloop", Limit: 1 << 10})
	testkit.NoError(t, "RunCode", err)
	defer r.Close()
	if ev, err := r.Next(); err != nil || ev.Text != "on\n" {
		t.Fatalf("%+v, %v", ev, err)
	}
	_, err = m.InterruptContext(t.Context(), sb.ID, "python")
	testkit.NoError(t, "InterruptContext", err)
	if got, err := readCode(t, r); got != "KeyboardInterrupt" || err != nil {
		t.Errorf("%q, error %v", got, err)
	}
}

func TestCodeOfAContextThatIsClosedOrRestartedIsLost(t *testing.T) {
	withInterpreters(t)
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	for name, end := range map[string]func(context.Context, sandbox.ID, string) (sandbox.Context, error){
		"closed": m.CloseContext, "restarted": m.RestartContext,
	} {
		t.Run(name, func(t *testing.T) {
			r, err := m.RunCode(testkit.Context(t), sb.ID, "python", sandbox.CodeSpec{Code: "print on\nloop", Limit: 1 << 10})
			testkit.NoError(t, "RunCode", err)
			defer r.Close()
			if ev, err := r.Next(); err != nil || ev.Text != "on\n" {
				t.Fatalf("%+v, %v", ev, err)
			}
			_, err = end(t.Context(), sb.ID, "python")
			testkit.NoError(t, name, err)
			_, err = readCode(t, r) // which may find the context before it is removed
			if lost, ok := errors.AsType[*sandbox.ContextError](err); !ok || !lost.Closed && lost.Known == nil {
				t.Errorf("error %v", err)
			}
			mustRun(t, m, sb.ID, "python", "value 2", "2")
		})
	}
}

func TestKilledInterpreterEndsItsContext(t *testing.T) {
	withInterpreters(t)
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	_, err := runCode(t, m, sb.ID, "python", sandbox.CodeSpec{Code: "exit"})
	wantEnded(t, err, "exited with code 3")
	_, err = m.RestartContext(t.Context(), sb.ID, "python")
	testkit.NoError(t, "RestartContext", err)
	mustRun(t, m, sb.ID, "python", "value 2", "2")
	// While it executes no code.
	known, _ := m.ByID(sb.ID)
	p, err := known.Process(known.Contexts[0].Process)
	testkit.NoError(t, "Process", err)
	testkit.NoError(t, "kill", syscall.Kill(p.PID, syscall.SIGKILL))
	testkit.Eventually(t, "the end is known", func() bool {
		known, _ := m.ByID(sb.ID)
		return known.Contexts[0].State == guest.ProcessExited
	})
	_, err = runCode(t, m, sb.ID, "python", sandbox.CodeSpec{Code: "value 2"})
	wantEnded(t, err, "SIGKILL")
}

// The guest remembers 64 processes that have ended.
func TestForgottenInterpreterIsLost(t *testing.T) {
	withInterpreters(t)
	n := sandboxtest.Open(t, nil)
	sb, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app", Warm: []sandbox.Language{sandbox.JavaScript}})
	testkit.NoError(t, "Create", err)
	mustRun(t, n.Manager, sb.ID, "python", "set x 7", "")
	for _, id := range []string{"a", "b"} {
		_, err := n.Manager.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{ID: id, Language: sandbox.Python})
		testkit.NoError(t, "OpenContext", err)
	}
	testkit.Eventually(t, "the spare interpreter is started", func() bool {
		known, _ := n.Manager.ByID(sb.ID)
		// Its start holds a lease until it is over.
		return n.Manager.Info(t.Context()).Leases == 0 && len(known.Contexts) == 4 && !slices.ContainsFunc(known.Contexts, func(c sandbox.Context) bool {
			p, err := known.Process(c.Process)
			return err != nil || p.State != guest.ProcessRunning
		})
	})
	before, _ := n.Manager.ByID(sb.ID)
	n.Crash(t, func() {
		inside := guest.NewClient(filepath.Join(n.RunDir(sb.ID), guest.SocketName))
		defer inside.Close()
		for _, c := range before.Contexts {
			if c.ID != "b" {
				_, err := inside.StopProcess(t.Context(), c.Process, 0)
				testkit.NoError(t, "StopProcess", err)
			}
		}
		for range 64 {
			p, err := inside.StartProcess(t.Context(), guest.ProcessSpec{Command: guest.Command{Argv: []string{"true"}}})
			testkit.NoError(t, "StartProcess", err)
			_, err = inside.StopProcess(t.Context(), p.ID, 0) // waits for its end
			testkit.NoError(t, "StopProcess", err)
		}
	})
	testkit.Eventually(t, "the interpreters are lost", func() bool {
		known, _ := n.Manager.ByID(sb.ID)
		states := map[string]guest.ProcessState{}
		for _, c := range known.Contexts {
			states[c.ID] = c.State
		}
		return maps.Equal(states, map[string]guest.ProcessState{"python": guest.ProcessLost, "a": guest.ProcessLost, "b": guest.ProcessRunning})
	})
	known, _ := n.Manager.ByID(sb.ID)
	for _, c := range before.Contexts {
		want := guest.ProcessLost
		if c.ID == "b" {
			want = guest.ProcessRunning
		}
		if p, err := known.Process(c.Process); err != nil || p.State != want {
			t.Errorf("the process of %q is %+v, error %v", c.ID, p, err)
		}
	}
	_, err = runCode(t, n.Manager, sb.ID, "python", sandbox.CodeSpec{Code: "get x"})
	wantEnded(t, err, "no longer knows how")
	_, err = n.Manager.RestartContext(t.Context(), sb.ID, "python")
	testkit.NoError(t, "RestartContext", err)
	mustRun(t, n.Manager, sb.ID, "python", "get x", "NameError")
	mustRun(t, n.Manager, sb.ID, "b", "value 2", "2")
}

func TestContextSurvivesSleepAndARestartOfTheNode(t *testing.T) {
	withInterpreters(t)
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	mustRun(t, n.Manager, sb.ID, "python", "set x 7", "")
	mustSleep(t, n.Manager, sb.ID)
	mustRun(t, n.Manager, sb.ID, "python", "get x", "7")
	n.Crash(t, func() {})
	mustRun(t, n.Manager, sb.ID, "python", "get x", "7")
	mustStop(t, n.Manager, sb.ID)
	_, err := runCode(t, n.Manager, sb.ID, "python", sandbox.CodeSpec{Code: "get x"})
	wantEnded(t, err, "requested")
	if got, _ := n.Manager.ByID(sb.ID); got.State != sandbox.StateStopped {
		t.Errorf("the refused code started the sandbox: %s", got.State)
	}
	_, err = n.Manager.RestartContext(t.Context(), sb.ID, "python")
	testkit.NoError(t, "RestartContext", err)
	mustRun(t, n.Manager, sb.ID, "python", "get x", "NameError")
}

// The code of a client that the node has lost goes on.
func TestCodeOfALostClientCanBeInterrupted(t *testing.T) {
	withInterpreters(t)
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	mustRun(t, n.Manager, sb.ID, "python", "set x 7", "")
	ctx, leave := context.WithCancel(t.Context())
	r, err := n.Manager.RunCode(ctx, sb.ID, "python", sandbox.CodeSpec{Code: "print on\nloop", Limit: 1 << 10})
	testkit.NoError(t, "RunCode", err)
	if ev, err := r.Next(); err != nil || ev.Text != "on\n" {
		t.Fatalf("%+v, %v", ev, err)
	}
	n.Crash(t, func() {})
	leave()
	_, err = runCode(t, n.Manager, sb.ID, "python", sandbox.CodeSpec{Code: "get x", Timeout: 20 * time.Millisecond})
	testkit.ErrorIs(t, "code during other code", err, sandbox.ErrContextBusy)
	_, err = n.Manager.InterruptContext(testkit.Context(t), sb.ID, "python")
	testkit.NoError(t, "InterruptContext", err)
	mustRun(t, n.Manager, sb.ID, "python", "get x", "7")
}

func TestCallerThatLeavesDoesNotEndTheStartOfAnInterpreter(t *testing.T) {
	withInterpreters(t)
	start := filepath.Join(t.TempDir(), "start")
	t.Setenv("KERNEL_WAIT", start)
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	ctx, leave := context.WithCancel(t.Context())
	first, second := make(chan error, 1), make(chan error, 1)
	run := func(ctx context.Context, ended chan error) {
		r, err := m.RunCode(ctx, sb.ID, "python", sandbox.CodeSpec{Code: "value 2", Limit: 1 << 10})
		if err == nil {
			_, err = readCode(t, r)
			r.Close()
		}
		ended <- err
	}
	go run(ctx, first)
	testkit.Eventually(t, "the interpreter is being started", func() bool {
		known, _ := m.ByID(sb.ID)
		return len(known.Contexts) == 1
	})
	go run(testkit.Context(t), second)
	leave()
	testkit.ErrorIs(t, "the caller that left", testkit.Receive(t, "its end", first), context.Canceled)
	testkit.NoError(t, "WriteFile", os.WriteFile(start, nil, 0o600))
	testkit.NoError(t, "the other caller", testkit.Receive(t, "its end", second))
}

func TestFailedRestartKeepsTheContext(t *testing.T) {
	withInterpreters(t)
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	dir := t.TempDir()
	broken := filepath.Join(t.TempDir(), "broken")
	_, err := m.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{ID: "a", Language: sandbox.Python, Cwd: dir, Env: map[string]string{"KERNEL_EXIT_IF": broken}})
	testkit.NoError(t, "OpenContext", err)
	testkit.NoError(t, "WriteFile", os.WriteFile(broken, nil, 0o600))
	_, err = m.RestartContext(t.Context(), sb.ID, "a")
	if _, ok := errors.AsType[*sandbox.KernelError](err); !ok {
		t.Errorf("error %v", err)
	}
	_, err = runCode(t, m, sb.ID, "a", sandbox.CodeSpec{Code: "cwd"})
	wantEnded(t, err)
	testkit.NoError(t, "Remove", os.Remove(broken))
	_, err = m.RestartContext(t.Context(), sb.ID, "a")
	testkit.NoError(t, "RestartContext", err)
	mustRun(t, m, sb.ID, "a", "cwd", dir)
}

func TestRestartsAtTheSameTimeRestartTheContext(t *testing.T) {
	withInterpreters(t)
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	mustRun(t, m, sb.ID, "python", "set x 7", "")
	errs := make(chan error, 4)
	for range cap(errs) {
		go func() {
			_, err := m.RestartContext(testkit.Context(t), sb.ID, "python")
			errs <- err
		}()
	}
	for range cap(errs) {
		testkit.NoError(t, "RestartContext", testkit.Receive(t, "a restart", errs))
	}
	mustRun(t, m, sb.ID, "python", "get x", "NameError")
}

func TestCodeForAClosedContextLeavesNoClient(t *testing.T) {
	withInterpreters(t)
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	c, err := m.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{Language: sandbox.Python})
	testkit.NoError(t, "OpenContext", err)
	_, err = m.CloseContext(t.Context(), sb.ID, c.ID)
	testkit.NoError(t, "CloseContext", err)
	if err := m.ConnectKernel(sb.ID, c); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("error %v", err)
	}
	if n := m.KernelClients(sb.ID); n != 0 {
		t.Errorf("%d clients are left", n)
	}
}

func TestContextsAreBounded(t *testing.T) {
	withInterpreters(t)
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	var invalid *sandbox.InvalidError
	for _, spec := range []sandbox.ContextSpec{
		{Language: "cobol"}, {Language: sandbox.Python, ID: "javascript"}, {Language: sandbox.Python, ID: strings.Repeat("x", 65)},
		{Language: sandbox.Python, Cwd: "/" + strings.Repeat("x", 1<<10)}, {Language: sandbox.Python, Env: map[string]string{"A": strings.Repeat("x", 32<<10)}},
	} {
		if _, err := m.OpenContext(t.Context(), sb.ID, spec); !errors.As(err, &invalid) {
			t.Errorf("%.40q: %v", spec.ID, err)
		}
	}
	for range 16 {
		_, err := m.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{Language: sandbox.Python})
		testkit.NoError(t, "OpenContext", err)
	}
	_, err := m.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{Language: sandbox.Python})
	testkit.ErrorIs(t, "OpenContext", err, sandbox.ErrTooManyContexts)
}

func TestWarmInterpreterIsUsedByTheFirstContext(t *testing.T) {
	withInterpreters(t)
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	sb, _, err := m.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app", Warm: []sandbox.Language{sandbox.Python, sandbox.JavaScript}})
	testkit.NoError(t, "Create", err)
	spares := func() (processes []string) {
		known, _ := m.ByID(sb.ID)
		if len(known.OpenContexts()) > 0 {
			t.Errorf("listed %+v", known.OpenContexts())
		}
		for _, c := range known.Contexts {
			if c.Spare {
				processes = append(processes, c.Process)
			}
		}
		return processes
	}
	processOf := func(name string) string {
		t.Helper()
		known, _ := m.ByID(sb.ID)
		c, err := known.Context(name)
		testkit.NoError(t, "Context", err)
		return c.Process
	}
	testkit.Eventually(t, "both interpreters are started", func() bool { return len(spares()) == 2 })
	first := spares()
	_, err = m.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{ID: "env", Language: sandbox.Python, Env: map[string]string{"A": "1", "PATH": os.Getenv("PATH")}})
	testkit.NoError(t, "OpenContext", err)
	mustRun(t, m, sb.ID, "env", "env A", "1")
	if got := processOf("env"); got == first[0] {
		t.Error("a context with variables got a spare interpreter")
	}
	for i, name := range []string{"python", "typescript"} {
		mustRun(t, m, sb.ID, name, "value 2", "2")
		if got := processOf(name); got != first[i] {
			t.Errorf("%s has the interpreter %s, not %s", name, got, first[i])
		}
	}
	mustRun(t, m, sb.ID, "javascript", "value 2", "2") // without a spare one
	// A cold start starts others.
	mustStop(t, m, sb.ID)
	acquire(t, m, sb.ID).Release()
	var again string
	testkit.Eventually(t, "an interpreter is started", func() bool {
		known, _ := m.ByID(sb.ID)
		for _, c := range known.Contexts {
			if c.Spare && c.Language == sandbox.Python {
				again = c.Process
			}
		}
		return again != ""
	})
	_, err = m.RestartContext(t.Context(), sb.ID, "python")
	testkit.NoError(t, "RestartContext", err)
	if got := processOf("python"); got != again {
		t.Errorf("restarted with %s, not %s", got, again)
	}
	var invalid *sandbox.InvalidError
	for _, warm := range [][]sandbox.Language{{"cobol"}, {sandbox.Python, sandbox.Python}} {
		if _, _, err := m.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "bad", Warm: warm}); !errors.As(err, &invalid) {
			t.Errorf("%v: %v", warm, err)
		}
	}
}

// withWarmPython creates a sandbox with a warm interpreter of Python.
func withWarmPython(t *testing.T) (*sandbox.Manager, sandbox.Sandbox) {
	t.Helper()
	withInterpreters(t)
	m := sandboxtest.New(t)
	sb, _, err := m.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app", Warm: []sandbox.Language{sandbox.Python}})
	testkit.NoError(t, "Create", err)
	return m, sb
}

// spareOf returns the process of the spare interpreter, or "". There is one at most.
func spareOf(t *testing.T, m *sandbox.Manager, id sandbox.ID) (process string) {
	t.Helper()
	known, _ := m.ByID(id)
	for _, c := range known.Contexts {
		if c.Spare && process != "" {
			t.Errorf("two spare interpreters: %+v", known.Contexts)
		}
		if c.Spare {
			process = c.Process
		}
	}
	return process
}

// A warm interpreter was started with the environment that the sandbox had then.
func TestContextsHaveTheUpdatedEnvironment(t *testing.T) {
	m, sb := withWarmPython(t)
	testkit.Eventually(t, "an interpreter waits", func() bool { return spareOf(t, m, sb.ID) != "" })
	old := spareOf(t, m, sb.ID)
	set := func(value string) {
		t.Helper()
		_, err := m.UpdateEnvironment(t.Context(), sb.ID, map[string]*string{"A": &value})
		testkit.NoError(t, "UpdateEnvironment", err)
	}
	has := func(name, value string) {
		t.Helper()
		mustRun(t, m, sb.ID, name, "env A", value)
	}
	set("1")
	_, err := m.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{ID: "a", Language: sandbox.Python})
	testkit.NoError(t, "OpenContext", err)
	has("a", "1")
	testkit.Eventually(t, "another interpreter waits", func() bool { s := spareOf(t, m, sb.ID); return s != "" && s != old })
	mustSleep(t, m, sb.ID)
	set("2") // wakes nothing
	acquire(t, m, sb.ID).Release()
	_, err = m.RestartContext(t.Context(), sb.ID, "a")
	testkit.NoError(t, "RestartContext", err)
	has("a", "2")
	// The one that waits has the present environment in the end, and the next context gets it.
	testkit.Eventually(t, "an interpreter with the present environment is used", func() bool {
		want := spareOf(t, m, sb.ID)
		c, err := m.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{Language: sandbox.Python})
		testkit.NoError(t, "OpenContext", err)
		has(c.ID, "2")
		_, err = m.CloseContext(t.Context(), sb.ID, c.ID)
		testkit.NoError(t, "CloseContext", err)
		return want != "" && c.Process == want
	})
}

func TestUsedWarmInterpreterIsReplaced(t *testing.T) {
	m, sb := withWarmPython(t)
	used := map[string]bool{"": true}
	next := func() (spare string) {
		t.Helper()
		testkit.Eventually(t, "another interpreter waits", func() bool {
			spare = spareOf(t, m, sb.ID)
			return !used[spare]
		})
		used[spare] = true
		return spare
	}
	for _, name := range []string{"python", "a", "b"} {
		want := next()
		c, err := m.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{ID: name, Language: sandbox.Python})
		testkit.NoError(t, "OpenContext", err)
		if c.Process != want {
			t.Errorf("%s has the interpreter %s, not %s", name, c.Process, want)
		}
		// The start of the next one does not refuse the sleep.
		mustSleep(t, m, sb.ID)
		acquire(t, m, sb.ID).Release()
	}
	want := next()
	restarted, err := m.RestartContext(t.Context(), sb.ID, "a")
	testkit.NoError(t, "RestartContext", err)
	if restarted.Process != want {
		t.Errorf("restarted with %s, not %s", restarted.Process, want)
	}
	// Contexts that are opened at the same time leave one spare interpreter.
	next()
	var opening sync.WaitGroup
	for range 4 {
		opening.Go(func() {
			_, err := m.OpenContext(testkit.Context(t), sb.ID, sandbox.ContextSpec{Language: sandbox.Python})
			testkit.NoError(t, "OpenContext", err)
		})
	}
	opening.Wait()
	next()
}

// Spare interpreters neither prevent contexts nor are they started instead of them.
func TestSpareInterpretersTakeNoContext(t *testing.T) {
	withInterpreters(t)
	m := sandboxtest.New(t)
	sb, _, err := m.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app", Warm: []sandbox.Language{sandbox.Python}})
	testkit.NoError(t, "Create", err)
	for range 16 {
		_, err := m.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{Language: sandbox.JavaScript})
		testkit.NoError(t, "OpenContext", err)
	}
	_, err = m.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{Language: sandbox.Python})
	testkit.ErrorIs(t, "OpenContext", err, sandbox.ErrTooManyContexts)
}

func TestSpareInterpreterIsNotStartedWithoutMemory(t *testing.T) {
	withInterpreters(t)
	n := sandboxtest.Open(t, nil)
	sb, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app", Warm: []sandbox.Language{sandbox.Python}})
	testkit.NoError(t, "Create", err)
	testkit.Eventually(t, "the interpreter is started", func() bool { return spareOf(t, n.Manager, sb.ID) != "" })
	limit := n.Freezer.Limits(sb.ID).Memory
	n.Freezer.SetMemory(sb.ID, limit/2)
	mustRun(t, n.Manager, sb.ID, "python", "value 2", "2")
	n.Log.Await("skipped a spare interpreter")
	if spare := spareOf(t, n.Manager, sb.ID); spare != "" {
		t.Errorf("the spare interpreter %s was started", spare)
	}
	// The next context finds memory again.
	n.Freezer.SetMemory(sb.ID, limit/2-1)
	mustRun(t, n.Manager, sb.ID, "javascript", "value 2", "2")
	_, err = n.Manager.OpenContext(t.Context(), sb.ID, sandbox.ContextSpec{Language: sandbox.Python})
	testkit.NoError(t, "OpenContext", err)
	testkit.Eventually(t, "an interpreter is started", func() bool { return spareOf(t, n.Manager, sb.ID) != "" })
}

// A warm interpreter that does not start does not prevent the first code.
func TestFailedWarmInterpreterIsReplaced(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	n := sandboxtest.Open(t, nil)
	sb, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app", Warm: []sandbox.Language{sandbox.Python}})
	testkit.NoError(t, "Create", err)
	n.Log.Await("failed to start a spare interpreter")
	_, err = runCode(t, n.Manager, sb.ID, "python", sandbox.CodeSpec{Code: "value 2"})
	if _, ok := errors.AsType[*sandbox.InterpreterError](err); !ok {
		t.Errorf("error %v", err)
	}
	if known, _ := n.Manager.ByID(sb.ID); len(known.Contexts) > 0 {
		t.Errorf("left %+v", known.Contexts)
	}
}
