package server

import (
	"bufio"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

// pipes is a listener whose connections a test makes.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	conn, ok := <-p
	if !ok {
		return nil, net.ErrClosed
	}
	return conn, nil
}

func (p pipes) Close() error   { close(p); return nil }
func (p pipes) Addr() net.Addr { return &net.UnixAddr{Net: "unix"} }

// dial adds a connection, which may wait to be accepted.
func (p pipes) dial() net.Conn {
	here, there := net.Pipe()
	p <- there
	return here
}

func TestConnectionsFromInsideAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		waiting := make(pipes, 20)
		srv := (&Server{events: newHub()}).newHoldServer(log.New(io.Discard, "", 0))
		served := make(chan error)
		go func() { served <- srv.Serve(limitHolds(waiting)) }() // ended by Close
		responses := make(chan int, 20)
		ask := func(conn net.Conn, n int) { // ended by its response
			defer conn.Close()
			if _, err := fmt.Fprint(conn, "POST /hold HTTP/1.1\r\nHost: inside\r\n\r\n"); err != nil {
				t.Errorf("connection %d: %v", n, err)
				return
			}
			res, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil || res.StatusCode != http.StatusBadRequest {
				t.Errorf("connection %d: %+v, %v", n, res, err)
				return
			}
			io.Copy(io.Discard, res.Body)
			responses <- n
		}
		var silent []net.Conn
		for range maxHoldConns {
			silent = append(silent, waiting.dial())
		}
		go ask(waiting.dial(), 9)
		synctest.Wait()
		if len(waiting) != 1 || len(responses) != 0 {
			t.Fatalf("%d connections wait, %d have a response", len(waiting), len(responses))
		}
		for i, conn := range silent { // each has a response, and the first makes room for the ninth
			go ask(conn, i+1)
			synctest.Wait()
			if i == 0 && (len(waiting) != 0 || len(responses) != 2) {
				t.Errorf("after one ended, %d connections wait, %d have a response", len(waiting), len(responses))
			}
		}
		if len(responses) != maxHoldConns+1 {
			t.Errorf("%d connections have a response", len(responses))
		}
		idle := waiting.dial()
		began := time.Now()
		if n, err := idle.Read(make([]byte, 1)); err == nil || time.Since(began) != holdTimeout {
			t.Errorf("a silent connection got %d bytes, %v after %s", n, err, time.Since(began))
		}
		srv.Close()
		if err := <-served; err != http.ErrServerClosed {
			t.Error(err)
		}
	})
}

func TestServerLimitsConnectionsFromInside(t *testing.T) {
	srv, err := New(Config{RunDir: t.TempDir(), LogDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer srv.Close()
	if got, want := fmt.Sprintf("%T", srv.holdSocket), fmt.Sprintf("%T", limitHolds(nil)); got != want {
		t.Errorf("the listener is %s, want %s", got, want)
	}
}
