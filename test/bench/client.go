package main

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
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

	"golang.org/x/sync/errgroup"
)

// task is what a client of the origin does: this program again, in a sandbox or next to
// a peer. Its argument is the task in JSON, and it prints a clientResult.
type task struct {
	Do          string        `json:"do"`        // stream, load, pairs, first, blob or files
	To          string        `json:"to"`        // URL, address of a stream, or folder of files
	Than        string        `json:"than"`      // pairs: the other URL
	Direction   string        `json:"direction"` // of a stream: out or in
	Proxy       string        `json:"proxy"`
	CA          string        `json:"ca"`          // file of authorities to trust besides the system's
	Method      string        `json:"method"`      // of a load; default: GET
	Connections int           `json:"connections"` // of a load
	Count       int           `json:"count"`       // of requests, pairs of them, or files
	Duration    time.Duration `json:"duration"`    // of a stream or load, or between two files
	Until       string        `json:"until"`       // load: ends when this file exists
	Wait        bool          `json:"wait"`        // for a line on standard input, when the network is ready
}

// argument encodes the task.
func (t task) argument() string {
	text, _ := json.Marshal(t) // has only fields that can be encoded
	return string(text)
}

// clientResult is what a client measured.
type clientResult struct {
	Bytes    int64    `json:"bytes,omitempty"`
	Files    []string `json:"files,omitempty"` // files: the names
	Requests int64    `json:"requests,omitempty"`
	Failed   int64    `json:"failed,omitempty"`
	Failure  string   `json:"failure,omitempty"` // the first
	Seconds  float64  `json:"seconds"`
	Times    spread   `json:"times,omitempty"` // pairs: of to
	Than     spread   `json:"than,omitempty"`  // pairs: of than
}

// perSecond is what a stream or a body moved, in bytes.
func (r clientResult) perSecond() float64 { return float64(r.Bytes) / r.Seconds }

// runClient is the process.
func runClient(ctx context.Context, argument string) error {
	var t task
	if err := json.Unmarshal([]byte(argument), &t); err != nil {
		return err
	}
	if t.Wait {
		if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
			return err
		}
	}
	measure, ok := map[string]func(context.Context, task) (clientResult, error){
		"stream": stream, "load": loadOrigin, "pairs": requestPairs, "first": firstRequests, "blob": fetchBlob, "files": makeFiles,
	}[t.Do]
	if !ok {
		return fmt.Errorf("unknown task %q", t.Do)
	}
	result, err := measure(ctx, t)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}

// stream moves bytes one way for the time.
func stream(ctx context.Context, t task) (r clientResult, err error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", t.To)
	if err != nil {
		return r, err
	}
	defer conn.Close()
	buf := make([]byte, streamBuffer)
	buf[0] = streamIn
	if t.Direction == "out" {
		buf[0] = streamOut
	}
	if _, err := conn.Write(buf[:1]); err != nil {
		return r, err
	}
	began := time.Now()
	for time.Since(began) < t.Duration {
		move := conn.Read
		if t.Direction == "out" {
			move = conn.Write
		}
		n, err := move(buf)
		if err != nil {
			return r, err
		}
		r.Bytes += int64(n)
	}
	if t.Direction == "out" { // bytes in transit have to arrive
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
func (t task) client() (*http.Client, error) {
	roots, err := x509.SystemCertPool()
	if err != nil {
		return nil, err
	}
	if t.CA != "" {
		if err := trust(roots, t.CA); err != nil {
			return nil, err
		}
	}
	transport := &http.Transport{
		TLSClientConfig:     &tls.Config{RootCAs: roots},
		MaxIdleConnsPerHost: t.Connections,
		DisableCompression:  true,
		Protocols:           new(http.Protocols),
	}
	transport.Protocols.SetHTTP1(true)
	if t.Proxy != "" {
		to, err := url.Parse(t.Proxy)
		if err != nil {
			return nil, err
		}
		transport.Proxy = http.ProxyURL(to)
	}
	return &http.Client{Transport: transport, Timeout: time.Minute}, nil
}

// trust adds the authorities of a file to a pool.
func trust(roots *x509.CertPool, file string) error {
	text, err := os.ReadFile(file)
	if err == nil && !roots.AppendCertsFromPEM(text) {
		err = fmt.Errorf("%s has no certificate", file)
	}
	return err
}

// ask makes a request and reads the whole response. It returns the header and the size of
// the body.
func ask(ctx context.Context, c *http.Client, method, url string) (header http.Header, size int64, err error) {
	req, err := http.NewRequestWithContext(ctx, method, url, nil)
	if err != nil {
		return nil, 0, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		why, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10)) // as far as it can be read
		return nil, 0, fmt.Errorf("%s: %s: %s", url, resp.Status, why)
	}
	size, err = io.Copy(io.Discard, resp.Body)
	return resp.Header, size, err
}

