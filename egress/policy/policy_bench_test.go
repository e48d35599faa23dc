package policy

import (
	"net/http"
	"net/http/httptest"
	"testing"
)

var noUpstream = http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})

// BenchmarkBearer measures a call of a small policy in Go, including the chain.
func BenchmarkBearer(b *testing.B) {
	h := newHost(b, nil)
	p := configure(b, compile(b, h, "bearer", guest(b, bearer)), "")
	steps := []Step{{Policy: p, Secrets: secrets{}}}
	r, w := request("GET", "/user"), httptest.NewRecorder()
	b.ReportAllocs()
	for b.Loop() {
		c := NewChain(w, r, Info{Host: "api.example.com"})
		c.Request(steps[0])
		if d, cut := c.Response(false); d != nil || cut {
			b.Fatal(d, cut)
		}
		c.Close()
	}
	if got := r.Header.Get("Authorization"); got != "Bearer ref-token" {
		b.Fatal(got)
	}
}

// BenchmarkCompileSmall measures the costs of a new policy before it runs, without the code
// of a large module.
func BenchmarkCompileSmall(b *testing.B) {
	h := newHost(b, func(c *Config) { c.CacheDir = "" })
	for b.Loop() {
		m, err := h.Compile(b.Context(), "small", responder())
		if err != nil {
			b.Fatal(err)
		}
		m.Release()
	}
}

// BenchmarkReplaceGo measures the replacement of a policy in Go under load, with its code on
// disk.
func BenchmarkReplaceGo(b *testing.B) {
	h := newHost(b, nil)
	base := guest(b, bearer)
	for b.Loop() {
		grown, requests := replace(b, h, base, 1000, 2)
		b.ReportMetric(float64(grown)/(1<<20), "MiB-grown")
		b.ReportMetric(float64(requests), "requests")
	}
}

// BenchmarkStartGo measures the costs of an instance. A policy has one for each concurrent
// request.
func BenchmarkStartGo(b *testing.B) {
	h := newHost(b, nil)
	p := configure(b, compile(b, h, "bearer", guest(b, bearer)), "")
	b.ReportAllocs()
	for b.Loop() {
		i, err := p.start(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		i.close()
	}
}
