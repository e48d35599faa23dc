// Package testkit holds what tests share: waiting for conditions, comparing,
// golden files, logs, upstream servers, memory figures. Only tests import it.
package testkit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// Patience bounds every wait of a test. It only ends tests that would otherwise
// hang, so it is far longer than anything takes, and decides nothing about speed.
const Patience = 2 * time.Minute

// Main runs the tests of a package and fails if goroutines are left when they end.
func Main(m *testing.M, options ...goleak.Option) { goleak.VerifyTestMain(m, options...) }

// Context returns a context that ends with the test's cleanup, or after Patience.
// Unlike t.Context, it is still usable in the test's own cleanup functions.
func Context(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	t.Cleanup(cancel)
	return ctx
}

// Eventually polls until holds returns true, after 1 ms at first and every 25 ms in the
// end. After Patience it ends the test with what was awaited and the details.
func Eventually(t testing.TB, what string, holds func() bool, detail ...func() string) {
	t.Helper()
	deadline := time.Now().Add(Patience)
	for pause := time.Millisecond; !holds(); pause = min(2*pause, 25*time.Millisecond) {
		if time.Now().After(deadline) {
			fatal(t, "did not happen within "+Patience.String()+": "+what, detail)
		}
		timer := time.NewTimer(pause)
		<-timer.C
	}
}

// Receive returns the next value of a channel. It ends the test after Patience, and
// if the channel is closed.
func Receive[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	v, ok := receive(t, what, c)
	if !ok {
		t.Fatalf("channel closed instead of: %s", what)
	}
	return v
}

// Closed waits until a channel is closed and ends the test after Patience.
func Closed(t testing.TB, what string, c <-chan struct{}) {
	t.Helper()
	for open := true; open; {
		_, open = receive(t, what, c)
	}
}

func receive[T any](t testing.TB, what string, c <-chan T) (v T, ok bool) {
	t.Helper()
	select {
	case v, ok = <-c:
	case <-time.After(Patience):
		t.Fatalf("did not happen within %v: %s", Patience, what)
	}
	return v, ok
}

// NoError ends the test if a call returned an error.
func NoError(t testing.TB, call string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", call, err)
	}
}

// ErrorIs fails the test unless a call returned that error, which may be wrapped.
func ErrorIs(t testing.TB, call string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, want %v", call, err, want)
	}
}

// Stacks returns the stacks of all goroutines, as a detail for Eventually.
func Stacks() string {
	b := make([]byte, 1<<20)
	return string(b[:runtime.Stack(b, true)])
}

// FreePort returns a TCP port of 127.0.0.1 on which nothing listens. It is none of those that
// Linux gives to connections (from 32768 on): a client that tries to connect to it until something
// listens could get it as its own. Another process may take it: bind to port 0 where the
// program under test can report its address.
func FreePort(t testing.TB) int {
	t.Helper()
	for {
		port := 20_000 + rand.IntN(12_000)
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		return port
	}
}

// Alive reports whether a process exists and is not a zombie.
func Alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(after, "Z") && !strings.HasPrefix(after, "X")
}

// Body reads and closes the body of a response.
func Body(t testing.TB, res *http.Response) string {
	t.Helper()
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatalf("read body after %d bytes: %v", len(b), err)
	}
	return string(b)
}

func fatal(t testing.TB, message string, detail []func() string) {
	t.Helper()
	for _, d := range detail {
		message += "\n" + d()
	}
	t.Fatal(message)
}
