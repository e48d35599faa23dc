package policy

import (
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	. "github.com/doze-run/doze/egress/internal/wat"
)

// exchange runs a request through one policy.
func exchange(p *Policy, r *http.Request, next http.HandlerFunc) (*httptest.ResponseRecorder, *result) {
	w := httptest.NewRecorder()
	if next == nil {
		next = noUpstream
	}
	return w, run(w, r, Info{Host: "api.example.com", Sandbox: Sandbox{ID: "k3f9x2m7q1az"}}, []Step{{Policy: p, Secrets: secrets{}}}, next)
}

func TestHostileGuestsAreDenied(t *testing.T) {
	const page = 65536
	grow := Code(Block, Loop, I32Const(1), Grow, I32Const(-1), []byte{0x46}, BrIf(1), Br(0), End, End)
	noImports := imported()
	twice := func(n []byte) []byte { return Code(n, Call(1), n, Call(1)) }
	tests := []struct {
		name     string
		module   Assembly
		response bool // the policy fails in handle_response
		reason   string
	}{
		{"unreachable in handle_request", Handler(noImports, "", trap, none), false, "unreachable"},
		{"unreachable in handle_response", Handler(noImports, "", pass, trap), true, "unreachable"},
		{"loop in handle_request", Handler(noImports, "", busy, none), false, "took longer than 50ms"},
		{"loop in handle_response", Handler(noImports, "", pass, busy), true, "took longer than 50ms"},
		{"recursion without loops", Assembly{Imports: noImports, Pages: 1, Funcs: []Func{
			{Export: "handle_request", Results: []byte{I64}, Body: Code(I32Const(60), Call(1), pass)},
			{Params: []byte{I32}, Body: Code(LocalGet(0), If, twice(Code(LocalGet(0), I32Const(1), Sub)), End, End)},
			{Export: "handle_response", Params: []byte{I32, I32}, Body: none},
		}}, false, "took longer than 50ms"},
		{"recursion without end", Assembly{Imports: noImports, Pages: 1, Funcs: []Func{
			{Export: "handle_request", Results: []byte{I64}, Body: Code(Call(1), pass)},
			{Body: Code(Call(1), End)},
			{Export: "handle_response", Params: []byte{I32, I32}, Body: none},
		}}, false, ""},
		{"filling memory", Assembly{Imports: noImports, Pages: 256, Funcs: []Func{
			{Export: "handle_request", Results: []byte{I64}, Body: Code(Loop, I32Const(0), I32Const(7), I32Const(256*page), Fill, Br(0), End, pass)},
			{Export: "handle_response", Params: []byte{I32, I32}, Body: none},
		}}, false, "took longer than 50ms"},
		{"memory bomb", Handler(noImports, "", Code(grow, Unreachable, End), none), false, "unreachable"},
		{"nothing but host functions", Handler(imported("doze_egress_v1.now"), "",
			Code(Loop, Call(0), Drop, Br(0), End, Unreachable, End), none), false, "took longer than 50ms"},
		{"pointer beyond memory", Handler(imported("set_method"), "", Code(I32Const(page-1), I32Const(2), Call(0), pass), none), false, "pointer"},
		{"line break in a header", Handler(imported("set_header_value"), "x-a\r\nx-b: 1",
			Code(I32Const(0), I32Const(0), I32Const(3), I32Const(0), I32Const(8), Call(0), pass), none), false, "line break"},
		{"line break in a name", Handler(imported("set_header_value"), "x-a\r\nx-b: 1",
			Code(I32Const(0), I32Const(0), I32Const(8), I32Const(0), I32Const(3), Call(0), pass), none), false, "not a name of a header"},
		{"thousands of headers", Handler(imported("add_header_value"), "x-a",
			Code(Loop, I32Const(0), I32Const(0), I32Const(3), I32Const(0), I32Const(3), Call(0), Br(0), End, Unreachable, End), none), false, "more than 256 fields"},
		{"a huge header", Handler(imported("add_header_value"), "x-a"+strings.Repeat("y", 60000),
			Code(I32Const(0), I32Const(0), I32Const(3), I32Const(0), I32Const(60000), Call(0),
				I32Const(0), I32Const(0), I32Const(3), I32Const(0), I32Const(60000), Call(0), pass), none), false, "65536 bytes"},
		{"a huge body", Handler(imported("write_body"), "",
			Code(Loop, I32Const(0), I32Const(0), I32Const(page), Call(0), Br(0), End, Unreachable, End), none), false, "1048576 bytes"},
		{"a huge response", Handler(imported("write_body"), "",
			Code(Loop, I32Const(1), I32Const(0), I32Const(page), Call(0), Br(0), End, Unreachable, End), none), false, "1048576 bytes"},
		{"a response after it was sent", Handler(imported("write_body"), "", pass, after(Code(I32Const(1), I32Const(0), I32Const(1), Call(0)))), true, "buffer_response"},
		{"another host", Handler(imported("set_header_value"), "hostevil.example.com",
			Code(I32Const(0), I32Const(0), I32Const(4), I32Const(4), I32Const(16), Call(0), pass), none), false, "Host"},
		{"the end of a message", Handler(imported("remove_header"), "transfer-encoding",
			Code(I32Const(0), I32Const(0), I32Const(17), Call(0), pass), none), false, "Transfer-Encoding"},
		{"another destination", Handler(imported("set_uri"), "https://evil.example.com/",
			Code(I32Const(0), I32Const(25), Call(0), pass), none), false, "begins with a slash"},
		{"a request in the URI", Handler(imported("set_uri"), "/ HTTP/1.1\r\nHost: evil.example.com\r\n\r\n",
			Code(I32Const(0), I32Const(38), Call(0), pass), none), false, "no spaces"},
		{"a tunnel", Handler(imported("set_method"), "CONNECT", Code(I32Const(0), I32Const(7), Call(0), pass), none), false, "not a method"},
		{"exit", Handler(imported("wasi_snapshot_preview1.proc_exit"), "", Code(I32Const(0), Call(0), pass), none), false, "ended itself with code 0"},
	}
	h := newHost(t, nil)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := configure(t, compile(t, h, "hostile", tt.module.Binary()), "")
			called := false
			_, x := exchange(p, request("GET", "/"), func(http.ResponseWriter, *http.Request) { called = true })
			if x.Denied == nil || !strings.Contains(x.Denied.Reason, tt.reason) {
				t.Fatalf("denied: %+v, want %q", x.Denied, tt.reason)
			}
			if called != tt.response {
				t.Errorf("the request was sent: %v", called)
			}
			if x.Cut != tt.response {
				t.Errorf("the response is cut: %v", x.Cut)
			}
			if n := len(h.instances); n != 0 {
				t.Errorf("%d instances are left", n)
			}
		})
	}
}

