package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// clientArguments are the arguments of a client of the origin: this program again, in a
// sandbox or next to a peer, which prints a clientResult.
type clientArguments struct {
	do          string // stream, load, pairs, first or blob
	to          string // URL, or address of a stream
	than        string // pairs: the other URL
	direction   string // of a stream
	proxy       string
	ca          string // file of authorities to trust besides the system's
	method      string
	connections int
	count       int
	duration    time.Duration
	until       string // load: ends when this file exists
	wait        bool   // for a line on standard input, when the network is ready
}

func (a *clientArguments) flags() *flag.FlagSet {
	f := flag.NewFlagSet("client", flag.ContinueOnError)
	f.StringVar(&a.do, "do", "", "stream, load, pairs, first or blob")
	f.StringVar(&a.to, "to", "", "URL, or address of a stream")
	f.StringVar(&a.than, "than", "", "the other URL of pairs")
	f.StringVar(&a.direction, "direction", "", "out or in")
	f.StringVar(&a.proxy, "proxy", "", "URL of a proxy")
	f.StringVar(&a.ca, "ca", "", "file of authorities")
	f.StringVar(&a.method, "method", http.MethodGet, "of a load")
	f.IntVar(&a.connections, "connections", 1, "of a load")
	f.IntVar(&a.count, "count", 1, "requests or pairs of them")
	f.DurationVar(&a.duration, "duration", 0, "of a stream or load")
	f.StringVar(&a.until, "until", "", "file that ends a load")
	f.BoolVar(&a.wait, "wait", false, "wait for a line on standard input")
	return f
}

// clientResult is what a client measured.
type clientResult struct {
	Bytes    int64   `json:"bytes,omitempty"`
	Requests int64   `json:"requests,omitempty"`
	Failed   int64   `json:"failed,omitempty"`
	Failure  string  `json:"failure,omitempty"` // the first
	Seconds  float64 `json:"seconds"`
	Times    samples `json:"times,omitempty"` // pairs: of to
	Than     samples `json:"than,omitempty"`  // pairs: of than
}

// perSecond is what a stream or a body moved, in bytes.
func (r clientResult) perSecond() float64 { return float64(r.Bytes) / r.Seconds }

// runClient is the process.
func runClient(ctx context.Context, arguments []string) error {
	var a clientArguments
	if err := a.flags().Parse(arguments); err != nil {
		return err
	}
	if a.wait {
		if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
			return err
		}
	}
	measure, ok := map[string]func(context.Context, clientArguments) (clientResult, error){
		"stream": stream, "load": loadOrigin, "pairs": requestPairs, "first": firstRequests, "blob": fetchBlob,
	}[a.do]
	if !ok {
		return fmt.Errorf("a client does not know %q", a.do)
	}
	result, err := measure(ctx, a)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}

// stream moves bytes one way for the time.
func stream(ctx context.Context, a clientArguments) (r clientResult, err error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", a.to)
	if err != nil {
		return r, err
	}
	defer conn.Close()
	buf := make([]byte, streamBuffer)
	buf[0] = streamIn
	if a.direction == "out" {
		buf[0] = streamOut
	}
	if _, err := conn.Write(buf[:1]); err != nil {
		return r, err
	}
	began := time.Now()
	for time.Since(began) < a.duration {
		move := conn.Read
		if a.direction == "out" {
			move = conn.Write
		}
		n, err := move(buf)
		if err != nil {
			return r, err
		}
		r.Bytes += int64(n)
	}
	if a.direction == "out" { // bytes in transit have to arrive
		if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
			return r, err
		}
		if _, err := io.ReadFull(conn, buf[:8]); err != nil {
			return r, err
		}
		if got := int64(binary.BigEndian.Uint64(buf)); got != r.Bytes {
			return r, fmt.Errorf("%d of %d bytes arrived", r.Bytes, got)
		}
	}
	r.Seconds = time.Since(began).Seconds()
	return r, nil
}

