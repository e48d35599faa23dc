package policy

import (
	"bytes"
	"errors"
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/tetratelabs/wazero/api"

	. "github.com/doze-run/doze/egress/internal/wat"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/loglimit"
	"github.com/doze-run/doze/testkit"
)

// Traefik's guests log an error and exit.
func TestStartErrorsContainTheGuestsOutput(t *testing.T) {
	m := Handler(imported("log", "wasi_snapshot_preview1.proc_exit"), "loading the list"+"the list is empty", pass, none)
	m.Funcs = append(m.Funcs, Func{Export: "_initialize", Body: Code(
		I32Const(2), I32Const(16), I32Const(17), Call(0), I32Const(0), I32Const(0), I32Const(16), Call(0), I32Const(1), Call(1), End)})
	h := newHost(t, nil)
	_, err := compile(t, h, "list", m.Binary()).Configure(t.Context(), nil)
	var start *StartError
	if !errors.As(err, &start) || !strings.HasSuffix(err.Error(), "it ended itself with code 1: the list is empty") || !strings.Contains(start.Detail, "loading the list") {
		t.Errorf("got %v, with the detail %q", err, start.Detail)
	}
}

func TestStartErrorsAreBounded(t *testing.T) {
	m := Handler(imported("log", "wasi_snapshot_preview1.proc_exit"), strings.Repeat("x", 60_000), pass, none)
	m.Funcs = append(m.Funcs, Func{Export: "_initialize", Body: Code(
		bytes.Repeat(Code(I32Const(2), I32Const(0), I32Const(60_000), Call(0)), 10), I32Const(1), Call(1), End)})
	h := newHost(t, nil)
	_, err := compile(t, h, "long", m.Binary()).Configure(t.Context(), nil)
	var start *StartError
	if !errors.As(err, &start) || len(start.Reason) > maxReason || len(start.Detail) > maxDetail {
		t.Errorf("%d bytes of reason, %d of detail", len(start.Reason), len(start.Detail))
	}
}

func TestLogEnabledReportsLoggedLevels(t *testing.T) {
	// The guest responds with the status 200 plus log_enabled's result for the level.
	ask := func(level int32) []byte {
		return Handler(imported("log_enabled", "set_status_code"), "", Code(I32Const(level), Call(0), I32Const(200), Add, Call(1), stay), none).Binary()
	}
	for _, c := range []struct {
		name string
		log  slog.Level
		line func(policylog.Line)
		want map[int32]int
	}{
		{"a log without debug", slog.LevelInfo, nil, map[int32]int{-2: 0, -1: 0, 0: 1, 1: 1, 2: 1, 3: 0, 4: 0}},
		{"a log of errors", slog.LevelError, nil, map[int32]int{-1: 0, 0: 0, 1: 0, 2: 1, 3: 0}},
		{"a sink for all lines", slog.LevelError, func(policylog.Line) {}, map[int32]int{-2: 0, -1: 1, 0: 1, 1: 1, 2: 1, 3: 0}},
	} {
		h := newHost(t, func(config *Config) {
			config.Log = slog.New(slog.NewTextHandler(&bytes.Buffer{}, &slog.HandlerOptions{Level: c.log}))
		})
		for level, want := range c.want {
			m := compile(t, h, "asks", ask(level))
			m.Lines = c.line
			_, x := exchange(configure(t, m, ""), request("GET", "/"), nil)
			if x.Cut || x.Status != 200+want {
				t.Errorf("%s, level %d: got %d (%+v), cut %v", c.name, level, x.Status-200, x.Denied, x.Cut)
			}
		}
	}
}

func TestLinesHaveTheExchangeInWhichTheyWereWritten(t *testing.T) {
	// The guest logs when it starts, and in an exchange, where it also prints half a line.
	m := Handler(imported("log", "wasi_snapshot_preview1.fd_write"), "\x08\x00\x00\x00\x05\x00\x00\x00print", Code(
		I32Const(-1), I32Const(8), I32Const(3), Call(0), I32Const(1), I32Const(0), I32Const(1), I32Const(100), Call(1), Drop, pass), none)
	m.Funcs = append(m.Funcs, Func{Export: "_initialize", Body: Code(I32Const(1), I32Const(8), I32Const(5), Call(0), End)})
	var lines []policylog.Line
	var log bytes.Buffer
	h := newHost(t, func(c *Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	c := compile(t, h, "talks", m.Binary())
	c.Owner = "ann"
	c.Lines = func(l policylog.Line) { lines = append(lines, l) }
	p := configure(t, c, "")
	info := Info{Flow: "f1", Sandbox: Sandbox{ID: "k3f9x2m7q1az", Name: "shop", Owner: "ann"}}
	if x := run(httptest.NewRecorder(), request("GET", "/"), info, []Step{{Policy: p}}, noUpstream); x.Denied != nil {
		t.Fatal(x.Denied)
	}
	want := []policylog.Line{
		{Level: policylog.Warn, Text: "print"},
		{Level: policylog.Debug, Text: "pri", Flow: "f1", Sandbox: "k3f9x2m7q1az", SandboxName: "shop"},
		{Level: policylog.Info, Text: "print", Flow: "f1", Sandbox: "k3f9x2m7q1az", SandboxName: "shop"},
	}
	testkit.Diff(t, "the lines", lines, want)
	for _, attribute := range []string{"policy=talks", "sandbox=k3f9x2m7q1az", "flow=f1", "owner=ann"} {
		if !strings.Contains(log.String(), attribute) {
			t.Errorf("the node's log has no %s: %s", attribute, log.String())
		}
	}
}

// linear is the memory of a guest.
type linear struct {
	api.Memory
	bytes []byte
}

func (m linear) Read(at, n uint32) ([]byte, bool) { return m.bytes[at : at+n], true }

// A line takes as long as hundreds of other bytes, and the time between two reads of the
// clock counts as a millisecond at most.
func TestGuestsThatWriteManyLinesAreStopped(t *testing.T) {
	const list = "\x08\x00\x00\x00\x00\x00\x01\x00" // one buffer: 64 KiB at 8
	lines := 0
	log := &logger{slog.New(slog.DiscardHandler), func(policylog.Line) { lines++ }, loglimit.New(1, 1)}
	c := &call{
		limit:  -1, // exceeded when the clock is read
		memory: linear{bytes: []byte(list + strings.Repeat("x\n", 32<<10))}, instance: &instance{output: output{logger: log}},
	}
	defer func() {
		if _, stopped := recover().(*failure); !stopped || lines > writeStep {
			t.Errorf("stopped %v, after %d lines", stopped, lines)
		}
	}()
	c.fdWrite(1, 0, 1, 0)
}

func TestInvalidHeaderNamesHaveNoValues(t *testing.T) {
	for _, kind := range []int32{requestHeader, requestTrailer, responseHeader} {
		m := Handler(imported("get_header_values", "set_status_code"), "a b", Code(
			I32Const(kind), I32Const(0), I32Const(3), I32Const(0), I32Const(0), Call(0), []byte{0xa7}, // i32.wrap_i64
			I32Const(200), Add, Call(1), stay), none)
		h := newHost(t, nil)
		_, x := exchange(configure(t, compile(t, h, "asks", m.Binary()), ""), request("GET", "/"), nil)
		if x.Cut || x.Denied != nil || x.Status != 200 {
			t.Errorf("kind %d: got %d, %+v, cut %v", kind, x.Status, x.Denied, x.Cut)
		}
	}
}
