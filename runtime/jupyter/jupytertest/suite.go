package jupytertest

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/jupyter"
	"github.com/doze-run/doze/runtime/jupyter/zmtp"
	"github.com/doze-run/doze/testkit"
)

// Ports returns free ports of the loopback.
func Ports(t testing.TB) jupyter.Ports {
	t.Helper()
	port := func() uint16 { return uint16(testkit.FreePort(t)) }
	return jupyter.Ports{Shell: port(), IOPub: port(), Stdin: port(), Control: port(), Heartbeat: port()}
}

// Dial connects to a port of the loopback.
func Dial(ctx context.Context, port uint16) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
}

// Connect connects to a kernel on the loopback that is being started.
func Connect(t testing.TB, c jupyter.Connection) *jupyter.Kernel {
	t.Helper()
	return ConnectBy(t, c, Dial)
}

// ConnectBy connects to a kernel that is being started.
func ConnectBy(t testing.TB, c jupyter.Connection, dial jupyter.Dial) *jupyter.Kernel {
	t.Helper()
	var k *jupyter.Kernel
	testkit.Eventually(t, "the kernel listens", func() bool {
		var err error
		k, err = jupyter.Connect(testkit.Context(t), c, dial, zmtp.Limits{})
		if err != nil && !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatal(err)
		}
		return err == nil
	})
	t.Cleanup(k.Close)
	return k
}

// Run runs the suite. open returns a kernel of its own for each test.
func Run(t *testing.T, code Code, open func(t *testing.T) *jupyter.Kernel) {
	for name, test := range map[string]func(*testing.T, *jupyter.Kernel, Code){
		"ValueOfTheLastExpressionIsTheResult": value,
		"OutputHasItsStream":                  output,
		"StatePersists":                       state,
		"ExceptionEndsTheCode":                exception,
		"InterruptEndsALoop":                  interrupt,
		"DiscardedCodeDelaysTheNext":          discarded,
		"OutputBeyondTheLimitIsDropped":       flood,
		"ValueHasEveryForm":                   display,
	} {
		t.Run(name, func(t *testing.T) { test(t, open(t), code) })
	}
}

// Execute executes code and returns its events. The last is jupyter.Complete.
func Execute(t testing.TB, k *jupyter.Kernel, code string) []jupyter.Event {
	t.Helper()
	return Code{}.execute(t, k, code)
}

func (c Code) execute(t testing.TB, k *jupyter.Kernel, code string) []jupyter.Event {
	t.Helper()
	return collect(t, c.begin(t, k, code))
}

func (c Code) begin(t testing.TB, k *jupyter.Kernel, code string) *jupyter.Execution {
	t.Helper()
	x, err := k.Execute(testkit.Context(t), code, jupyter.Options{Limit: 1 << 20, Flush: c.Flush})
	testkit.NoError(t, "Execute", err)
	return x
}

func collect(t testing.TB, x *jupyter.Execution) (events []jupyter.Event) {
	t.Helper()
	for {
		ev, err := x.Next(testkit.Context(t))
		testkit.NoError(t, "Next", err)
		events = append(events, ev)
		if ev.Kind == jupyter.Complete {
			return events
		}
	}
}

// form returns a form of the only result.
func form(t testing.TB, events []jupyter.Event, mime string) (text string) {
	t.Helper()
	for _, ev := range events {
		if ev.Kind == jupyter.Failed {
			t.Fatalf("the code failed: %+v", *ev.Error)
		}
		if ev.Kind == jupyter.Result {
			if err := json.Unmarshal(ev.Result.Data[mime], &text); err != nil {
				t.Fatalf("%s of %s: %v", mime, ev.Result.Data, err)
			}
			return text
		}
	}
	t.Fatalf("no result in %+v", events)
	return ""
}

func text(events []jupyter.Event, kind jupyter.Kind) string {
	var b strings.Builder
	for _, ev := range events {
		if ev.Kind == kind {
			b.WriteString(ev.Text)
		}
	}
	return b.String()
}

