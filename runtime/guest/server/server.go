// Package server is the guest's side of package guest: it runs commands and
// processes, reads and writes files, and reports events of its sandbox. It is
// the body of cmd/doze-guest and can be used in-process by tests:
//
//	srv, err := server.New(server.Config{RunDir: t.TempDir(), LogDir: t.TempDir(), AnyPeer: true})
//	go srv.Serve(ctx)
//	client := guest.NewClient(srv.Socket())
//
// The background processes of a command are found by its process group, its session, its
// parents and a variable in its environment. A process that gets rid of all four
// lives as long as the sandbox: a daemon that also empties its environment, or
// that runs as another user (su app -c 'setsid server &'), because the kernel
// shows its environment only to that user and to CAP_SYS_PTRACE, which no sandbox
// has.
package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	// defaultGrace is what processes get between SIGTERM and SIGKILL when the
	// sandbox stops. Less than the 10 s that engines wait before they kill.
	defaultGrace = 5 * time.Second
	// handlersTimeout is how long the end waits for handlers whose connection
	// is closed; what they wait for is the kernel only.
	handlersTimeout = 5 * time.Second
	maxHeader       = 32 << 10
)

// Config of a Server. The zero value of each field but RunDir is usable.
type Config struct {
	// RunDir holds the sockets guest.SocketName and guest.SandboxSocketName, and must
	// exist. Existing files with these names are replaced.
	RunDir string
	// LogDir holds one log file per process name. Default: guest.LogDir.
	LogDir string
	// Root is where the paths of requests begin. Default: "/". Another root is for tests:
	// it does not confine commands.
	Root string
	// Workdir, below Root, is where commands run and relative paths begin.
	// Default: "/".
	Workdir string
	// Env of commands. Default: only PATH.
	Env []string
	// ReportPorts adds events with the ports on which processes listen.
	ReportPorts bool
	// Version of this build, for Hello.
	Version string
	// AnyPeer also serves processes of the server's own PID namespace. Without
	// it, only processes outside of the sandbox may use the guest's socket.
	AnyPeer bool
	// Init: this process is PID 1. It reaps every orphan, protects itself from the
	// kernel's OOM killer, and ends all processes when Serve ends.
	Init bool
	// Grace between SIGTERM and SIGKILL for what still runs when Serve ends.
	// Default: 5 s.
	Grace time.Duration
	// Trim returns memory that an idle guest does not need to the kernel. Default: as
	// Init this process's memory, otherwise none.
	Trim func()
	// Log for what no request reports. Default: none.
	Log *slog.Logger

	drain         time.Duration // see drainMax; tests shorten it
	retentionStep time.Duration // of watches; tests shorten it
	surroundings  time.Duration // see guest.SurroundingsWait; tests shorten it
}

// Server is the guest. Make it with New.
type Server struct {
	cfg       Config
	log       *slog.Logger
	reaper    *reaper
	procs     *processes
	terminals *registry[*terminal, guest.Terminal]
	// heldTerminals counts the terminals whose programs wait for viewers.
	heldTerminals atomic.Int64
	sessions      *registry[*session, guest.Session]
	watches       *watches
	ports         *ports
	events        *hub
	requests      *requests
	spill         *discarder
	writes        *fileLocks
	// tunnels is the context of the connections with streamed input, and closeTunnels ends it.
	tunnels      context.Context
	closeTunnels context.CancelFunc
	trust        *trusted

	socket     net.Listener
	holdSocket net.Listener
	http       *http.Server
	holds      *http.Server
}

// New makes a Server that listens but does not serve yet. Clients may connect
// from then on. The caller serves it.
func New(cfg Config) (*Server, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, log: cfg.Log, events: newHub(), requests: newRequests(cfg.Trim), spill: &discarder{}, writes: newFileLocks(), trust: newTrusted(cfg)}
	s.tunnels, s.closeTunnels = context.WithCancel(context.Background())
	var err error
	if s.socket, err = listen(cfg.RunDir, guest.SocketName); err != nil {
		return nil, err
	}
	if !cfg.AnyPeer {
		s.socket = nodeOnly{s.socket}
	}
	if s.holdSocket, err = listen(cfg.RunDir, guest.SandboxSocketName); err != nil {
		s.socket.Close()
		return nil, err
	}
	s.holdSocket = limitHolds(s.holdSocket)
	s.ports = newPorts(s)
	s.reaper = newReaper(cfg.Init, s.ports.kick)
	s.procs = newProcesses(s)
	os.RemoveAll(s.sessionsFolder()) // of an earlier start of the sandbox
	s.terminals = newTerminals(s)
	s.sessions = newSessions(s)
	s.watches = newWatches(s)
	// Idle connections have no deadline: only the node has any, for later requests. A
	// deadline that passed while the sandbox slept would close a connection just when
	// it is used again.
	s.http = &http.Server{
		Handler:        s.requests.watch(s.ports.follow(s.routes())),
		MaxHeaderBytes: maxHeader,
		ErrorLog:       slog.NewLogLogger(cfg.Log.Handler(), slog.LevelWarn),
	}
	s.holds = s.newHoldServer(s.http.ErrorLog)
	return s, nil
}

