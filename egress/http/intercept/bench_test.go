package intercept

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/egress/tls/ca"
	"github.com/doze-run/doze/runtime/store"
)

var small = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain")
	io.WriteString(w, "hello, world\n")
})

// get returns a function that sends one small request over HTTP/1.1, always on the same
// connection. It does less work than a library's client, so that the measured cost is the
// node's.
func get(b *testing.B, addr string, cfg *tls.Config) func() {
	conn, err := tls.Dial("tcp", addr, cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { conn.Close() })
	request := []byte("GET / HTTP/1.1\r\nHost: " + host + "\r\n\r\n")
	response := make([]byte, 4096)
	return func() {
		conn.Write(request)
		if _, err := conn.Read(response); err != nil { // header and body in one record
			b.Error(err)
		}
	}
}

// h1 makes the upstream speak HTTP/1.1 only.
func h1(b *testing.B, r *rig) { r.upstream.TLS.NextProtos = []string{"http/1.1"} }

func drain(r *rig) { // the benchmarks do not read the results
	go func() {
		for range r.results {
		}
	}()
}

// cpu returns the CPU time that the process has used. Unlike elapsed time it does not
// depend on the load of the machine: the cost of a request is the difference to "direct".
func cpu(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func BenchmarkSmallGets(b *testing.B) {
	for _, how := range []string{"direct", "HTTP 1", "HTTP 2"} {
		b.Run(how, func(b *testing.B) {
			r := start(b, small)
			if how != "HTTP 2" {
				h1(b, r)
			}
			drain(r)
			defer close(r.results)
			cfg := &tls.Config{ServerName: host, RootCAs: r.trust, NextProtos: []string{"http/1.1"}}
			addr := r.addr
			if how == "direct" {
				addr, cfg.RootCAs = r.upstream.Listener.Addr().String(), upstreamCA().Pool()
			}
			const connections = 32
			var left atomic.Int64
			left.Store(int64(b.N))
			var all sync.WaitGroup
			var clients []func()
			for range connections {
				clients = append(clients, get(b, addr, cfg))
			}
			b.ReportAllocs()
			b.ResetTimer()
			before := cpu(b)
			for _, one := range clients {
				all.Go(func() {
					for left.Add(-1) >= 0 {
						one()
					}
				})
			}
			all.Wait()
			b.ReportMetric(float64((cpu(b)-before).Microseconds())/float64(b.N), "cpu-µs")
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
		})
	}
}

// BenchmarkAddedLatency compares the latency of one request at a time, through the node
// and directly.
func BenchmarkAddedLatency(b *testing.B) {
	r := start(b, small)
	h1(b, r)
	drain(r)
	defer close(r.results)
	through := get(b, r.addr, &tls.Config{ServerName: host, RootCAs: r.trust, NextProtos: []string{"http/1.1"}})
	past := get(b, r.upstream.Listener.Addr().String(), &tls.Config{ServerName: host, RootCAs: upstreamCA().Pool(), NextProtos: []string{"http/1.1"}})
	p50 := func(one func()) time.Duration {
		all := make([]time.Duration, 2000)
		for i := range all {
			began := time.Now()
			one()
			all[i] = time.Since(began)
		}
		slices.Sort(all)
		return all[len(all)/2]
	}
	for b.Loop() {
		direct, ours := p50(past), p50(through)
		b.ReportMetric(float64(direct.Microseconds()), "direct-µs")
		b.ReportMetric(float64((ours - direct).Microseconds()), "added-µs")
	}
}

// BenchmarkLargeBody transfers a body of 1 GiB and reports the memory that it adds.
func BenchmarkLargeBody(b *testing.B) {
	const size = 1 << 30
	for name, c := range map[string]struct {
		http1   bool
		upload  bool
		direct  bool
		options []option
	}{
		"down, HTTP 1":           {http1: true},
		"down, HTTP 2":           {},
		"down, HTTP 1, filtered": {http1: true, options: []option{filtered(copying{})}},
		"down, HTTP 1, direct":   {http1: true, direct: true},
		"down, HTTP 2, direct":   {direct: true},
		"up, HTTP 1":             {http1: true, upload: true},
		"up, HTTP 2":             {upload: true},
	} {
		b.Run(name, func(b *testing.B) {
			zero := make([]byte, 64<<10)
			r := start(b, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if c.upload {
					io.CopyBuffer(struct{ io.Writer }{io.Discard}, req.Body, make([]byte, 64<<10))
					return
				}
				w.Header().Set("Content-Length", fmt.Sprint(size))
				for range size / len(zero) {
					w.Write(zero)
				}
			}), c.options...)
			major := 2
			if c.http1 {
				h1(b, r)
				major = 1
			}
			if c.direct {
				r.addr, r.trust = r.upstream.Listener.Addr().String(), upstreamCA().Pool()
			}
			client := r.client(major)
			b.SetBytes(size)
			var before, now runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			peak, used := uint64(0), cpu(b)
			for b.Loop() {
				var body io.Reader
				if c.upload {
					body = io.LimitReader(zeros{}, size)
				}
				req, _ := http.NewRequest("POST", "https://"+host+"/", body)
				req.ContentLength = 0
				if c.upload {
					req.ContentLength = size
				}
				res, err := client.Do(req)
				if err != nil {
					b.Fatal(err)
				}
				for err == nil {
					_, err = io.CopyN(io.Discard, res.Body, 64<<20)
					runtime.ReadMemStats(&now)
					peak = max(peak, now.HeapInuse)
				}
				res.Body.Close()
				if !c.direct {
					<-r.results
				}
			}
			b.ReportMetric((cpu(b)-used).Seconds()/float64(b.N), "cpu-s")
			b.ReportMetric(float64(int64(peak)-int64(before.HeapInuse))/(1<<20), "MiB")
		})
	}
}

