package testkit_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// fakeT records failures in place of a test's own T.
type fakeT struct {
	testing.TB
	failed   []string
	fatal    bool
	cleanups []func()
	output   bytes.Buffer
}

func (f *fakeT) Helper()                   {}
func (f *fakeT) Cleanup(c func())          { f.cleanups = append(f.cleanups, c) }
func (f *fakeT) Output() io.Writer         { return &f.output }
func (f *fakeT) Errorf(s string, a ...any) { f.failed = append(f.failed, fmt.Sprintf(s, a...)) }
func (f *fakeT) Fatalf(s string, a ...any) { f.Errorf(s, a...); f.exit() }
func (f *fakeT) Fatal(a ...any)            { f.Errorf("%s", fmt.Sprint(a...)); f.exit() }
func (f *fakeT) exit()                     { f.fatal = true; runtime.Goexit() }

// run runs a test function until it returns or fails, and then its cleanups.
func run(f func(t *fakeT)) *fakeT {
	t := &fakeT{}
	done := make(chan struct{})
	go func() {
		defer close(done)
		f(t)
	}()
	<-done
	for _, c := range t.cleanups {
		c()
	}
	return t
}

// wantFatal checks that a test ended with a message that contains the parts.
func wantFatal(t *testing.T, f *fakeT, parts ...string) {
	t.Helper()
	if !f.fatal || len(f.failed) != 1 {
		t.Fatalf("fatal: %v, failures: %q", f.fatal, f.failed)
	}
	for _, part := range parts {
		if !strings.Contains(f.failed[0], part) {
			t.Errorf("%q does not contain %q", f.failed[0], part)
		}
	}
}

func TestEventuallyWaitsUntilTheConditionHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		polled := 0
		f := run(func(t *fakeT) { testkit.Eventually(t, "three polls", func() bool { polled++; return polled == 3 }) })
		if polled != 3 || f.failed != nil {
			t.Errorf("%d polls, failures %q", polled, f.failed)
		}
	})
}

func TestEventuallyEndsTheTestWithTheDetails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		state := "begun"
		f := run(func(t *fakeT) {
			testkit.Eventually(t, "the state is done", func() bool { state = "half done"; return false }, func() string { return "state: " + state }, testkit.Stacks)
		})
		wantFatal(t, f, "the state is done", "state: half done", "testkit.Stacks")
		if took := time.Since(start); took < testkit.Patience || took > testkit.Patience+time.Second {
			t.Errorf("took %v", took)
		}
	})
}

func TestReceive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := make(chan int)
		go func() {
			time.Sleep(testkit.Patience / 2)
			c <- 7
		}()
		if got := testkit.Receive(t, "a number", c); got != 7 {
			t.Errorf("got %d", got)
		}
		wantFatal(t, run(func(t *fakeT) { testkit.Receive(t, "another number", c) }), "another number", testkit.Patience.String())
		close(c)
		wantFatal(t, run(func(t *fakeT) { testkit.Receive(t, "a third", c) }), "closed", "a third")
	})
}

func TestClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := make(chan struct{}, 1)
		c <- struct{}{} // a value is not the end
		wantFatal(t, run(func(t *fakeT) { testkit.Closed(t, "the end", c) }), "the end")
		close(c)
		testkit.Closed(t, "the end", c)
	})
}

func TestErrorsOfCalls(t *testing.T) {
	f := run(func(t *fakeT) {
		testkit.NoError(t, "Ping", nil)
		testkit.ErrorIs(t, "Open", fmt.Errorf("open it: %w", fs.ErrNotExist), fs.ErrNotExist)
	})
	if len(f.failed) > 0 {
		t.Errorf("failed with %q", f.failed)
	}
	wantFatal(t, run(func(t *fakeT) { testkit.NoError(t, "Ping", io.EOF) }), "Ping: EOF")
	f = run(func(t *fakeT) { testkit.ErrorIs(t, "Open", nil, fs.ErrNotExist) })
	if f.fatal || len(f.failed) != 1 || !strings.Contains(f.failed[0], "Open: <nil>, want file does not exist") {
		t.Errorf("failed with %q, fatal %v", f.failed, f.fatal)
	}
}

