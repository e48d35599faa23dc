package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"sync/atomic"
)

// eachVersion runs f with a client that speaks only HTTP/1.1, and with one that speaks only
// HTTP/2.
func eachVersion(f func(ctx context.Context, c *http.Client, url string) error) func(context.Context, []string) error {
	return func(ctx context.Context, args []string) error {
		for _, major := range []int{1, 2} {
			t := &http.Transport{Protocols: new(http.Protocols), MaxConnsPerHost: 8}
			t.Protocols.SetHTTP1(major == 1)
			t.Protocols.SetHTTP2(major == 2)
			if err := f(ctx, &http.Client{Transport: t}, args[0]); err != nil {
				return fmt.Errorf("HTTP/%d: %w", major, err)
			}
		}
		return nil
	}
}

// send sends a request and checks its response.
func send(ctx context.Context, c *http.Client, method, url string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return nil, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		resp.Body.Close()
		return nil, fmt.Errorf("%s: %s", resp.Status, text)
	}
	return resp, nil
}

// fetch returns the body of the response to a GET.
func fetch(ctx context.Context, c *http.Client, url string) (string, error) {
	resp, err := send(ctx, c, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return string(text), err
}

// get prints the response to Go's default client.
func get(ctx context.Context, args []string) error {
	text, err := fetch(ctx, http.DefaultClient, args[0])
	fmt.Print(text)
	return err
}

// events reads a stream of server-sent events, each of them sent only when the
// previous one was acknowledged: a proxy that delays one delays all.
func events(ctx context.Context, c *http.Client, url string) error {
	resp, err := send(ctx, c, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	seen := 0
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		id, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if _, err := fetch(ctx, c, url+"/ack?"+id); err != nil {
			return err
		}
		seen++
	}
	if seen != 5 {
		return fmt.Errorf("%d events came, not 5", seen)
	}
	return nil
}

// trailers sends a body of unknown length with a trailer, and reads one.
func trailers(ctx context.Context, c *http.Client, url string) error {
	// No *strings.Reader, whose length is known.
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, io.MultiReader(strings.NewReader("a body")))
	if err != nil {
		return err
	}
	req.Trailer = http.Header{"X-Sent": {"after the body"}}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if string(text) != "a body" || resp.Trailer.Get("X-Got") != "after the body" {
		return fmt.Errorf("body %q, trailer %q", text, resp.Trailer)
	}
	return nil
}

// reuse sends requests one after another, which need one connection.
func reuse(ctx context.Context, c *http.Client, url string) error {
	made := 0
	traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
		if !i.Reused {
			made++
		}
	}})
	for range 20 {
		if _, err := fetch(traced, c, url); err != nil {
			return err
		}
	}
	if made != 1 {
		return fmt.Errorf("20 requests took %d connections", made)
	}
	return nil
}

// many sends concurrent requests.
func many(ctx context.Context, c *http.Client, url string) error {
	const requests = 200
	var wait sync.WaitGroup
	var failed atomic.Pointer[error]
	for i := range requests {
		wait.Go(func() {
			path := fmt.Sprintf("%s?number=%d", url, i)
			text, err := fetch(ctx, c, path)
			if err == nil && !strings.Contains(text, fmt.Sprintf(`?number=%d"`, i)) {
				err = fmt.Errorf("%s got another's response: %.300s", path, text)
			}
			if err != nil {
				failed.Store(&err)
			}
		})
	}
	wait.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}
