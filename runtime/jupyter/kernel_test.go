package jupyter_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/time/rate"

	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/runtime/jupyter"
	"github.com/doze-run/doze/runtime/jupyter/jupytertest"
	"github.com/doze-run/doze/runtime/jupyter/zmtp"
	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// serve starts a fake kernel, which ends with the test.
func serve(t *testing.T) jupyter.Connection {
	c := jupyter.NewConnection(jupytertest.Ports(t))
	serveKernel(t, jupytertest.New(c))
	return c
}

func serveKernel(t *testing.T, k *jupytertest.Kernel) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- k.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) && !errors.Is(err, jupytertest.ErrExit) {
			t.Error(err)
		}
	})
}

func TestFakeKernelConforms(t *testing.T) {
	jupytertest.Run(t, jupytertest.Fake, func(t *testing.T) *jupyter.Kernel { return jupytertest.Connect(t, serve(t)) })
}

func TestFakeKernelWithFlushConforms(t *testing.T) {
	code := jupytertest.Fake
	code.Flush = jupyter.FlushDeno
	jupytertest.Run(t, code, func(t *testing.T) *jupyter.Kernel { return jupytertest.Connect(t, serve(t)) })
}

func TestOutputAfterTheEndOfCodeIsOfThatCode(t *testing.T) {
	k := jupytertest.Connect(t, serve(t))
	for _, want := range []string{`"1"`, `"2"`} {
		x, err := k.Execute(testkit.Context(t), "late "+strings.Trim(want, `"`), jupyter.Options{Limit: 1 << 10, Flush: jupyter.FlushDeno})
		testkit.NoError(t, "Execute", err)
		ev, err := x.Next(testkit.Context(t))
		if err != nil || ev.Kind != jupyter.Result || string(ev.Result.Data["text/plain"]) != want {
			t.Errorf("%+v, error %v; want the value %s", ev, err, want)
		}
		ev, err = x.Next(testkit.Context(t))
		if err != nil || ev.Kind != jupyter.Complete || ev.Truncated {
			t.Errorf("%+v, error %v; want the end", ev, err)
		}
	}
}

func TestLostKernelEndsTheExecution(t *testing.T) {
	k := jupytertest.Connect(t, serve(t))
	x, err := k.Execute(t.Context(), "print before\nexit", jupyter.Options{Limit: 1 << 10})
	testkit.NoError(t, "Execute", err)
	if ev, err := x.Next(testkit.Context(t)); err != nil || ev.Text != "before\n" {
		t.Errorf("%+v, error %v", ev, err)
	}
	_, err = x.Next(testkit.Context(t))
	testkit.ErrorIs(t, "Next", err, jupyter.ErrLost)
	_, err = k.Execute(t.Context(), "value 2", jupyter.Options{})
	testkit.ErrorIs(t, "Execute", err, jupyter.ErrLost)
}

func TestSecondClientFindsTheStateOfTheFirst(t *testing.T) {
	c := serve(t)
	first := jupytertest.Connect(t, c)
	jupytertest.Execute(t, first, "set x 7")
	first.Close()
	events := jupytertest.Execute(t, jupytertest.Connect(t, c), "get x")
	if got := string(events[0].Result.Data["text/plain"]); got != `"7"` {
		t.Errorf("got %s", got)
	}
}

// A rate of nearly nothing: its burst is only used up.
func TestAllMessagesCountInTheRate(t *testing.T) {
	const burst = 8 << 20
	c := serve(t)
	limiter := rate.NewLimiter(1e-6, burst)
	jupytertest.Connect(t, c) // listens
	k, err := jupyter.Connect(testkit.Context(t), c, jupytertest.Dial, zmtp.Limits{Rate: limiter})
	testkit.NoError(t, "Connect", err)
	defer k.Close()
	before := limiter.Tokens()
	jupytertest.Execute(t, k, "empty 500")
	if used := before - limiter.Tokens(); used < 500*zmtp.MessageCost {
		t.Errorf("500 small messages counted %.0f", used)
	}
	before = limiter.Tokens()
	jupytertest.Execute(t, k, "big 1000000")
	if used := before - limiter.Tokens(); used < 1_000_000 {
		t.Errorf("a message of 1 MB counted %.0f", used)
	}
	before = limiter.Tokens()
	testkit.NoError(t, "Interrupt", jupyter.Interrupt(testkit.Context(t), c, jupytertest.Dial, zmtp.Limits{Rate: limiter}))
	if used := before - limiter.Tokens(); used < zmtp.MessageCost {
		t.Errorf("the reply to an interrupt counted %.0f", used)
	}
}