// loadOrigin makes requests over t.Connections connections, after one over each.
func loadOrigin(ctx context.Context, t task) (r clientResult, err error) {
	c, err := t.client()
	if err != nil {
		return r, err
	}
	var over atomic.Bool
	if t.Until != "" {
		go func() { // ends with the process
			_ = poll(ctx, 20*time.Millisecond, func() (bool, error) {
				_, err := os.Stat(t.Until)
				over.Store(err == nil)
				return err == nil, nil
			})
		}()
	}
	request := func() error { _, _, err := ask(ctx, c, t.Method, t.To); return err }
	var first errgroup.Group
	for range t.Connections {
		first.Go(request)
	}
	if err := first.Wait(); err != nil {
		return r, err
	}
	return load(t.Connections, request, func(past time.Duration) bool { return over.Load() || t.Duration > 0 && past >= t.Duration }), nil
}

// load makes requests over connections at the same time, each until over returns true
// for the time since the beginning.
func load(connections int, request func() error, over func(past time.Duration) bool) (r clientResult) {
	began := time.Now()
	var mu sync.Mutex // guards failures
	var requests atomic.Int64
	var workers sync.WaitGroup
	for range connections {
		workers.Go(func() {
			for !over(time.Since(began)) {
				err := request()
				if err == nil {
					requests.Add(1)
					continue
				}
				mu.Lock()
				r.Failed, r.Failure = r.Failed+1, cmp.Or(r.Failure, err.Error())
				mu.Unlock()
			}
		})
	}
	workers.Wait()
	r.Requests, r.Seconds = requests.Load(), time.Since(began).Seconds()
	return r
}

// requestPairs makes a request to each of two URLs in turn, each over a connection
// of its own that is kept.
func requestPairs(ctx context.Context, t task) (r clientResult, err error) {
	c, err := t.client()
	if err != nil {
		return r, err
	}
	const warm = 100
	for i := range warm + t.Count {
		// The second one finds warmer caches, so they alternate.
		urls := []string{t.To, t.Than}
		times := []*spread{&r.Times, &r.Than}
		if i%2 == 1 {
			slices.Reverse(urls)
			slices.Reverse(times)
		}
		for j, url := range urls {
			took, err := timed(func() error { _, _, err := ask(ctx, c, http.MethodGet, url); return err })
			if err != nil {
				return r, err
			}
			if i >= warm {
				*times[j] = append(*times[j], took)
			}
		}
	}
	return r, nil
}

// firstRequests makes one request to each of many hosts: a number takes the place
// of the star in the URL.
func firstRequests(ctx context.Context, t task) (r clientResult, err error) {
	for i := range t.Count {
		c, err := t.client()
		if err != nil {
			return r, err
		}
		url := strings.Replace(t.To, "*", fmt.Sprint("new-", i), 1)
		took, err := timed(func() error { _, _, err := ask(ctx, c, http.MethodGet, url); return err })
		if err != nil {
			return r, err
		}
		c.CloseIdleConnections()
		r.Times = append(r.Times, took)
	}
	return r, nil
}

// fetchBlob reads one large body.
func fetchBlob(ctx context.Context, t task) (r clientResult, err error) {
	c, err := t.client()
	if err != nil {
		return r, err
	}
	c.Timeout = 0
	began := time.Now()
	_, r.Bytes, err = ask(ctx, c, http.MethodGet, t.To)
	r.Seconds = time.Since(began).Seconds()
	return r, err
}