func (c *Config) setDefaults() error {
	if c.RunDir == "" {
		return errors.New("guest server: RunDir is not set")
	}
	c.LogDir = cmp.Or(c.LogDir, guest.LogDir)
	c.Root = filepath.Clean(cmp.Or(c.Root, "/"))
	c.Workdir = filepath.Join("/", c.Workdir)
	c.drain = cmp.Or(c.drain, drainMax)
	c.surroundings = cmp.Or(c.surroundings, guest.SurroundingsWait)
	c.retentionStep = cmp.Or(c.retentionStep, retentionStep)
	c.Grace = cmp.Or(c.Grace, defaultGrace)
	if c.Trim == nil {
		c.Trim = func() {}
		if c.Init {
			c.Trim = trimMemory
		}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if _, ok := lookup(c.Env, "PATH"); !ok {
		c.Env = append(c.Env[:len(c.Env):len(c.Env)], "PATH="+defaultPath)
	}
	return nil
}

// Socket is the path of the socket for guest.NewClient.
func (s *Server) Socket() string { return filepath.Join(s.cfg.RunDir, guest.SocketName) }

// Serve serves until ctx ends. It then ends every process, SIGTERM first, SIGKILL
// after Config.Grace, and returns nil. As Init it ends commands in the same way
// and lets clients read how theirs ended; otherwise commands are killed and their
// streams cut off. A failing socket is an error.
func (s *Server) Serve(ctx context.Context) error {
	failed := make(chan error, 2)
	var serving sync.WaitGroup
	serving.Go(func() { failed <- s.http.Serve(s.socket) })      // ended by s.http.Shutdown
	serving.Go(func() { failed <- s.holds.Serve(s.holdSocket) }) // ended by s.holds.Close
	polling, endPolling := context.WithCancel(context.Background())
	serving.Go(func() { s.ports.run(polling) }) // ended by endPolling
	s.requests.trimSoon()                       // the memory that the start needed
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
		err = fmt.Errorf("serve %s: %w", s.Socket(), err)
	}
	s.shutdown()
	endPolling()
	serving.Wait()
	s.ports.close()
	return err
}

func (s *Server) shutdown() {
	s.holds.Close()
	s.procs.refuse()
	s.terminals.refuse()
	s.sessions.refuse()
	if s.cfg.Init {
		endAll(s.cfg.Grace)
	}
	s.terminals.closeAll()
	s.sessions.closeAll()
	s.procs.close()
	s.events.close()
	s.watches.close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if s.cfg.Init {
		s.http.Shutdown(ctx)
		s.requests.drain(ctx)
	}
	s.http.Close()
	s.closeTunnels()
	s.requests.wait(handlersTimeout)
	s.procs.wait()
	s.spill.close()
	s.reaper.close()
}

func (s *Server) routes() http.Handler {
	mux := http.NewServeMux()
	route := func(pattern string, h handler) { mux.Handle(pattern, s.handle(h)) }
	value := func(pattern string, h jsonHandler) { route(pattern, h.respond) }
	value("GET "+guest.RouteHello, s.hello)
	value("PUT "+guest.RouteTrust, s.putTrust)
	route("POST "+guest.RouteExec, s.exec)
	value("POST "+guest.RouteProcess, s.startProcess)
	value("GET "+guest.RouteProcess, s.listProcesses)
	value("POST "+guest.RouteProcess+"/{id}"+guest.SuffixStop, s.stopProcess)
	value("POST "+guest.RouteProcess+"/{id}"+guest.SuffixSignal, s.signalProcess)
	value("POST "+guest.RouteProcess+"/{id}"+guest.SuffixWait, s.waitProcess)
	route("GET "+guest.RouteProcess+"/{id}"+guest.SuffixLogs, s.logs)
	value("POST "+guest.RouteTerminal, s.openTerminal)
	value("DELETE "+guest.RouteTerminal+"/{id}", s.terminals.respondClose)
	route("GET "+guest.RouteTerminal+"/{id}"+guest.SuffixAttach, s.attachTerminal)
	value("POST "+guest.RouteSession, s.openSession)
	value("DELETE "+guest.RouteSession+"/{id}", s.sessions.respondClose)
	value("POST "+guest.RouteSession+"/{id}"+guest.SuffixInterrupt, s.interruptSession)
	value("PUT "+guest.RouteFile, s.writeFile)
	route("GET "+guest.RouteFile, s.readFile)
	value("DELETE "+guest.RouteFile, s.remove)
	value("GET "+guest.RouteStat, s.stat)
	route("GET "+guest.RouteList, s.list)
	route("GET "+guest.RouteSearch, s.search)
	value("POST "+guest.RouteMkdir, s.mkdir)
	value("POST "+guest.RouteMove, s.move)
	value("PUT "+guest.RouteArchive, s.putArchive)
	route("GET "+guest.RouteArchive, s.getArchive)
	value("GET "+guest.RoutePort, s.portReady)
	route("GET "+guest.RouteEvents, s.streamEvents)
	route("POST "+guest.RouteWatch, s.streamWatch)
	route("POST "+guest.RouteTrim, s.trimNow)
	return mux
}

func (s *Server) hello(*http.Request) (any, error) {
	return guest.Hello{Protocol: guest.ProtocolVersion, Version: s.cfg.Version, PID: os.Getpid(), Trust: s.trust.last.Load().digest}, nil
}