func TestHostileGuestsDoNotStart(t *testing.T) {
	start := func(body []byte) Assembly {
		m := Handler(nil, "", pass, none)
		m.Funcs = append(m.Funcs, Func{Body: body})
		m.Start = 2
		return m
	}
	initialize := func(imports []Import, body []byte) Assembly {
		m := Handler(imports, "x", pass, none)
		m.Funcs = append(m.Funcs, Func{Export: "_initialize", Body: body})
		return m
	}
	tests := map[string]struct {
		module Assembly
		reason string
	}{
		"unreachable in start":      {start(trap), "unreachable"},
		"loop in start":             {start(busy), "took longer than 200ms"},
		"unreachable in initialize": {initialize(nil, trap), "unreachable"},
		"loop in initialize":        {initialize(nil, busy), "took longer than 200ms"},
		"a request in initialize":   {initialize(imported("get_method"), Code(I32Const(0), I32Const(0), Call(0), Drop, End)), "while it was starting"},
		"a note in initialize":      {initialize(imported("doze_egress_v1.audit_note"), Code(I32Const(0), I32Const(1), Call(0), End)), "while it was starting"},
		"kv in initialize": {initialize(imported("doze_egress_v1.kv_get"),
			Code(I32Const(0), I32Const(1), I32Const(0), I32Const(0), Call(0), Drop, End)), "while it was starting"},
	}
	h := newHost(t, func(c *Config) { c.StartLimit = 200 * time.Millisecond })
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := compile(t, h, "hostile", tt.module.Binary()).Configure(t.Context(), nil)
			var start *StartError
			if !errors.As(err, &start) || !strings.Contains(start.Reason, tt.reason) {
				t.Fatalf("got %v, want %q", err, tt.reason)
			}
			if n := len(h.instances); n != 0 {
				t.Errorf("%d instances are left", n)
			}
		})
	}
}

