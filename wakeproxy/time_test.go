package wakeproxy

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

// The clock of these tests is synctest's: they wait for nothing.

func TestAttemptsToConnectAreMadeWithoutBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := gates{open: map[gateKey]*gate{}}
		start := time.Now()
		var at []int
		_, err := g.wait(t.Context(), gateKey{}, func(context.Context) (net.Conn, error) {
			if at = append(at, int(time.Since(start).Milliseconds())); len(at) < 10 {
				return nil, syscall.ECONNREFUSED
			}
			return nil, nil
		})
		if want := []int{0, 2, 5, 10, 20, 45, 70, 95, 120, 145}; err != nil || !slices.Equal(at, want) {
			t.Errorf("attempts at %v ms, %v; want %v", at, err, want)
		}
	})
}

// a server that is up after 500 ms is not kept waiting for seconds.
func TestWaitLimits(t *testing.T) {
	for _, test := range []struct {
		name     string
		navigate bool
		kind     sandbox.WakeKind
		delay    time.Duration // the wake, or the server's start after a cold one
		status   int
		after    time.Duration
	}{
		{"a browser is held for a second", true, sandbox.WakeWarm, 999 * time.Millisecond, 200, 999 * time.Millisecond},
		{"then it gets the page", true, sandbox.WakeWarm, 1001 * time.Millisecond, 503, time.Second},
		{"the port counts", true, sandbox.WakeCold, 1001 * time.Millisecond, 503, time.Second},
		{"everyone else is held", false, sandbox.WakeWarm, 29 * time.Second, 200, 29 * time.Second},
		{"for the port too", false, sandbox.WakeCold, 500 * time.Millisecond, 200, 520 * time.Millisecond},
		{"for 30 s", false, sandbox.WakeWarm, 31 * time.Second, 504, 30 * time.Second},
		{"port and wake together", false, sandbox.WakeCold, 31 * time.Second, 504, 30 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				node := newFakeNode(t, "", sandbox.Port{})
				proxy := New(node, slog.New(slog.DiscardHandler))
				defer proxy.Close()
				start := time.Now()
				var waking chan struct{}
				if test.kind == sandbox.WakeWarm {
					waking = make(chan struct{})
					time.AfterFunc(test.delay, func() { close(waking) })
				}
				node.sleep(test.kind, waking)
				if test.kind == sandbox.WakeCold {
					time.AfterFunc(test.delay, func() { node.set(func(n *fakeNode) { n.pipe = true }) })
				}
				// The transport without the sending.
				next := func(w http.ResponseWriter, r *http.Request) error {
					if x := exchangeOf(r.Context()); x.woke == sandbox.WakeCold {
						if err := x.awaitPort(r.Context()); err != nil {
							return err
						}
					}
					_, err := io.WriteString(w, "hello")
					return err
				}
				r := httptest.NewRequestWithContext(t.Context(), "GET", "/", nil)
				r.Host = previewHost()
				if test.navigate {
					asNavigation(r)
				}
				w := httptest.NewRecorder()
				NewHandler(proxy, next, Options{Domains: []string{domain}}).ServeHTTP(w, r)
				if took := time.Since(start); w.Code != test.status || took != test.after {
					t.Errorf("%d after %v, want %d after %v", w.Code, took, test.status, test.after)
				}
				if page := strings.Contains(w.Header().Get("Content-Type"), "text/html"); page != (test.status == 503) {
					t.Errorf("response of type %s", w.Header().Get("Content-Type"))
				}
				synctest.Wait()
				time.Sleep(test.delay) // the timers end in the bubble
			})
		})
	}
}

// The first final failure ends all waits immediately.
func TestFinalFailureEndsTheWaitOfAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := gates{open: map[gateKey]*gate{}}
		start := time.Now()
		failures := make(chan error, 20)
		dials := 0
		for range cap(failures) {
			go func() {
				_, err := g.wait(t.Context(), gateKey{}, func(context.Context) (net.Conn, error) {
					if dials++; dials < 5 { // one at a time
						return nil, syscall.ECONNREFUSED
					}
					return nil, &sandbox.WakeError{ID: testID, Err: errors.New("its container ended")}
				})
				failures <- err
			}()
		}
		for range cap(failures) {
			var failed *sandbox.WakeError
			if err := <-failures; !errors.As(err, &failed) {
				t.Errorf("a waiter got %v", err)
			}
		}
		if took := time.Since(start); took != 20*time.Millisecond || dials != 5 {
			t.Errorf("after %v and %d attempts", took, dials)
		}
	})
}
