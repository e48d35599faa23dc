package policy

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/http-wasm/http-wasm-host-go/tck"
)

// handler returns a handler that runs steps around next, as the node does.
func handler(t testing.TB, steps []Step, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		x := run(w, r, Info{Host: "api.example.com", Sandbox: Sandbox{ID: "k3f9x2m7q1az"}}, steps, next)
		if x.Cut {
			panic(http.ErrAbortHandler)
		}
		if d := x.Denied; d != nil {
			t.Logf("denied: %+v", *d)
			http.Error(w, d.Reason, d.Code.Definition().Status)
		}
	})
}

func TestHTTPWasmConformance(t *testing.T) {
	h := newHost(t, nil)
	p := configure(t, compile(t, h, "tck", tck.GuestWASM), "")
	for _, version := range []string{"HTTP/1.1", "HTTP/2.0"} {
		t.Run(version, func(t *testing.T) {
			s := httptest.NewUnstartedServer(handler(t, []Step{{Policy: p}}, tck.BackendHandler()))
			if s.EnableHTTP2 = version == "HTTP/2.0"; s.EnableHTTP2 {
				s.StartTLS()
			} else {
				s.Start()
			}
			// The kit's tests run in parallel, after this function.
			t.Cleanup(s.Close)
			tck.Run(t, s.Client(), s.URL)
		})
	}
}