func value(t *testing.T, k *jupyter.Kernel, code Code) {
	for count := range 20 {
		events := code.execute(t, k, code.Value)
		if got := form(t, events, "text/plain"); got != "2" || !events[0].Result.Main {
			t.Errorf("got %q, main %v", got, events[0].Result.Main)
		}
		if last := events[len(events)-1]; last.Count != count+1 || last.Truncated {
			t.Errorf("%+v after %d executions", last, count+1)
		}
	}
}

func output(t *testing.T, k *jupyter.Kernel, code Code) {
	events := code.execute(t, k, code.Print)
	if stdout, stderr := text(events, jupyter.Stdout), text(events, jupyter.Stderr); stdout != "out\n" || stderr != "err\n" {
		t.Errorf("stdout %q, stderr %q", stdout, stderr)
	}
}

func state(t *testing.T, k *jupyter.Kernel, code Code) {
	code.execute(t, k, code.Set)
	if got := form(t, code.execute(t, k, code.Get), "text/plain"); got != "7" {
		t.Errorf("got %q", got)
	}
}

func exception(t *testing.T, k *jupyter.Kernel, code Code) {
	events := code.execute(t, k, code.Raise)
	if events[0].Kind != jupyter.Failed {
		t.Fatalf("%+v", events)
	}
	e := events[0].Error
	trace := strings.Join(e.Traceback, "\n")
	if e.Name != code.Error || e.Message != "broken" || !strings.Contains(trace, "broken") || strings.Contains(trace, "\x1b") {
		t.Errorf("%+v", *e)
	}
	if got := form(t, code.execute(t, k, code.Value), "text/plain"); got != "2" {
		t.Errorf("the next value is %q", got)
	}
}

func interrupt(t *testing.T, k *jupyter.Kernel, code Code) {
	x := code.begin(t, k, code.Loop)
	if ev, err := x.Next(testkit.Context(t)); err != nil || ev.Text != "on\n" {
		t.Fatalf("%+v, error %v", ev, err)
	}
	testkit.NoError(t, "Interrupt", k.Interrupt(testkit.Context(t)))
	if events := collect(t, x); events[0].Kind != jupyter.Failed || events[0].Error.Name != code.Interrupt {
		t.Errorf("%+v", events)
	}
	code.execute(t, k, code.Set)
	if got := form(t, code.execute(t, k, code.Get), "text/plain"); got != "7" {
		t.Errorf("got %q", got)
	}
}

func discarded(t *testing.T, k *jupyter.Kernel, code Code) {
	x := code.begin(t, k, code.Loop)
	_, err := x.Next(testkit.Context(t))
	testkit.NoError(t, "Next", err)
	x.Discard()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := k.Execute(ctx, code.Value, jupyter.Options{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("during the loop: %v", err)
	}
	testkit.NoError(t, "Interrupt", k.Interrupt(testkit.Context(t)))
	code.execute(t, k, code.Set)
	if got := form(t, code.execute(t, k, code.Get), "text/plain"); got != "7" {
		t.Errorf("got %q", got)
	}
}

func flood(t *testing.T, k *jupyter.Kernel, code Code) {
	const limit = 256 << 10
	x, err := k.Execute(testkit.Context(t), code.Flood, jupyter.Options{Limit: limit, Flush: code.Flush})
	testkit.NoError(t, "Execute", err)
	testkit.Closed(t, "the end of the code", x.Done())
	events := collect(t, x)
	if got := len(text(events, jupyter.Stdout)); got > limit || got < limit/2 {
		t.Errorf("%d bytes with a limit of %d", got, limit)
	}
	if !events[len(events)-1].Truncated {
		t.Error("not reported as truncated")
	}
}

func display(t *testing.T, k *jupyter.Kernel, code Code) {
	if got := form(t, code.execute(t, k, code.Display), "text/html"); got != "<b>rich</b>" {
		t.Errorf("got %q", got)
	}
}
