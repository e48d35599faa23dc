//go:build linux && !race

package policy

import (
	"bytes"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	. "github.com/doze-run/doze/egress/internal/wat"
)

func TestMemoryOfAThousandReplacements(t *testing.T) {
	grown, requests := replace(t, newHost(t, func(c *Config) { c.CacheDir = "" }), responder(), 1000, 2)
	t.Logf("%d requests, grown by %d KiB", requests, grown>>10)
	if grown > 20<<20 {
		t.Errorf("the process has grown by %d MiB", grown>>20)
	}
}

// The memory of the compiler's process does not count.
func TestMemoryOfARefusedModule(t *testing.T) {
	h := newHost(t, func(c *Config) { c.CacheDir, c.CompileLimit = "", time.Second })
	wasm := hostileModules()[refused[0]].Binary()
	before := allocated()
	if c, err := h.Compile(t.Context(), "hostile", wasm); err == nil {
		c.Release()
		t.Fatal("it was compiled")
	}
	if grown := allocated() - before; grown > 32<<20 {
		t.Errorf("the host allocated %d bytes", grown)
	}
}

// A name has at most 256 bytes, but a guest can pass one as long as its memory.
func TestMemoryOfTextsThatAreTooLong(t *testing.T) {
	const pages, page, times = 256, 65536, 20
	all := Code(I32Const(0), I32Const(pages*page))
	two := Code(I32Const(0), I32Const(0))
	tests := map[string][]byte{
		"doze_egress_v1.secret_ref":  Code(all, two),
		"doze_egress_v1.encode_ref":  Code(I32Const(0), all, two),
		"doze_egress_v1.hmac_sha256": Code(all, all, all, two),
		"doze_egress_v1.sign":        Code(all, I32Const(1), all, two),
		"doze_egress_v1.kv_get":      Code(all, two),
		"doze_egress_v1.kv_set":      Code(all, two, I64Const(0)),
		"doze_egress_v1.kv_add":      Code(all, I64Const(1), I64Const(0), I32Const(0)),
		"doze_egress_v1.deny":        all,
		"doze_egress_v1.audit_note":  all,
		"log":                        Code(I32Const(0), all),
	}
	h := newHost(t, nil)
	for name, arguments := range tests {
		t.Run(name, func(t *testing.T) {
			imports := imported(name)
			one := Code(arguments, Call(0))
			if len(imports[0].Results) > 0 {
				one = Code(one, Drop)
			}
			m := Handler(imports, "", Code(bytes.Repeat(one, times), pass), none)
			m.Pages = pages
			p := configure(t, compile(t, h, "hostile", m.Binary()), "")
			before := allocated()
			_, _ = exchange(p, request("GET", "/"), nil)
			if grown := allocated() - before; grown > times*pages*page/4 {
				t.Errorf("%d bytes for %d calls", grown, times)
			}
		})
	}
}

// The memory of an instance whose start fails must be released, too: wazero does not
// release it.
func TestMemoryOfInstancesIsReleased(t *testing.T) {
	h := newHost(t, nil)
	starts := compile(t, h, "responder", responder())
	fails := compile(t, h, "hostile", Assembly{Pages: 1, Start: 1, Funcs: []Func{
		{Export: "handle_request", Results: []byte{I64}, Body: pass},
		{Body: trap},
		{Export: "handle_response", Params: []byte{I32, I32}, Body: none},
	}}.Binary())
	before := mapped(t)
	const times = 1000
	for range times {
		p, err := starts.Configure(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		p.Release()
		if p, err := fails.Configure(t.Context(), nil); err == nil {
			p.Release()
			t.Fatal("it starts")
		}
	}
	if grown := mapped(t) - before; grown > times/4*h.config.MemoryLimit {
		t.Errorf("%d starts have left %d MiB", 2*times, grown>>20)
	}
}

// allocated returns the total number of bytes allocated on the heap so far.
func allocated() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.TotalAlloc
}

// mapped returns the size of the process's address space, in bytes.
func mapped(t *testing.T) int {
	t.Helper()
	statm, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	size, _, _ := strings.Cut(string(statm), " ")
	pages, err := strconv.Atoi(size)
	if err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize()
}