func TestMessageBeyondTheBudgetIsDropped(t *testing.T) {
	c := serve(t)
	budget := quota.New(512 << 10)
	jupytertest.Connect(t, c) // listens
	k, err := jupyter.Connect(testkit.Context(t), c, jupytertest.Dial, zmtp.Limits{Memory: budget})
	testkit.NoError(t, "Connect", err)
	defer k.Close()
	for _, size := range []struct {
		code      string
		truncated bool
	}{{"big 300000", false}, {"big 600000", true}, {"big 300000", false}} {
		x, err := k.Execute(t.Context(), size.code, jupyter.Options{Limit: 1 << 20})
		testkit.NoError(t, "Execute", err)
		results := 0
		for {
			ev, err := x.Next(testkit.Context(t))
			testkit.NoError(t, "Next", err)
			if ev.Kind == jupyter.Result {
				results++
			}
			if ev.Kind == jupyter.Complete {
				if ev.Truncated != size.truncated || (results == 0) != size.truncated {
					t.Errorf("%s: %+v with %d results", size.code, ev, results)
				}
				break
			}
		}
	}
	k.Close()
	if used := budget.Used(); used != 0 {
		t.Errorf("%d bytes are still in use", used)
	}
}

func TestInterruptReleasesTheBudget(t *testing.T) {
	c := jupyter.NewConnection(jupytertest.Ports(t))
	fake := jupytertest.New(c)
	fake.InterruptReply = fmt.Sprintf(`{"status":%q}`, strings.Repeat("x", 1<<20))
	serveKernel(t, fake)
	jupytertest.Connect(t, c) // listens
	budget := quota.New(2 << 20)
	for range 4 {
		testkit.NoError(t, "Interrupt", jupyter.Interrupt(testkit.Context(t), c, jupytertest.Dial, zmtp.Limits{Memory: budget}))
	}
	if used := budget.Used(); used != 0 {
		t.Errorf("%d bytes are still in use", used)
	}
}

func TestInterruptOfEndedCodeDoesNotReachTheNext(t *testing.T) {
	c := jupyter.NewConnection(jupytertest.Ports(t))
	fake := jupytertest.New(c)
	serveKernel(t, fake)
	k := jupytertest.Connect(t, c)
	first, err := k.Execute(testkit.Context(t), "print x", jupyter.Options{Limit: 1 << 10})
	testkit.NoError(t, "Execute", err)
	testkit.Closed(t, "the end of the code", first.Done())
	second, err := k.Execute(testkit.Context(t), "print on\nwait", jupyter.Options{Limit: 1 << 10})
	testkit.NoError(t, "Execute", err)
	_, err = second.Next(testkit.Context(t))
	testkit.NoError(t, "Next", err)
	testkit.NoError(t, "Interrupt", first.Interrupt(testkit.Context(t)))
	if n := fake.Interrupts.Load(); n != 0 {
		t.Errorf("%d interrupts arrived", n)
	}
	testkit.NoError(t, "Interrupt", second.Interrupt(testkit.Context(t)))
	testkit.Closed(t, "the end of the code", second.Done())
}

func TestCodeThatHandlesAnInterruptHasNotFailed(t *testing.T) {
	k := jupytertest.Connect(t, serve(t))
	x, err := k.Execute(testkit.Context(t), "print on\nwait\nvalue 2", jupyter.Options{Limit: 1 << 10})
	testkit.NoError(t, "Execute", err)
	_, err = x.Next(testkit.Context(t))
	testkit.NoError(t, "Next", err)
	testkit.NoError(t, "Interrupt", x.Interrupt(testkit.Context(t)))
	for _, want := range []jupyter.Kind{jupyter.Result, jupyter.Complete} {
		if ev, err := x.Next(testkit.Context(t)); err != nil || ev.Kind != want {
			t.Errorf("%+v, error %v; want an event of kind %d", ev, err, want)
		}
	}
}

