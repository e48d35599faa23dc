package dns

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/time/rate"
)

// overTCP serves one connection. It returns the connection's other end and a channel that
// is closed when the connection has ended.
func overTCP(ctx context.Context, s *Server) (net.Conn, <-chan struct{}) {
	ours, theirs := net.Pipe()
	over := make(chan struct{})
	go func() { // ends with the connection
		defer close(over)
		s.ServeConn(ctx, ours)
	}()
	return theirs, over
}

func framed(t *testing.T, q *dns.Msg) []byte {
	b, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)
}

func TestQueriesOverTCPMayBePipelined(t *testing.T) {
	conn, over := overTCP(t.Context(), newTestServer(Config{}).Server)
	first, second := query("one.example", dns.TypeA), query("denied.example", dns.TypeA)
	var sender sync.WaitGroup
	sender.Go(func() {
		for _, b := range append(framed(t, first), framed(t, second)...) { // byte by byte
			_, _ = conn.Write([]byte{b})
		}
	})
	client := &dns.Conn{Conn: conn}
	for _, want := range []struct {
		id    uint16
		rcode int
	}{{first.Id, dns.RcodeSuccess}, {second.Id, dns.RcodeRefused}} {
		m, err := client.ReadMsg()
		if err != nil || m.Id != want.id || m.Rcode != want.rcode {
			t.Errorf("%s, %v", m, err)
		}
	}
	sender.Wait()
	conn.Close()
	<-over
}

func TestOtherMessagesEndConnectionsImmediately(t *testing.T) {
	answer := query("x.example", dns.TypeA)
	answer.Response = true
	for name, message := range map[string][]byte{
		"an answer": framed(t, answer),
		"too long":  {0xff, 0xff},
		"too short": {0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begun := time.Now()
				conn, over := overTCP(t.Context(), newTestServer(Config{}).Server)
				if _, err := conn.Write(message); err != nil {
					t.Fatal(err)
				}
				<-over
				if _, err := conn.Read(make([]byte, 1)); err != io.EOF || time.Since(begun) != 0 {
					t.Errorf("%v after %s", err, time.Since(begun))
				}
			})
		})
	}
	t.Run("the context's end", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		_, over := overTCP(ctx, newTestServer(Config{}).Server)
		cancel()
		<-over
	})
}

func TestSilentConnectionsEnd(t *testing.T) {
	whole := framed(t, query("x.example", dns.TypeA))
	for name, sent := range map[string][]byte{
		"nothing":        nil,
		"half a query":   whole[:20],
		"unread answers": whole,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begun := time.Now()
				conn, over := overTCP(t.Context(), newTestServer(Config{}).Server)
				if _, err := conn.Write(sent); err != nil {
					t.Fatal(err)
				}
				<-over
				if took := time.Since(begun); took != patience {
					t.Errorf("after %s", took)
				}
			})
		})
	}
}

func TestFloodsOverTCPWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTestServer(Config{}).Server
		s.limiter = rate.NewLimiter(1, 1)
		conn, over := overTCP(t.Context(), s)
		client := &dns.Conn{Conn: conn}
		begun := time.Now()
		for range 5 {
			if _, err := conn.Write(framed(t, query("x.example", dns.TypeA))); err != nil {
				t.Fatal(err)
			}
			if _, err := client.ReadMsg(); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(begun); took != 4*time.Second {
			t.Errorf("5 queries took %s", took)
		}
		conn.Close()
		<-over
	})
}