// copying is a filter that changes nothing.
type copying struct{ mask }

func (copying) Body(r io.Reader) io.Reader { return struct{ io.Reader }{r} }

// mustAuthority returns a node's authority.
func mustAuthority() *ca.Authority {
	dir, err := os.MkdirTemp("", "seal-*")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	key, err := seal.Open(filepath.Join(dir, "seal.key"))
	if err != nil {
		panic(err)
	}
	docs, err := store.OpenInMemory()
	if err != nil {
		panic(err)
	}
	defer docs.Close()
	a, err := ca.Open(context.Background(), ca.Config{Documents: docs, Key: key, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		panic(err)
	}
	return a
}

// BenchmarkFirstRequestToAHost measures the first request of a sandbox to an upstream:
// its leaf certificate and two handshakes.
func BenchmarkFirstRequestToAHost(b *testing.B) {
	upstream := start(b, small)
	f := NewUpstream(UpstreamConfig{RootCAs: upstreamCA().Pool(), Dial: func(ctx context.Context, _ dial.Target) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", upstream.upstream.Listener.Addr().String())
	}})
	defer f.Close()
	var authorities []*ca.Authority
	for b.Loop() {
		b.StopTimer()
		a := mustAuthority()
		authorities = append(authorities, a)
		s := New(Config{Certificate: a.Certificate, Log: slog.New(slog.DiscardHandler)})
		here, there := tcp(b)
		ctx, cancel := context.WithCancel(b.Context())
		served := make(chan error)
		f.Close()
		b.StartTimer()
		go func() {
			served <- s.Serve(ctx, there, Destination{Host: host, Port: 443, TLS: true, Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				f.Do(w, req, Route{}, nil)
			})})
		}()
		conn := tls.Client(here, &tls.Config{ServerName: host, InsecureSkipVerify: true})
		io.WriteString(conn, "GET / HTTP/1.1\r\nHost: "+host+"\r\n\r\n")
		if _, err := conn.Read(make([]byte, 4096)); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		cancel()
		<-served
		b.StartTimer()
	}
}