func TestShortTextDoesNotRetainItsMessage(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	for kind, content := range map[string]string{
		"display_data": `{"data":{},"transient":{"display_id":"` + long + `"}}`,
		"error":        `{"ename":"` + long + `","evalue":"","traceback":["a\n` + long + `"]}`,
	} {
		before := heap()
		events, err := jupyter.Publications(1<<20, kind, []byte(content), 10)
		testkit.NoError(t, kind, err)
		if grown := heap() - before; grown > 4<<20 {
			t.Errorf("%d events %s retain %d bytes", len(events), kind, grown)
		}
		runtime.KeepAlive(events)
	}
}

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func TestEntriesBeyondTheBoundsAreNotDecoded(t *testing.T) {
	var forms, lines strings.Builder
	for i := range 200_000 {
		fmt.Fprintf(&forms, `"%d":0,`, i)
		lines.WriteString(`"",`)
	}
	before := heapAllocated()
	_, err := jupyter.Publications(1<<20, "display_data", []byte(`{"data":{`+forms.String()+`"":0}}`), 1)
	testkit.ErrorIs(t, "too many forms", err, jupyter.ErrMalformed)
	_, err = jupyter.Publications(1<<20, "display_data", []byte(`{"data":{"`+strings.Repeat("x", 257)+`":0}}`), 1)
	testkit.ErrorIs(t, "a long name", err, jupyter.ErrMalformed)
	_, err = jupyter.Publications(1<<20, "display_data", []byte(`{"data":[]}`), 1)
	testkit.ErrorIs(t, "an array", err, jupyter.ErrMalformed)
	events, err := jupyter.Publications(1<<20, "error", []byte(`{"traceback":[`+lines.String()+`""]}`), 1)
	testkit.NoError(t, "traceback", err)
	if n := len(events[0].Error.Traceback); n != 1000 {
		t.Errorf("%d lines", n)
	}
	if grown := heapAllocated() - before; grown > 16<<20 {
		t.Errorf("decoding has allocated %d bytes", grown)
	}
}

// heapAllocated counts all allocations since the start.
func heapAllocated() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.TotalAlloc
}

func TestKernelWithAnotherKeyIsRefused(t *testing.T) {
	c := serve(t)
	jupytertest.Connect(t, c)
	c.Key = "another"
	_, err := jupyter.Connect(testkit.Context(t), c, jupytertest.Dial, zmtp.Limits{})
	testkit.ErrorIs(t, "Connect", err, jupyter.ErrLost) // a kernel drops it
}

func TestSignatureCoversEveryPart(t *testing.T) {
	key := jupyter.Signer("key")
	message := jupyter.Message{
		Header: jupyter.NewHeader("1", "s", "stream"), Parent: jupyter.NewHeader("0", "s", "execute_request"), Content: json.RawMessage(`{"text":"x"}`),
	}
	encode := func() [][]byte {
		frames, err := key.Encode(message)
		testkit.NoError(t, "Encode", err)
		return append([][]byte{[]byte("identity")}, frames...)
	}
	got, identities, err := key.Decode(encode())
	testkit.NoError(t, "Decode", err)
	testkit.Diff(t, "message", got, message)
	if len(identities) != 1 || string(identities[0]) != "identity" {
		t.Errorf("identities %q", identities)
	}
	for i := 2; i < 7; i++ {
		frames := encode()
		frames[i] = append([]byte(" "), frames[i]...)
		_, _, err := key.Decode(frames)
		testkit.ErrorIs(t, "Decode", err, jupyter.ErrSignature)
	}
	frames := encode()
	_, _, err = key.Decode(frames[:6])
	testkit.ErrorIs(t, "Decode", err, jupyter.ErrMalformed)
}

// No publication of a kernel breaks the client, and the client holds a bounded part of it.
func FuzzPublications(f *testing.F) {
	for _, seed := range []struct{ kind, content string }{
		{"stream", `{"name":"stdout","text":"x"}`},
		{"stream", "{\"name\":\"stderr\",\"text\":\"\xff\"}"},
		{"display_data", `{"data":{"image/png":"aGk=\n","application/json":{"a":[1]}},"metadata":{"m":1},"transient":{"display_id":"d"}}`},
		{"execute_result", `{"data":null}`},
		{"error", `{"ename":"E","evalue":"v","traceback":["\u001b[31ma\nb"]}`},
		{"clear_output", `{"wait":true}`},
		{"display_data", `{"data":{"image/png":"\\n","image/svg+xml":"\n<svg\n>"}}`},
		{"error", `{"traceback":[1]}`},
		{"display_data", `{"data":{"a":`},
		{"status", `{"execution_state":"idle"}`},
	} {
		f.Add(seed.kind, []byte(seed.content))
	}
	f.Fuzz(func(t *testing.T, kind string, content []byte) {
		const limit = 4 << 10
		events, err := jupyter.Publications(limit, kind, content, 3)
		if err != nil && !errors.Is(err, jupyter.ErrMalformed) {
			t.Fatalf("error %v", err)
		}
		size := 0
		for _, ev := range events {
			b, err := json.Marshal(ev)
			if err != nil {
				t.Fatalf("%+v: %v", ev, err)
			}
			if ev.Error != nil && strings.Contains(strings.Join(ev.Error.Traceback, ""), "\x1b[31m") {
				t.Errorf("colors in %q", ev.Error.Traceback)
			}
			if ev.Kind != jupyter.Failed {
				size += len(b) / 6 // of an escaped byte
			}
		}
		if size > limit {
			t.Errorf("%d bytes are held", size)
		}
	})
}