func TestContextEndsAfterPatienceAndWithTheTest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var after error
		f := run(func(t *fakeT) {
			ctx := testkit.Context(t)
			t.cleanups = append([]func(){func() { after = ctx.Err() }}, t.cleanups...)
			t.Cleanup(func() {
				if ctx.Err() == nil {
					t.Errorf("the context outlives the test")
				}
			})
		})
		if after != nil || f.failed != nil {
			t.Errorf("in a cleanup: %v; %q", after, f.failed)
		}
		ctx := testkit.Context(t)
		time.Sleep(testkit.Patience + time.Second)
		if ctx.Err() == nil {
			t.Error("the context has no deadline")
		}
	})
}

func TestDiff(t *testing.T) {
	type value struct{ Name string }
	if f := run(func(t *fakeT) { testkit.Diff(t, "a value", value{"a"}, value{"a"}) }); f.failed != nil {
		t.Errorf("equal values fail: %q", f.failed)
	}
	f := run(func(t *fakeT) { testkit.Diff(t, "a value", value{"actual"}, value{"expected"}) })
	if f.fatal || len(f.failed) != 1 || !strings.Contains(f.failed[0], "a value differs") {
		t.Fatalf("failures: %q", f.failed)
	}
	// The order of the arguments decides which side has which sign.
	for _, line := range strings.Split(f.failed[0], "\n") {
		if strings.Contains(line, `"expected"`) && !strings.HasPrefix(line, "-") || strings.Contains(line, `"actual"`) && !strings.HasPrefix(line, "+") {
			t.Errorf("wrong sign: %q", line)
		}
	}
}

func TestGolden(t *testing.T) {
	file := filepath.Join(t.TempDir(), "testdata", "x.golden")
	wantFatal(t, run(func(t *fakeT) { testkit.Golden(t, file, []byte("text\n")) }), "-update")
	defer flag.Set("update", fmt.Sprint(testkit.Update()))
	flag.Set("update", "true")
	testkit.Golden(t, file, []byte("text\n"))
	flag.Set("update", "false")
	if b, err := os.ReadFile(file); err != nil || string(b) != "text\n" {
		t.Fatalf("%q, %v", b, err)
	}
	testkit.Golden(t, file, []byte("text\n"))
	if f := run(func(t *fakeT) { testkit.Golden(t, file, []byte("other\n")) }); len(f.failed) != 1 || !strings.Contains(f.failed[0], "-update") {
		t.Errorf("failures: %q", f.failed)
	}
}

func TestLog(t *testing.T) {
	var l *testkit.Log
	f := run(func(t *fakeT) {
		l = testkit.NewLog(t)
		var all sync.WaitGroup
		for i := range 4 {
			all.Go(func() { l.Logger().Debug("line", "n", i) })
		}
		l.Await("n=3")
		all.Wait()
	})
	l.Logger().Info("after the end")
	if strings.Count(l.String(), "msg=line") != 4 || !l.Contains("after the end") || l.Contains("missing") {
		t.Errorf("log: %s", l)
	}
	if out := f.output.String(); strings.Count(out, "msg=line") != 4 || strings.Contains(out, "after") {
		t.Errorf("output of the test: %s", out)
	}
	synctest.Test(t, func(t *testing.T) {
		wantFatal(t, run(func(t *fakeT) { testkit.NewLog(t).Await("missing") }), "missing")
	})
}

func TestZombieIsNotAlive(t *testing.T) {
	if !testkit.Alive(os.Getpid()) {
		t.Error("the test itself is not alive")
	}
	cmd := exec.Command("true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the process has ended", func() bool { return !testkit.Alive(cmd.Process.Pid) })
	if err := cmd.Wait(); err != nil { // before this it was a zombie
		t.Error(err)
	}
	if testkit.Alive(cmd.Process.Pid) {
		t.Error("a process that is gone is alive")
	}
}

func TestFreePort(t *testing.T) {
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", testkit.FreePort(t)))
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
}

type body struct {
	io.Reader
	closed bool
}

func (b *body) Close() error { b.closed = true; return nil }

func TestBody(t *testing.T) {
	b := &body{Reader: strings.NewReader("text")}
	if got := testkit.Body(t, &http.Response{Body: b}); got != "text" || !b.closed {
		t.Errorf("%q, closed: %v", got, b.closed)
	}
	broken := io.MultiReader(strings.NewReader("text"), readerFunc(func([]byte) (int, error) { return 0, errors.New("broken") }))
	wantFatal(t, run(func(t *fakeT) { testkit.Body(t, &http.Response{Body: &body{Reader: broken}}) }), "4 bytes", "broken")
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }
