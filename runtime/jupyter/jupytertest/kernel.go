// Package jupytertest has a kernel for tests and the conformance suite that it and real
// kernels pass.
package jupytertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/jupyter"
	"github.com/doze-run/doze/runtime/jupyter/zmtp"
)

// Code is what the suite executes, in the language of a kernel.
type Code struct {
	Value string // a last expression whose text/plain is 2
	Print string // prints "out" and a newline to stdout, then "err" and a newline to stderr
	Set   string // sets a variable to 7
	Get   string // a last expression with that variable
	Raise string // raises an exception of type Error with the message "broken"
	Error string // name of that exception
	// Interrupt is the name of the exception of interrupted code.
	Interrupt string
	Loop      string // prints "on" and a newline, and does not end
	Flood     string // prints 4 MiB
	Display   string // a value with text/html "<b>rich</b>"
	// Flush is the field of jupyter.Options.
	Flush func(messageType string) string
}

// Fake is the code of the fake kernel: one instruction a line. Other instructions are: "exit",
// "clear", "env NAME", "cwd", "big N", a value of N bytes, "late VALUE", a value that is published
// with the next request as its parent, "wait", which an interrupt ends without an exception, "empty N", N
// values without forms, and the code of jupyter.FlushDeno.
var Fake = Code{
	Value: "value 2", Print: "print out\nwarn err", Set: "set x 7", Get: "get x", Raise: "raise Error broken", Error: "Error",
	Interrupt: "KeyboardInterrupt", Loop: "print on\nloop", Flood: "flood 4194304", Display: "show text/html <b>rich</b>",
}

// Kernel is a fake kernel.
type Kernel struct {
	conn  jupyter.Connection
	key   jupyter.Signer
	exit  context.CancelCauseFunc
	vars  map[string]string
	count int
	late  func(next request) // publishes what the code before has left
	// Getenv and Getwd stand for the process.
	Getenv func(string) string
	Getwd  func() (string, error)
	// InterruptReply is the content of the replies to interrupts. Interrupts counts them.
	InterruptReply string
	Interrupts     atomic.Int32

	mu          sync.Mutex // guards:
	subscribers []*zmtp.Conn
	interrupt   context.CancelFunc // of the code that is executed
}

// ErrExit is the cause with which Serve ends after the instruction exit.
var ErrExit = errors.New("exit")

// New returns a fake kernel.
func New(c jupyter.Connection) *Kernel {
	return &Kernel{conn: c, key: jupyter.Signer(c.Key), vars: map[string]string{}, InterruptReply: `{"status":"ok"}`}
}

// Serve listens on the kernel's ports until ctx ends or the code requests the exit.
func (k *Kernel) Serve(ctx context.Context) error {
	ctx, k.exit = context.WithCancelCause(ctx)
	defer k.exit(nil)
	requests := make(chan request)
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, port := range []struct {
		number uint16
		socket zmtp.Socket
		serve  func(context.Context, *zmtp.Conn)
	}{
		{k.conn.Shell, zmtp.Router, func(ctx context.Context, c *zmtp.Conn) { k.serveShell(ctx, c, requests) }},
		{k.conn.Control, zmtp.Router, k.serveControl},
		{k.conn.IOPub, zmtp.Publish, k.servePublications},
	} {
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port.number))))
		if err != nil {
			k.exit(nil)
			return err
		}
		context.AfterFunc(ctx, func() { l.Close() })
		wg.Go(func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				wg.Go(func() {
					c, err := zmtp.Open(ctx, conn, port.socket, zmtp.Limits{})
					if err != nil {
						return
					}
					defer context.AfterFunc(ctx, func() { c.Close() })()
					defer c.Close()
					port.serve(ctx, c)
				})
			}
		})
	}
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case r := <-requests:
			k.handle(ctx, r)
		}
	}
}

// request is a message on the shell.
type request struct {
	jupyter.Message
	from *zmtp.Conn
}

func (k *Kernel) serveShell(ctx context.Context, c *zmtp.Conn, requests chan<- request) {
	for {
		m, ok := k.receive(c)
		if !ok {
			return
		}
		select {
		case requests <- request{m, c}:
		case <-ctx.Done():
			return
		}
	}
}

func (k *Kernel) receive(c *zmtp.Conn) (jupyter.Message, bool) {
	frames, err := c.Read()
	if err != nil {
		return jupyter.Message{}, false
	}
	m, _, err := k.key.Decode(frames)
	return m, err == nil
}

func (k *Kernel) serveControl(ctx context.Context, c *zmtp.Conn) {
	for {
		m, ok := k.receive(c)
		if !ok {
			return
		}
		k.Interrupts.Add(1)
		k.mu.Lock()
		if k.interrupt != nil {
			k.interrupt()
		}
		k.mu.Unlock()
		k.send(ctx, c, nil, m, "interrupt_reply", k.InterruptReply)
	}
}

// servePublications waits for the subscription, and serves the subscriber until it leaves.
func (k *Kernel) servePublications(_ context.Context, c *zmtp.Conn) {
	if _, err := c.Read(); err != nil {
		return
	}
	k.mu.Lock()
	k.subscribers = append(k.subscribers, c)
	k.mu.Unlock()
	_, _ = c.Read() // fails when the subscriber leaves
}

func (k *Kernel) send(ctx context.Context, c *zmtp.Conn, prefix [][]byte, parent jupyter.Message, kind, content string) {
	frames, err := k.key.Encode(jupyter.Message{Header: jupyter.NewHeader(fmt.Sprintf("%p-%s", c, kind), "kernel", kind), Parent: parent.Header, Content: []byte(content)})
	if err == nil {
		_ = c.Write(ctx, append(prefix, frames...)...)
	}
}

func (k *Kernel) publish(ctx context.Context, parent jupyter.Message, kind string, content any) {
	b, err := json.Marshal(content)
	if err != nil {
		panic(err)
	}
	k.mu.Lock()
	subscribers := k.subscribers
	k.mu.Unlock()
	for _, c := range subscribers {
		k.send(ctx, c, [][]byte{[]byte("kernel." + kind)}, parent, kind, string(b))
	}
}

type object = map[string]any

func (k *Kernel) handle(ctx context.Context, r request) {
	k.publish(ctx, r.Message, "status", object{"execution_state": "busy"})
	switch r.Header.Type {
	case "kernel_info_request":
		k.send(ctx, r.from, nil, r.Message, "kernel_info_reply", `{"status":"ok"}`)
	case "execute_request":
		k.execute(ctx, r)
	}
	k.publish(ctx, r.Message, "status", object{"execution_state": "idle"})
}

func (k *Kernel) execute(ctx context.Context, r request) {
	var content struct {
		Code   string
		Silent bool
	}
	if err := json.Unmarshal(r.Content, &content); err != nil {
		return
	}
	runCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	k.mu.Lock()
	k.interrupt = cancel
	k.mu.Unlock()
	if k.late != nil {
		k.late(r)
		k.late = nil
	}
	if !content.Silent {
		k.count++
	}
	status := "ok"
	for line := range strings.SplitSeq(content.Code, "\n") {
		if err := k.instruction(ctx, runCtx, r.Message, line); err != nil {
			name, message, _ := strings.Cut(err.Error(), " ")
			k.publish(ctx, r.Message, "error", object{"ename": name, "evalue": message, "traceback": []string{"\x1b[31mTraceback\x1b[0m\n  line 1", err.Error()}})
			status = "error"
			break
		}
		if ctx.Err() != nil {
			return
		}
	}
	k.send(ctx, r.from, nil, r.Message, "execute_reply", fmt.Sprintf(`{"status":%q,"execution_count":%d}`, status, k.count))
}

// instruction executes a line. Its error is the name and the message of an exception.
func (k *Kernel) instruction(ctx, runCtx context.Context, m jupyter.Message, line string) error {
	if _, call, ok := strings.Cut(line, "Deno.jupyter.broadcast(\""); ok {
		messageType, _, _ := strings.Cut(call, `"`)
		k.publish(ctx, m, messageType, object{})
		return nil
	}
	op, arg, _ := strings.Cut(line, " ")
	value := func(data object) {
		k.publish(ctx, m, "execute_result", object{"data": data, "metadata": object{}, "execution_count": k.count})
	}
	stream := func(name, text string) { k.publish(ctx, m, "stream", object{"name": name, "text": text}) }
	switch op {
	case "":
	case "value":
		value(object{"text/plain": arg})
	case "late":
		k.late = func(next request) {
			k.publish(ctx, next.Message, "execute_result", object{"data": object{"text/plain": arg}, "metadata": object{}, "execution_count": k.count})
		}
	case "print":
		stream("stdout", arg+"\n")
	case "warn":
		stream("stderr", arg+"\n")
	case "set":
		name, v, _ := strings.Cut(arg, " ")
		k.vars[name] = v
	case "get":
		v, ok := k.vars[arg]
		if !ok {
			return fmt.Errorf("NameError name %s is not defined", arg)
		}
		value(object{"text/plain": v})
	case "env":
		value(object{"text/plain": k.Getenv(arg)})
	case "cwd":
		dir, err := k.Getwd()
		if err != nil {
			return err
		}
		value(object{"text/plain": dir})
	case "raise":
		return errors.New(arg)
	case "loop":
		select {
		case <-runCtx.Done():
			return errors.New("KeyboardInterrupt")
		case <-ctx.Done():
		}
	case "wait":
		select {
		case <-runCtx.Done():
		case <-ctx.Done():
		}
	case "empty":
		n, _ := strconv.Atoi(arg)
		for range n {
			k.publish(ctx, m, "display_data", object{})
		}
	case "flood":
		n, _ := strconv.Atoi(arg)
		for ; n > 0; n -= 8 << 10 {
			stream("stdout", strings.Repeat("x", min(n, 8<<10)))
		}
	case "show":
		mime, data, _ := strings.Cut(arg, " ")
		k.publish(ctx, m, "display_data", object{"data": object{mime: data, "text/plain": "rich"}, "metadata": object{}, "transient": object{"display_id": "d1"}})
	case "update":
		k.publish(ctx, m, "update_display_data", object{"data": object{"text/plain": arg}, "metadata": object{}, "transient": object{"display_id": "d1"}})
	case "clear":
		k.publish(ctx, m, "clear_output", object{"wait": arg == "wait"})
	case "big":
		n, _ := strconv.Atoi(arg)
		value(object{"text/plain": strings.Repeat("x", n)})
	case "exit":
		k.exit(ErrExit)
		<-ctx.Done()
	default:
		return fmt.Errorf("SyntaxError unknown instruction %s", op)
	}
	return nil
}

// Install makes programs with the names of interpreters, which are this test's binary. Its
// TestMain calls Main. It returns their folder.
func Install(t testing.TB) string {
	t.Helper()
	binary, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, name := range interpreters {
		if err := os.Symlink(binary, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

var interpreters = []string{"python3", "deno"}

// Main is a fake kernel, if the test's binary was started by the name of an interpreter. Then
// it does not return. With the variable KERNEL_WAIT it first waits until that file exists, with
// KERNEL_EXIT it exits with that code, with KERNEL_EXIT_IF it exits with 2 if that file exists.
func Main() {
	if !slices.Contains(interpreters, filepath.Base(os.Args[0])) {
		return
	}
	i := slices.IndexFunc(os.Args, func(arg string) bool { return arg == "-f" || arg == "--conn" })
	var c jupyter.Connection
	b, err := os.ReadFile(os.Args[i+1])
	if err == nil {
		err = json.Unmarshal(b, &c)
	}
	for path := os.Getenv("KERNEL_WAIT"); err == nil && path != "" && !exists(path); {
		time.Sleep(time.Millisecond)
	}
	if path := os.Getenv("KERNEL_EXIT_IF"); err == nil && path != "" && exists(path) {
		os.Exit(2)
	}
	if err == nil && os.Getenv("KERNEL_EXIT") != "" {
		fmt.Println("unknown option")
		code, _ := strconv.Atoi(os.Getenv("KERNEL_EXIT"))
		os.Exit(code)
	}
	if err == nil {
		k := New(c)
		k.Getenv, k.Getwd = os.Getenv, os.Getwd
		err = k.Serve(context.Background())
	}
	fmt.Fprintln(os.Stderr, err)
	if errors.Is(err, ErrExit) {
		os.Exit(3)
	}
	os.Exit(1)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
