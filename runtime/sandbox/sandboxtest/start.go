package sandboxtest

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"testing"
)

// Start is Open for Example functions, which have no testing.TB. It panics where a test
// would fail; stop releases everything.
func Start() (n *Node, stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	e := &example{ctx: ctx}
	return Open(e, nil), func() {
		cancel()
		for _, f := range slices.Backward(e.cleanups) {
			f()
		}
	}
}

// example has the methods of a testing.TB that this package calls.
type example struct {
	testing.TB
	ctx      context.Context
	cleanups []func()
}

func (e *example) Helper()                           {}
func (e *example) Context() context.Context          { return e.ctx }
func (e *example) Output() io.Writer                 { return io.Discard }
func (e *example) Cleanup(f func())                  { e.cleanups = append(e.cleanups, f) }
func (e *example) Error(args ...any)                 { panic(fmt.Sprint(args...)) }
func (e *example) Errorf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (e *example) Fatal(args ...any)                 { panic(fmt.Sprint(args...)) }
func (e *example) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

func (e *example) TempDir() string {
	dir, err := os.MkdirTemp("", "doze")
	if err != nil {
		panic(err)
	}
	e.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}