func TestErrorsOfInvalidModulesNameTheCause(t *testing.T) {
	good := Handler(nil, "", pass, none)
	without := func(name string) Assembly {
		m := Handler(nil, "", pass, none)
		for i := range m.Funcs {
			if m.Funcs[i].Export == name {
				m.Funcs[i].Export = "other"
			}
		}
		return m
	}
	imports := func(i Import) Assembly { return Handler([]Import{i}, "", pass, none) }
	wrong := Handler(nil, "", none, none)
	wrong.Funcs[0].Results = nil
	noMemory := good
	noMemory.Pages = 0
	large := good
	large.Pages = 257
	tests := map[string]struct {
		wasm []byte
		want []string
	}{
		"no WASM":            {[]byte("package main"), []string{"not a WebAssembly module", "00 61 73 6d"}},
		"nothing":            {nil, []string{"not a WebAssembly module"}},
		"component":          {[]byte("\x00asm\x0d\x00\x01\x00rest"), []string{"component", "wasip1"}},
		"200 MB":             {make([]byte, 200<<20), []string{"209715200 bytes", "at most 16777216"}},
		"no handle_request":  {without("handle_request").Binary(), []string{"does not export `handle_request`", "//go:wasmexport"}},
		"no handle_response": {without("handle_response").Binary(), []string{"does not export `handle_response`"}},
		"no memory":          {noMemory.Binary(), []string{"memory"}},
		"too much memory":    {large.Binary(), []string{"16448 KiB", "16384 KiB"}},
		"wrong signature":    {wrong.Binary(), []string{"`handle_request` is not () -> (i64)"}},
		"unknown module":     {imports(Import{Module: "env", Name: "abort"}).Binary(), []string{`"abort"`, `"env"`, "doze_egress_v1"}},
		"our own module":     {imports(Import{Module: "doze_meter", Name: "tick"}).Binary(), []string{`"doze_meter"`}},
		"unknown function":   {imports(Import{Module: "http_handler", Name: "get_secret"}).Binary(), []string{`"get_secret"`, "http_handler does not have"}},
		"wrong import": {imports(Import{Module: "http_handler", Name: "get_uri", Params: []byte{I64}}).Binary(),
			[]string{"get_uri", "(i64) -> ()", "(i32, i32) -> (i32)"}},
		"invalid code": {Handler(nil, "", Code(I32Const(1), End), none).Binary(), []string{"invalid function"}},
	}
	h := newHost(t, nil)
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			m, err := h.Compile(t.Context(), "mine", tt.wasm)
			if err == nil {
				m.Release()
				t.Fatal("it was compiled")
			}
			for _, want := range append(tt.want, "policy mine") {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not contain %q", err, want)
				}
			}
		})
	}
}

// A host function that processes a whole memory takes longer than maxBetween, so it must
// tick itself.
func TestTimeInHostFunctionsCounts(t *testing.T) {
	const pages, page = 256, 65536
	tests := map[string]struct {
		imports, data string
		body          []byte
	}{
		"1,024 writes of a whole memory": {"wasi_snapshot_preview1.fd_write", strings.Repeat("\x00\x00\x00\x00\x00\x00\x00\x01", 1024),
			Code(I32Const(1), I32Const(0), I32Const(1024), I32Const(0), Call(0), Drop, pass)},
		"memories full of random numbers": {"wasi_snapshot_preview1.random_get", "",
			Code(bytes.Repeat(Code(I32Const(0), I32Const(pages*page), Call(0), Drop), 40), pass)},
	}
	h := newHost(t, nil)
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			m := Handler(imported(tt.imports), tt.data, tt.body, none)
			m.Pages = pages
			_, x := exchange(configure(t, compile(t, h, "hostile", m.Binary()), ""), request("GET", "/"), nil)
			if x.Denied == nil || !strings.Contains(x.Denied.Reason, "took longer than 50ms") {
				t.Errorf("got %+v", x.Denied)
			}
		})
	}
}

// A failure in one exchange must not affect the next.
func TestAfterAFailureTheNextExchangeHasAFreshInstance(t *testing.T) {
	// The guest traps if memory at 0 is not 0, and stores 1 there. POST makes it trap, too.
	h := newHost(t, nil)
	m := Handler(imported("get_method"), "", Code(
		I32Const(0), Load(0), If, Unreachable, End,
		I32Const(16), I32Const(8), Call(0), I32Const(4), []byte{0x46}, If, I32Const(0), I32Const(1), Store(0), Unreachable, End,
		pass), none)
	p := configure(t, compile(t, h, "sometimes", m.Binary()), "")
	for i, method := range []string{"GET", "POST", "GET", "POST", "GET"} {
		_, x := exchange(p, request(method, "/"), nil)
		if x.Cut || (x.Denied != nil) != (method == "POST") {
			t.Fatalf("exchange %d: %+v, %v", i, x.Denied, x.Cut)
		}
	}
}

func TestDenialsContainTheMessageOfAPanic(t *testing.T) {
	h := newHost(t, nil)
	m := compile(t, h, "script", guest(t, script))
	_, err := m.Configure(t.Context(), []byte(`["start panic \"bad start\""]`))
	if err == nil || !strings.Contains(err.Error(), "bad start") {
		t.Errorf("got %v", err)
	}
	_, x := exchange(configure(t, m, `["request panic \"bad request\""]`), request("GET", "/"), nil)
	if x.Denied == nil || !strings.Contains(x.Denied.Reason, "bad request") || !strings.Contains(x.Denied.Detail, "goroutine") {
		t.Errorf("got %+v", x.Denied)
	}
}
