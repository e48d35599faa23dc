package policy

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	. "github.com/doze-run/doze/egress/internal/wat"
	"github.com/doze-run/doze/egress/policy/meter"
)

// abi returns all functions that a guest can call, in a fixed order.
func abi() (all []function) {
	for _, module := range []string{handlerModule, egressModule, wasiModule} {
		list := slices.Clone(hostModules[module])
		slices.SortFunc(list, func(a, b function) int { return strings.Compare(a.name, b.name) })
		all = append(all, list...)
	}
	return all
}

// For any arguments of a host function, the guest gets a result or is ended by the host.
// The host never panics otherwise.
func FuzzHostFunctions(f *testing.F) {
	h, err := NewHost(Config{})
	if err != nil {
		f.Fatal(err)
	}
	defer h.Close()
	m, err := h.Compile(f.Context(), "fuzz", Handler(nil, strings.Repeat("x-name\x00/path?q=1\x00\x04\x00\x00\x00data", 9), pass, none).Binary())
	if err != nil {
		f.Fatal(err)
	}
	defer m.Release()
	p, err := m.Configure(f.Context(), []byte("config"))
	if err != nil {
		f.Fatal(err)
	}
	defer p.Release()
	functions := abi()
	for i := range functions {
		f.Add(uint(i), uint8(1), uint64(0), uint64(8), uint64(16), uint64(8), uint64(32), uint64(8), uint64(64), uint64(64))
		f.Add(uint(i), uint8(2), uint64(1), uint64(0), uint64(6), uint64(100), uint64(100), uint64(65536), uint64(65535), uint64(1<<32-1))
		f.Add(uint(i), uint8(3), uint64(1<<64-1), uint64(1<<64-1), uint64(1<<64-1), uint64(1<<64-1), uint64(1<<64-1), uint64(1<<64-1), uint64(1<<64-1), uint64(1<<64-1))
	}
	f.Fuzz(func(t *testing.T, n uint, mode uint8, a, b, c, d, e, g, i, j uint64) {
		function := functions[n%uint(len(functions))]
		in, err := p.acquire(t.Context(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer p.put(in)
		r := request("POST", "/path?q=1")
		r.Body = http.NoBody
		in.call.begin(in, h.config.TimeLimit)
		in.call.run(phase(mode % 3))
		in.call.features |= uint32(mode>>2) & allFeatures
		in.call.chain, in.call.writer, in.call.r, in.call.secrets = &Chain{}, httptest.NewRecorder(), r, &vault{}
		if mode&0x80 != 0 {
			in.call.buffer = &recorder{live: http.Header{}, limit: 1 << 20}
			in.call.buffer.finish()
		}
		in.call.memory = in.module.Memory()
		defer func() {
			switch err := recover().(type) {
			case nil, *failure, *exited:
			default:
				t.Fatalf("%s: %v", function.name, err)
			}
			if r.Host != "api.example.com" || r.URL.Host != "api.example.com" || r.URL.Scheme != "https" {
				t.Fatalf("%s: the request goes to %s", function.name, r.URL)
			}
		}()
		stack := []uint64{a, b, c, d, e, g, i, j, 0}
		function.call(&in.call, stack)
		if len(function.results) == 1 && function.results[0] == i32 && stack[0] > 1<<32-1 {
			t.Fatalf("%s returned %#x, which is not an i32", function.name, stack[0])
		}
	})
}

// Existing guests depend on these functions.
func TestTheABIIsComplete(t *testing.T) {
	want := map[string]string{
		"secret_ref": "(i32, i32, i32, i32) -> (i32)", "encode_ref": "(i32, i32, i32, i32, i32) -> (i32)",
		"hmac_sha256": "(i32, i32, i32, i32, i32, i32, i32, i32) -> (i32)", "sign": "(i32, i32, i32, i32, i32, i32, i32) -> (i32)",
		"sandbox": "(i32, i32) -> (i32)", "host": "(i32, i32) -> (i32)", "deny": "(i32, i32) -> ()", "audit_note": "(i32, i32) -> ()",
		"now": "() -> (i64)", "kv_get": "(i32, i32, i32, i32) -> (i32)", "kv_set": "(i32, i32, i32, i32, i64) -> (i32)",
		"kv_add": "(i32, i32, i64, i64, i32) -> (i32)",
	}
	for _, f := range egressFunctions {
		if got := signature(meter.Signature{Params: f.params, Results: f.results}); got != want[f.name] {
			t.Errorf("%s is %s, want %s", f.name, got, want[f.name])
		}
		delete(want, f.name)
	}
	if len(want) > 0 {
		t.Errorf("missing: %v", want)
	}
	if len(handlerFunctions) != 19 {
		t.Errorf("http_handler has %d functions", len(handlerFunctions))
	}
	if len(wasiFunctions) != 46 {
		t.Errorf("WASI has %d functions", len(wasiFunctions))
	}
}
