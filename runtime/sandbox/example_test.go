package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"slices"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/guesttest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
)

// Create makes a sandbox once: another call with the same owner and name returns it.
func ExampleManager_Create() {
	node, stop := start()
	defer stop()
	ctx := context.Background()

	for range 2 {
		sb, created, err := node.Manager.Create(ctx, sandbox.CreateRequest{Owner: "alice", Name: "app"})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(sb.Name, sb.State, created)
	}
	// Output:
	// app running true
	// app running false
}

// Acquire wakes a sleeping sandbox. The Lease keeps it awake until Release.
func ExampleManager_Acquire() {
	node, stop := start()
	defer stop()
	ctx := context.Background()
	sb, _, err := node.Manager.Create(ctx, sandbox.CreateRequest{Owner: "alice", Name: "app"})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := node.Manager.Sleep(ctx, sb.ID); err != nil {
		log.Fatal(err)
	}

	lease, err := node.Manager.Acquire(ctx, sb.ID, sandbox.CauseExec)
	if err != nil {
		log.Fatal(err)
	}
	defer lease.Release()
	out, err := guesttest.Run(ctx, lease.Guest(), guest.ExecRequest{Command: guest.Command{Command: "echo hello"}})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s wake: %s", lease.Wake().Kind, out.Stdout)
	_, err = node.Manager.Sleep(ctx, sb.ID)
	fmt.Println(errors.Is(err, sandbox.ErrBusy))
	// Output:
	// warm wake: hello
	// true
}

// Dial connects to a TCP port on the sandbox's loopback. Here the sandbox runs in the
// example's process, and so does the server in it.
func ExampleLease_Dial() {
	node, stop := start()
	defer stop()
	ctx := context.Background()
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	go func() { // ended by its only connection
		conn, err := server.Accept()
		if err != nil {
			return
		}
		io.WriteString(conn, "hello from the sandbox")
		conn.Close()
	}()
	sb, _, err := node.Manager.Create(ctx, sandbox.CreateRequest{Owner: "alice", Name: "app"})
	if err != nil {
		log.Fatal(err)
	}

	lease, err := node.Manager.Acquire(ctx, sb.ID, sandbox.CausePreview)
	if err != nil {
		log.Fatal(err)
	}
	defer lease.Release()
	conn, err := lease.Dial(ctx, uint16(server.Addr().(*net.TCPAddr).Port))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	text, err := io.ReadAll(conn)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(text))
	// Output: hello from the sandbox
}

// start is sandboxtest.Open for Example functions, which have no testing.TB. It panics where a test
// would fail; stop releases everything.
func start() (n *sandboxtest.Node, stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	e := &example{ctx: ctx}
	return sandboxtest.Open(e, nil), func() {
		cancel()
		for _, f := range slices.Backward(e.cleanups) {
			f()
		}
	}
}

// example has the methods of a testing.TB that package sandboxtest calls.
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
