package stack

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
)

// splicer connects every flow to a server of the test.
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

// One stream between a process in a sandbox's network and a server on the node's
// loopback, through a real device, the stack and a splice.
func BenchmarkStream(b *testing.B) {
	const piece = 1 << 20
	for _, direction := range []string{"out", "in"} {
		b.Run(direction, func(b *testing.B) {
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				b.Fatal(err)
			}
			defer listener.Close()
			k, device := newKernel(b)
			s, err := New(Config{Device: device, Handler: splicer{listener.Addr().String()}})
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
			// Of both ends and the kernel too; it says more than the time on a busy machine.
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

// What a sandbox costs in memory: with a stack that nobody used, one that has a
// netstack, and per connection on which nothing moves.
func BenchmarkMemory(b *testing.B) {
	const stacks, connections = 100, 500
	for b.Loop() {
		h, conns := accepted(b)
		var files []*os.File
		var all []*Stack
		start := inUse()
		for range stacks {
			ours, theirs := socketPair(b)
			s, err := New(Config{Device: ours, Handler: h, Limits: Limits{Attempts: 1000}})
			if err != nil {
				b.Fatal(err)
			}
			files, all = append(files, theirs), append(all, s)
		}
		idle := inUse()
		for _, file := range files { // which is reset, after a netstack was made for it
			if _, err := file.Write(tcpPacket(header.TCPFlagAck, 1, 443, 0, nil)); err != nil {
				b.Fatal(err)
			}
			if _, err := file.Read(make([]byte, maxPacket)); err != nil {
				b.Fatal(err)
			}
		}
		used := inUse()
		p := newPeer(b, files[0])
		for range connections {
			client, err := gonet.DialContextTCP(context.Background(), p.stack,
				tcpip.FullAddress{Addr: tcpip.AddrFrom4([4]byte{198, 18, 7, 9}), Port: 443}, ipv4.ProtocolNumber)
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { client.Close() })
			<-conns
		}
		// Both ends are here, and weigh about the same.
		open := inUse()
		b.ReportMetric(float64(idle-start)/stacks, "B/idle")
		b.ReportMetric(float64(used-idle)/stacks, "B/used")
		b.ReportMetric(float64(open-used)/connections/2, "B/connection")
		for n, s := range all {
			_ = s.Close()
			if n > 0 {
				_ = files[n].Close()
			}
		}
	}
}

func inUse() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}
