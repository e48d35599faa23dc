package stack

import (
	"context"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// splicer is a Handler that connects every flow to a server of the test.
type splicer struct{ to string }

func (s splicer) DNS(context.Context, netip.Addr, []byte) []byte { return nil }

func (s splicer) TCP(ctx context.Context, f *Flow) {
	up, err := net.Dial("tcp", s.to)
	if err != nil {
		return
	}
	defer up.Close()
	conn, err := f.Accept()
	if err != nil {
		return
	}
	stop := context.AfterFunc(ctx, func() { up.Close() })
	defer stop()
	var both sync.WaitGroup
	both.Go(func() {
		_, _ = io.Copy(up, conn)
		_ = up.(*net.TCPConn).CloseWrite()
	})
	both.Go(func() {
		_, _ = io.Copy(conn, up)
		_ = conn.CloseWrite()
	})
	both.Wait()
}

// BenchmarkStream measures one stream between a process in a sandbox's network and a
// server on the node's loopback, through a real device, the stack and a splice.
func BenchmarkStream(b *testing.B) {
	const piece = 1 << 20
	for _, direction := range []string{"out", "in"} {
		b.Run(direction, func(b *testing.B) {
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				b.Fatal(err)
			}
			defer listener.Close()
			k, device, own := newKernel(b)
			s, err := New(complete(Config{Device: device, Listener: own, Handler: splicer{listener.Addr().String()}}))
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			client, err := k.dial("tcp", "198.18.1.1:443")
			if err != nil {
				b.Fatal(err)
			}
			server, err := listener.Accept()
			if err != nil {
				b.Fatal(err)
			}
			from, to := client, server
			if direction == "in" {
				from, to = server, client
			}
			b.SetBytes(piece)
			ended := make(chan struct{})
			go func() { // ends with the stream
				defer close(ended)
				buf := make([]byte, piece)
				for {
					if _, err := to.Read(buf); err != nil {
						return
					}
				}
			}()
			buf := make([]byte, piece)
			before := cpuTime(b)
			for b.Loop() {
				if _, err := from.Write(buf); err != nil {
					b.Fatal(err)
				}
			}
			// This includes both ends and the kernel; on a busy machine it means more than the time.
			b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/op")
			_ = from.Close()
			<-ended
			_ = to.Close()
		})
	}
}

func cpuTime(b *testing.B) time.Duration {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