// client speaks HTTP/1.1, as all peers do.
func (a clientArguments) client() (*http.Client, error) {
	roots, err := x509.SystemCertPool()
	if err != nil {
		return nil, err
	}
	if a.ca != "" {
		text, err := os.ReadFile(a.ca)
		if err != nil {
			return nil, err
		}
		if !roots.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("%s has no certificate", a.ca)
		}
	}
	t := &http.Transport{
		TLSClientConfig:     &tls.Config{RootCAs: roots},
		MaxIdleConnsPerHost: a.connections,
		DisableCompression:  true,
		Protocols:           new(http.Protocols),
	}
	t.Protocols.SetHTTP1(true)
	if a.proxy != "" {
		to, err := url.Parse(a.proxy)
		if err != nil {
			return nil, err
		}
		t.Proxy = http.ProxyURL(to)
	}
	return &http.Client{Transport: t, Timeout: time.Minute}, nil
}

// ask makes a request and reads the whole response.
func ask(ctx context.Context, c *http.Client, method, url string) (int64, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, nil)
	if err != nil {
		return 0, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		why, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10)) // as far as it can be read
		return 0, fmt.Errorf("%s: %s", resp.Status, why)
	}
	return io.Copy(io.Discard, resp.Body)
}

// loadOrigin makes requests over that many connections, after one over each.
func loadOrigin(ctx context.Context, a clientArguments) (r clientResult, err error) {
	c, err := a.client()
	if err != nil {
		return r, err
	}
	var over atomic.Bool
	if a.until != "" {
		go func() { // ends with the process
			for !over.Load() {
				_, err := os.Stat(a.until)
				over.Store(err == nil)
				time.Sleep(20 * time.Millisecond)
			}
		}()
	}
	var mu sync.Mutex
	each := func(f func(worker *clientResult)) {
		var wg sync.WaitGroup
		for range a.connections {
			wg.Go(func() {
				var w clientResult
				f(&w)
				mu.Lock()
				defer mu.Unlock()
				r.Requests, r.Failed = r.Requests+w.Requests, r.Failed+w.Failed
				if r.Failure == "" {
					r.Failure = w.Failure
				}
			})
		}
		wg.Wait()
	}
	one := func(w *clientResult) {
		if _, err := ask(ctx, c, a.method, a.to); err != nil {
			w.Failed++
			w.Failure = err.Error()
			return
		}
		w.Requests++
	}
	each(one)
	if r.Failed > 0 {
		return r, errors.New(r.Failure)
	}
	r.Requests = 0
	began := time.Now()
	each(func(w *clientResult) {
		for !over.Load() && (a.duration == 0 || time.Since(began) < a.duration) {
			one(w)
		}
	})
	r.Seconds = time.Since(began).Seconds()
	return r, nil
}

// requestPairs makes a request to each of two URLs in turn, each over a connection
// of its own that is kept.
func requestPairs(ctx context.Context, a clientArguments) (r clientResult, err error) {
	c, err := a.client()
	if err != nil {
		return r, err
	}
	const warm = 100
	for i := range warm + a.count {
		// The second one finds warmer caches, so they alternate.
		urls := []string{a.to, a.than}
		times := []*samples{&r.Times, &r.Than}
		if i%2 == 1 {
			slices.Reverse(urls)
			slices.Reverse(times)
		}
		for j, url := range urls {
			one, err := repeat(ctx, 1, func() error { _, err := ask(ctx, c, http.MethodGet, url); return err })
			if err != nil {
				return r, err
			}
			if i >= warm {
				*times[j] = append(*times[j], one...)
			}
		}
	}
	return r, nil
}

// firstRequests makes one request to each of many hosts: a number takes the place
// of the star in the URL.
func firstRequests(ctx context.Context, a clientArguments) (r clientResult, err error) {
	for i := range a.count {
		c, err := a.client()
		if err != nil {
			return r, err
		}
		url := strings.Replace(a.to, "*", fmt.Sprint("new-", i), 1)
		one, err := repeat(ctx, 1, func() error { _, err := ask(ctx, c, http.MethodGet, url); return err })
		if err != nil {
			return r, err
		}
		c.CloseIdleConnections()
		r.Times = append(r.Times, one...)
	}
	return r, nil
}

// fetchBlob reads one large body.
func fetchBlob(ctx context.Context, a clientArguments) (r clientResult, err error) {
	c, err := a.client()
	if err != nil {
		return r, err
	}
	c.Timeout = 0
	began := time.Now()
	r.Bytes, err = ask(ctx, c, http.MethodGet, a.to)
	r.Seconds = time.Since(began).Seconds()
	return r, err
}
