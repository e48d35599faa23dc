package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/egress/secret/reference"
	"github.com/doze-run/doze/policies/builtin"
)

const (
	policyCalls = 40_000 // in each round
	policyBar   = 5      // µs
)

// measurePolicy: the call of the policy bearer that doze ships, with all that the
// host does around it, in this process.
func measurePolicy(ctx context.Context, b *bench) ([]row, error) {
	host, err := policy.NewHost(policy.Config{})
	if err != nil {
		return nil, err
	}
	defer host.Close()
	wasm, err := builtin.Module("bearer")
	if err != nil {
		return nil, err
	}
	module, err := host.Compile(ctx, "bearer", wasm)
	if err != nil {
		return nil, err
	}
	defer module.Release()
	p, err := module.Configure(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer p.Release()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://api.example.com/user", nil)
	if err != nil {
		return nil, err
	}
	w := httptest.NewRecorder()
	call := func() error {
		refs := reference.NewSet(func(secret.ID) ([]byte, error) { return []byte(benchToken), nil })
		chain := policy.NewChain(w, r, policy.Info{Host: "api.example.com"})
		defer chain.Close()
		chain.Request(policy.Step{Policy: p, Secrets: refs.Source("", map[string]string{"token": "bench"})})
		if denial, _ := chain.Response(false); denial != nil {
			return denial
		}
		return nil
	}
	if _, err := repeat(ctx, b.count(policyCalls/2), nil, call); err != nil { // not counted
		return nil, err
	}
	p50s, all, err := inRounds(func() (spread, error) { return repeat(ctx, b.count(policyCalls), nil, call) })
	if err != nil {
		return nil, err
	}
	p50s, p99 := p50s.times(1000), 1000*all.p99() // µs
	if r.Header.Get("Authorization") == "" {
		return nil, fmt.Errorf("the policy added nothing: %v", r.Header)
	}
	return []row{{
		Figure:   "the call of a policy alone (bearer, a guest in Go)",
		Bar:      "p50 ≤ 5 µs",
		Measured: fmt.Sprintf("p50 %s µs, p99 %.2f µs", p50s.text("%.2f"), p99),
		Met:      p50s.median() <= policyBar,
		Values:   values{"p99_us": p99}.add("p50_us", p50s),
		Note:     "with an instance from the pool, a reference made, and the clock read twice",
	}}, nil
}

const (
	replacements      = 1000
	replacementGrowth = 20e6 // bytes
	stopFile          = "/srv/stop"
)

// measureReplace: requests that never cease while the module that they pass is
// replaced. The memory of the last tenth is compared with the first's.
func measureReplace(ctx context.Context, b *bench) ([]row, error) {
	wasm, err := builtin.Module("bearer")
	if err != nil {
		return nil, err
	}
	// Two modules in turn, which differ in a section that only names them: code is
	// made of each once, then comes from the node's cache, as after a restart.
	versions := [][]byte{named(wasm, "one"), named(wasm, "two")}
	push := func(i int) error {
		_, err := b.node.API.PushPolicy(ctx, "replaced", bytes.NewReader(versions[i%len(versions)]))
		return err
	}
	for i := range versions {
		if err := push(i); err != nil {
			return nil, err
		}
	}
	const rules = `[{"name":"replaced","hosts":["replaced.look.test"],"policies":[{"name":"replaced","secrets":{"token":"bench"}}]}]`
	if _, err := b.node.API.SetRules(ctx, b.id, client.RulesUpdate{Rules: json.RawMessage(rules)}); err != nil {
		return nil, err
	}
	type loaded struct {
		result clientResult
		err    error
	}
	ended := make(chan loaded, 1)
	go func() { // ends when the stop file exists
		// POST: net/http repeats a GET by itself when its connection fails.
		r, err := b.node.client(ctx, b.id, task{Do: "load", Method: http.MethodPost, Connections: loadConnections, To: "https://replaced.look.test/", Until: stopFile})
		ended <- loaded{r, err}
	}()
	var first, last spread
	count := b.count(replacements)
	began := time.Now()
	for i := range count {
		if err := push(i); err != nil {
			return nil, err
		}
		if i >= (count+9)/10 && i < count*9/10 {
			continue
		}
		rss, err := b.node.rss()
		if err != nil {
			return nil, err
		}
		if i < (count+9)/10 {
			first = append(first, float64(rss))
		} else {
			last = append(last, float64(rss))
		}
	}
	took := time.Since(began)
	if _, err := b.node.API.WriteFile(ctx, b.id, stopFile, 0o644, bytes.NewReader(nil)); err != nil {
		return nil, err
	}
	l := <-ended
	if l.err != nil {
		return nil, l.err
	}
	growth := last.median() - first.median()
	r := row{
		Figure:   fmt.Sprintf("%d replacements of a policy under load: failed requests; growth of the node's memory (RSS)", count),
		Bar:      "0; ≤ 20 MB",
		Measured: fmt.Sprintf("%d of %d; %.1f MB", l.result.Failed, l.result.Requests+l.result.Failed, growth/1e6),
		Met:      l.result.Failed == 0 && growth <= replacementGrowth,
		Values: values{
			"failed": float64(l.result.Failed), "requests": float64(l.result.Requests), "growth_mb": growth / 1e6,
			"replacement_mean_ms": ms(took / time.Duration(count)),
		}.add("rss_first_mb", first.times(1e-6)).add("rss_last_mb", last.times(1e-6)),
		Note: fmt.Sprintf("bearer, two modules in turn, %.0f ms each, %.0f requests/s meanwhile", ms(took/time.Duration(count)), float64(l.result.Requests)/l.result.Seconds),
	}
	if l.result.Failed > 0 {
		r.Note += "; the first failure: " + l.result.Failure
	}
	return []row{r}, nil
}

// named is a module with one more custom section
// (https://webassembly.github.io/spec/core/binary/modules.html#custom-section).
func named(wasm []byte, name string) []byte {
	content := append([]byte{byte(len(name))}, name...)
	section := append([]byte{0}, binary.AppendUvarint(nil, uint64(len(content)))...)
	return append(append(bytes.Clone(wasm), section...), content...)
}
