package guest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// scriptedGuest runs the script for each connection's first request, whose
// end closes the connection.
func scriptedGuest(t *testing.T, script func(*http.Request, net.Conn)) *Client {
	t.Helper()
	socket := filepath.Join(t.TempDir(), SocketName)
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var scripts sync.WaitGroup
	go func() { // ended by l.Close
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			scripts.Go(func() { // ended by the script, or with the test
				defer conn.Close()
				stop := context.AfterFunc(t.Context(), func() { conn.Close() })
				defer stop()
				if req, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
					script(req, conn)
				}
			})
		}
	}()
	c := NewClient(socket)
	t.Cleanup(func() { c.Close(); l.Close(); <-done; scripts.Wait() })
	return c
}

// gone waits until the other end has closed the connection.
func gone(conn net.Conn) { io.Copy(io.Discard, conn) }

func TestGuestThatStopsInTheMiddleIsLeft(t *testing.T) {
	c := scriptedGuest(t, func(_ *http.Request, conn net.Conn) {
		io.WriteString(conn, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nxx\r\n")
		gone(conn)
	})
	c.stall = 20 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	read := func(r io.ReadCloser, err error) error {
		if err != nil {
			return err
		}
		defer r.Close()
		_, err = io.Copy(io.Discard, r)
		return err
	}
	f, err := c.ReadFile(ctx, "/x", nil)
	if err == nil {
		err = read(f.Body, nil)
	}
	_, _, listed := c.List(ctx, "/x", ListOptions{})
	for call, err := range map[string]error{"ReadFile": err, "GetArchive": read(c.GetArchive(ctx, "/x")), "List": listed} {
		if !errors.Is(err, ErrNoResponse) {
			t.Errorf("%s: %v", call, err)
		}
	}
}

// A log is small: a guest that sends without an end is hostile.
func TestLogThatDoesNotEndIsLeft(t *testing.T) {
	for name, tc := range map[string]struct {
		frame string
		again bool
	}{
		"silent":       {frame(FrameStdout, "x"), false},
		"skipping":     {frame(FrameSkipped, `{"bytes":1}`), true},
		"empty frames": {frame(FrameStdout, ""), true},
	} {
		t.Run(name, func(t *testing.T) {
			c := scriptedGuest(t, func(_ *http.Request, conn net.Conn) {
				_, err := conn.Write(chunked(tc.frame, false))
				for tc.again && err == nil {
					_, err = fmt.Fprintf(conn, "%x\r\n%s\r\n", len(tc.frame), tc.frame)
				}
				gone(conn)
			})
			c.timeout = 100 * time.Millisecond
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			s, err := c.Logs(ctx, "p-aaaaaaaa", false)
			for err == nil {
				_, err = s.Next()
			}
			if !errors.Is(err, ErrNoResponse) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestGuestThatTakesNothingOfAnUploadIsLeft(t *testing.T) {
	release := make(chan struct{})
	c := scriptedGuest(t, func(*http.Request, net.Conn) { <-release })
	defer close(release)
	c.stall = 20 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := c.WriteFile(ctx, "/x", 0, io.LimitReader(zeroReader{}, 64<<20)); !errors.Is(err, ErrNoResponse) {
		t.Errorf("WriteFile: %v", err)
	}
}

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// Each of these responds only when a call that began later has been given up, so
// it took longer than any bound that it must not have.
func TestWhatMayTakeLongIsWaitedFor(t *testing.T) {
	for name, call := range map[string]func(context.Context, *Client) error{
		"a silent command": runCommand,
		"a silent log": func(ctx context.Context, c *Client) error {
			s, err := c.Logs(ctx, "p-aaaaaaaa", true)
			for err == nil {
				_, err = s.Next()
			}
			if err == io.EOF {
				return nil
			}
			return err
		},
		"removing": func(ctx context.Context, c *Client) error { return c.Remove(ctx, "/x", true, "") },
		"moving": func(ctx context.Context, c *Client) error {
			_, err := c.Move(ctx, "/x", "/y", "")
			return err
		},
		"stopping with grace": func(ctx context.Context, c *Client) error {
			_, err := c.StopProcess(ctx, "p-aaaaaaaa", time.Minute)
			return err
		},
		"a port": func(ctx context.Context, c *Client) error { return c.PortReady(ctx, 1, time.Minute) },
	} {
		t.Run(name, func(t *testing.T) {
			began, late := make(chan struct{}), make(chan struct{})
			stream := strings.HasPrefix(name, "a silent")
			c := scriptedGuest(t, func(r *http.Request, conn net.Conn) {
				if r.URL.Path == RouteStat { // without a response
					gone(conn)
					return
				}
				response := body(`{"id":"p-aaaaaaaa","pid":1,"state":"exited","restart":"never","exit_code":0}`)
				switch {
				case r.URL.Path == RouteExec:
					response = chunked(frame(FrameStart, `{"pid":1}`)+frame(FrameComplete, `{}`), true)
				case strings.HasSuffix(r.URL.Path, SuffixLogs):
					response = chunked(frame(FrameExit, `{"id":"p-aaaaaaaa","pid":1,"state":"exited","restart":"never","exit_code":0}`), true)
				}
				if stream {
					end := strings.Index(string(response), "\r\n\r\n") + 4
					conn.Write(response[:end]) // begins immediately
					response = response[end:]
				}
				close(began)
				<-late
				conn.Write(response)
			})
			impatient := &Client{transport: c.transport, dedicated: c.dedicated, timeout: 100 * time.Millisecond, stall: c.stall}
			c.stall = impatient.timeout / 50
			if !stream {
				c.timeout = c.stall
			}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			ended := make(chan error, 1)
			go func() { ended <- call(ctx, c) }()
			<-began
			if _, err := impatient.Stat(ctx, "/x", StatOptions{}); !errors.Is(err, ErrNoResponse) {
				t.Errorf("a guest that does not respond: %v", err)
			}
			close(late)
			if err := <-ended; err != nil {
				t.Errorf("given up: %v", err)
			}
		})
	}
}

func TestStreamThatIsCutInALineIsLost(t *testing.T) {
	for name, response := range map[string][]byte{
		"listing": chunked(`{"entry":{"name":"x"}}`+"\n"+`{"ent`, true),
		"events":  chunked(`{"type":"hold","hold":1}`+"\n"+`{"ty`, true),
	} {
		errs, _ := everyCall(t.Context(), hostileGuest(t, response))
		if call := map[string]string{"listing": "List", "events": "Events"}[name]; !errors.Is(errs[call], ErrLost) {
			t.Errorf("%s: %v", name, errs[call])
		}
	}
}
