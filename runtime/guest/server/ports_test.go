package server_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/server"
)

// helperEnv makes this test binary a program of a sandbox: its value is what it does.
const helperEnv = "DOZE_TEST_HELPER"

// helperMain runs the program and reports whether there was one.
func helperMain() bool {
	switch what, argument, _ := strings.Cut(os.Getenv(helperEnv), " "); what {
	case "listen": // on the addresses; SIGHUP closes the sockets and opens them again
		hup := make(chan os.Signal, 1)
		signal.Notify(hup, syscall.SIGHUP)
		for {
			open := listen(strings.Fields(argument))
			<-hup
			for _, l := range open {
				l.Close()
			}
		}
	case "serve": // with the statuses one after the other, the last repeatedly
		serveStatuses(strings.Fields(argument))
	default:
		return false
	}
	return true
}

func listen(addresses []string) (open []net.Listener) {
	for _, address := range addresses {
		network := "tcp6"
		if strings.Contains(address, ".") {
			network = "tcp4"
		}
		l, err := net.Listen(network, address)
		if err != nil {
			fmt.Println(err)
			os.Exit(3)
		}
		open = append(open, l)
	}
	fmt.Println("listening")
	return open
}

func serveStatuses(argument []string) {
	var requests atomic.Int32
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		statuses := argument[1:]
		status, _ := strconv.Atoi(statuses[min(int(requests.Add(1)), len(statuses))-1])
		if status == 0 { // without a response
			panic(http.ErrAbortHandler)
		}
		if r.URL.RequestURI() != "/health?x=1" || r.Host == "" {
			status = 404
		}
		w.WriteHeader(status)
	})}
	fmt.Println(srv.Serve(listen(argument[:1])[0]))
}

// helper is a command that runs this test binary as a program.
func helper(t testing.TB, what ...string) guest.Command {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return guest.Command{Argv: []string{self}, Env: map[string]string{helperEnv: strings.Join(what, " ")}}
}

// later is a command that runs another once a file exists.
func later(file string, c guest.Command) guest.Command {
	c.Command, c.Argv = "while [ ! -e "+file+" ]; do sleep 0.01; done; exec "+c.Argv[0], nil
	return c
}

// freePort returns a port on which no process listens. It is below the range from which the
// kernel assigns ports, so that no other test gets it.
func freePort(t testing.TB) uint16 {
	t.Helper()
	ports.Lock()
	defer ports.Unlock()
	for ; ports.next < 32000; ports.next++ {
		l, err := net.Listen("tcp", fmt.Sprint(":", ports.next))
		if err == nil {
			l.Close()
			ports.next++
			return ports.next - 1
		}
	}
	t.Fatal("no port is free")
	return 0
}

var ports = struct {
	sync.Mutex
	next uint16
}{next: uint16(20000 + os.Getpid()%10000)}

func reportPorts(cfg *server.Config) { cfg.ReportPorts = true }

// nextPorts returns the view of a port in the next event in which the condition holds.
func nextPorts(t *testing.T, events *guest.EventStream, port uint16, condition func(*guest.Listening) bool) *guest.Listening {
	t.Helper()
	for {
		ev := next(t, events)
		if ev.Type != guest.EventPorts {
			continue
		}
		var found *guest.Listening
		for _, l := range ev.Ports {
			if l.Port == port {
				found = &l
			}
		}
		if condition(found) {
			return found
		}
	}
}

func isOpen(l *guest.Listening) bool   { return l != nil }
func isClosed(l *guest.Listening) bool { return l == nil }

func TestPortsAreReportedWithTheirProcesses(t *testing.T) {
	c := start(t, reportPorts)
	events := subscribe(t, c)
	port := freePort(t)
	p := startProcess(t, c, guest.ProcessSpec{Name: "web", Command: helper(t, "listen", fmt.Sprint("127.0.0.1:", port), fmt.Sprint("[::1]:", port))})
	// The two sockets may be found one after the other.
	found := nextPorts(t, events, port, func(l *guest.Listening) bool { return l != nil && len(l.Addresses) == 2 })
	if found.PID != p.PID || found.Process != p.ID || found.Program == "" || !strings.Contains("server.test", found.Program) {
		t.Errorf("found %+v, the process is %+v", found, p)
	}
	again := subscribe(t, c)
	if found := nextPorts(t, again, port, isOpen); len(found.Addresses) != 2 {
		t.Errorf("a later reader got %+v", found)
	}
	if _, err := c.StopProcess(t.Context(), p.ID, 0); err != nil {
		t.Fatal(err)
	}
	nextPorts(t, events, port, isClosed)
}

func TestPortOfACommandHasNoBackgroundProcess(t *testing.T) {
	c := start(t, reportPorts)
	events := subscribe(t, c)
	port := freePort(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s, err := c.Exec(ctx, guest.ExecRequest{Command: helper(t, "listen", fmt.Sprint("127.0.0.1:", port))})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if found := nextPorts(t, events, port, isOpen); found.PID == 0 || found.Process != "" {
		t.Errorf("found %+v", found)
	}
	s.Close()
	nextPorts(t, events, port, isClosed)
}

func TestPortsAreReportedWithoutARequest(t *testing.T) {
	c := start(t, reportPorts)
	events := subscribe(t, c)
	next(t, events) // the ports of this machine
	port := freePort(t)
	l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", port))
	if err != nil {
		t.Fatal(err)
	}
	if found := nextPorts(t, events, port, isOpen); found.Process != "" {
		t.Errorf("found %+v", found)
	}
	l.Close()
	nextPorts(t, events, port, isClosed)
}

func TestReportedPortsAreBounded(t *testing.T) {
	c := start(t, reportPorts)
	events := subscribe(t, c)
	var last uint16
	for range guest.MaxListening + 20 {
		last = freePort(t)
		l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", last))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
	for {
		if ev := next(t, events); ev.Type == guest.EventPorts && len(ev.Ports) == guest.MaxListening {
			return
		}
	}
}

func TestPortReady(t *testing.T) {
	c := start(t, nil)
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0", "0.0.0.0:0", "[::]:0"} {
		t.Run(addr, func(t *testing.T) {
			l, err := net.Listen("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			port := uint16(l.Addr().(*net.TCPAddr).Port)
			if err := c.PortReady(t.Context(), port, 0); err != nil {
				t.Errorf("while it listens: %v", err)
			}
			l.Close()
			wantCode(t, c.PortReady(t.Context(), port, 30*time.Millisecond), guest.CodePortNotReady, "nothing listens")
			found := make(chan error, 1)
			go func() { found <- c.PortReady(t.Context(), port, 20*time.Second) }()
			if l, err = net.Listen("tcp", l.Addr().String()); err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			if err := <-found; err != nil {
				t.Errorf("after it listened again: %v", err)
			}
		})
	}
	if err := c.PortReady(t.Context(), 0, 0); codeOf(err) != guest.CodeInvalid {
		t.Errorf("port 0: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.PortReady(ctx, 1, time.Minute); !errors.Is(err, context.Canceled) {
		t.Errorf("with a canceled context: %v", err)
	}
}
