package server

import (
	"cmp"
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	maxProcesses = 256 // that run or wait for a restart; more are CodeTooMany
	maxHistory   = 64  // ended ones that are remembered; older ones are forgotten, with their logs
	maxName      = 64
	// maxShown bounds a command line and a folder in a view, so that a list of all
	// processes stays below guest.MaxJSON.
	maxShown = 1 << 10
)

// processes are the background processes of the sandbox.
type processes struct {
	server *Server
	wg     sync.WaitGroup // of all goroutines that processes have

	mu      sync.Mutex
	active  map[string]*process // by name: running, or about to be started
	history []*process          // ended, oldest first
	unnamed int                 // how many had no name
	closed  bool
}

func newProcesses(s *Server) *processes {
	ps := &processes{server: s, active: map[string]*process{}}
	ps.pruneLogs()
	return ps
}

// pruneLogs removes the oldest log files that an earlier start of the sandbox
// left, so that they do not add up.
func (ps *processes) pruneLogs() {
	files, _ := filepath.Glob(filepath.Join(ps.server.cfg.LogDir, "*.log"))
	age := make(map[string]time.Time, len(files))
	for _, f := range files {
		if info, err := os.Lstat(f); err == nil {
			age[f] = info.ModTime()
		}
	}
	slices.SortFunc(files, func(a, b string) int { return age[b].Compare(age[a]) })
	for _, f := range files[min(len(files), maxHistory):] {
		removeLog(f)
	}
}

func removeLog(path string) {
	os.Remove(path)
	os.Remove(path + ".1")
}

// start starts a process. One that cannot be started leaves no trace.
func (ps *processes) start(spec guest.ProcessSpec) (guest.Process, error) {
	if err := checkSpec(&spec); err != nil {
		return guest.Process{}, err
	}
	p := &process{spec: spec, done: make(chan struct{})}
	p.restart, p.retire = context.WithCancel(context.Background())
	if err := ps.reserve(p); err != nil {
		return guest.Process{}, err
	}
	run, err := ps.startRun(p)
	if err != nil {
		ps.mu.Lock()
		delete(ps.active, p.view.Name)
		ps.mu.Unlock()
		return guest.Process{}, err
	}
	ps.openLog(p)
	if !ps.started(p, run) {
		run.tree.kill()
		run.close()
		p.log.close()
		return guest.Process{}, errStopping
	}
	ps.wg.Go(func() { ps.supervise(p) }) // ended by the process, or by close
	return ps.viewOf(p), nil
}

var errStopping = refuse(guest.CodeInternal, "the sandbox is stopping")

func checkSpec(spec *guest.ProcessSpec) error {
	spec.Restart = cmp.Or(spec.Restart, guest.RestartNever)
	if !slices.Contains(guest.Restarts, spec.Restart) {
		return refuse(guest.CodeInvalid, "restart %q is unknown; it is \"never\", \"always\" or \"on_wake\"", spec.Restart)
	}
	if spec.ID != "" && !guest.IsProcessID(spec.ID) {
		return refuse(guest.CodeInvalid, "id %.20q is unusable", spec.ID)
	}
	return checkName("name", spec.Name)
}

// checkName checks a name that a client chose, or left empty, for a field of its request.
func checkName(field, name string) error {
	const allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
	if len(name) > maxName || strings.Trim(name, allowed) != "" || strings.HasPrefix(name, ".") || strings.HasPrefix(name, "-") {
		return refuse(guest.CodeInvalid, "%s %.100q is unusable; it has at most %d letters, digits, \".\", \"_\" and \"-\", and begins with neither \".\" nor \"-\"", field, name, maxName)
	}
	return nil
}

// reserve takes the process's name, or picks one.
func (ps *processes) reserve(p *process) error {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	name := p.spec.Name
	switch {
	case ps.closed:
		return errStopping
	case len(ps.active) >= maxProcesses:
		return refuse(guest.CodeTooMany, "%d processes run already, which is the limit", maxProcesses)
	case name != "" && ps.active[name] != nil:
		return refuse(guest.CodeExists, "a process with the name %q runs already", name)
	case p.spec.ID != "" && ps.byID(p.spec.ID) != nil:
		return refuse(guest.CodeExists, "a process with the id %s exists", p.spec.ID)
	}
	for name == "" {
		ps.unnamed++
		if next := "process-" + strconv.Itoa(ps.unnamed); ps.active[next] == nil {
			name = next
		}
	}
	ps.active[name] = p
	p.view = guest.Process{
		ID: cmp.Or(p.spec.ID, guest.NewProcessID()), Name: name, Command: guest.Shorten(p.spec.Command.Command, maxShown), Argv: shortenAll(p.spec.Argv), Cwd: guest.Shorten(p.spec.Cwd, maxShown),
		Restart: p.spec.Restart, LogFile: filepath.Join(ps.server.cfg.LogDir, name+".log"),
	}
	return nil
}

// openLog opens a process's log file. Background processes of ended processes with the same
// name no longer write there.
func (ps *processes) openLog(p *process) {
	ps.mu.Lock()
	for _, old := range ps.history {
		if old.view.LogFile == p.view.LogFile {
			old.log.close()
		}
	}
	ps.mu.Unlock()
	p.log = openLog(p.view.LogFile)
}

// started publishes a new run of a process, unless the process is being stopped.
func (ps *processes) started(p *process, run *processRun) bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if ps.closed || p.restart.Err() != nil {
		if p.run == nil {
			delete(ps.active, p.view.Name)
		}
		return false
	}
	if p.run != nil {
		p.view.RestartCount++
	}
	p.run, p.last = run, 0
	_, p.logStart = p.log.span()
	p.view.PID, p.view.State, p.view.StartedAt = run.tree.root.pid, guest.ProcessRunning, time.Now()
	p.view.ExitCode, p.view.Signal, p.view.ExitedAt = nil, "", nil
	ps.publish(p)
	return true
}

// exited records how a run ended and reports whether the process is restarted.
func (ps *processes) exited(p *process, run *processRun) (again bool) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	status, now := run.tree.root.status, time.Now()
	code, signal := exitOf(status)
	p.view.State, p.view.ExitCode, p.view.Signal, p.view.ExitedAt = guest.ProcessExited, &code, signal, &now
	if status.Signaled() && status.Signal() == p.last {
		p.retire()
	}
	ps.publish(p)
	return p.spec.Restart == guest.RestartAlways && p.restart.Err() == nil
}

// ended moves a process to the history.
func (ps *processes) ended(p *process) {
	ps.mu.Lock()
	delete(ps.active, p.view.Name)
	ps.history = append(ps.history, p)
	p.notify()
	for len(ps.history) > maxHistory {
		ps.forget(ps.history[0])
		ps.history = ps.history[1:]
	}
	ps.mu.Unlock()
	ps.boundLogs()
	p.log.markEnded()
	close(p.done)
}

// boundLogs bounds the memory of the logs of ended processes: the latest are kept whole. It is
// called after a process has ended, and after a background process of an ended one has
// written to its log.
func (ps *processes) boundLogs() {
	ps.mu.Lock()
	ended := slices.Clone(ps.history)
	ps.mu.Unlock() // a log waits for its disk
	left := endedLogs
	for _, p := range slices.Backward(ended) {
		if left -= p.log.memory(); left < 0 {
			p.log.shrink()
		}
	}
}

// forget drops an ended process, and its log unless another one writes there.
// ps.mu is held.
func (ps *processes) forget(p *process) {
	p.run.close()
	p.log.close()
	shared := ps.active[p.view.Name] != nil || slices.ContainsFunc(ps.history, func(q *process) bool {
		return q != p && q.view.LogFile == p.view.LogFile
	})
	if !shared {
		removeLog(p.view.LogFile)
	}
}

// publish sends a change to the node. ps.mu is held, so that changes arrive in
// their order.
func (ps *processes) publish(p *process) {
	view := p.view
	ps.server.events.send(guest.Event{Type: guest.EventProcess, Process: &view})
	p.notify()
}

// subscribe adds a reader of events, which gets every known process, terminal and session,
// and the ports first.
func (ps *processes) subscribe() subscriber {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	var first []guest.Event
	for _, view := range ps.views() {
		first = append(first, guest.Event{Type: guest.EventProcess, Process: &view})
	}
	ts := ps.server.terminals
	ts.mu.Lock()
	defer ts.mu.Unlock()
	terminals := guest.Event{Type: guest.EventTerminals}
	for _, view := range ts.views() {
		first = append(first, guest.Event{Type: guest.EventTerminal, Terminal: &view})
		terminals.Terminals = append(terminals.Terminals, view.ID)
	}
	l := ps.server.sessions
	l.mu.Lock()
	defer l.mu.Unlock()
	sessions := guest.Event{Type: guest.EventSessions}
	for _, view := range l.views() {
		first = append(first, guest.Event{Type: guest.EventSession, Session: &view})
		sessions.Sessions = append(sessions.Sessions, view.ID)
	}
	open := ps.server.ports
	open.mu.Lock()
	defer open.mu.Unlock()
	if ps.server.cfg.ReportPorts {
		first = append(first, open.event())
	}
	return ps.server.events.subscribe(first, terminals, sessions)
}

func (ps *processes) list() []guest.Process {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return ps.views()
}

// views are all known processes, in order of their starts. ps.mu is held.
func (ps *processes) views() []guest.Process {
	views := make([]guest.Process, 0, len(ps.active)+len(ps.history))
	for _, p := range ps.all() {
		if p.run != nil { // else it is about to be started
			views = append(views, p.view)
		}
	}
	slices.SortFunc(views, func(a, b guest.Process) int {
		return cmp.Or(a.StartedAt.Compare(b.StartedAt), cmp.Compare(a.PID, b.PID))
	})
	return views
}

// all returns the known processes. ps.mu is held.
func (ps *processes) all() []*process {
	return slices.AppendSeq(slices.Clone(ps.history), maps.Values(ps.active))
}

func (ps *processes) viewOf(p *process) guest.Process {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return p.view
}

// find returns the process with that id.
func (ps *processes) find(id string) (*process, error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if p := ps.byID(id); p != nil && p.run != nil {
		return p, nil
	}
	return nil, refuse(guest.CodeNoProcess, "no background process has the id %.20q", id)
}

// byID returns the process with that id, or nil. ps.mu is held.
func (ps *processes) byID(id string) *process {
	for _, p := range ps.all() {
		if p.view.ID == id {
			return p
		}
	}
	return nil
}

// stop ends a process and its descendants, and waits for that.
func (ps *processes) stop(p *process, grace time.Duration) guest.Process {
	ps.mu.Lock()
	p.retire()
	run := p.run
	ps.mu.Unlock()
	run.tree.stop(grace)
	<-p.done
	return ps.viewOf(p)
}

// signal delivers a signal, see guest.Client.SignalProcess.
func (ps *processes) signal(p *process, sig syscall.Signal) (guest.Process, error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	active := ps.active[p.view.Name] == p
	if active && asksToEnd(sig) {
		p.retire()
	}
	p.last = sig
	switch err := p.run.tree.root.signal(sig, asksToEnd(sig)); {
	case err == syscall.ESRCH && active && asksToEnd(sig): // it waits for a restart that will not come
	case err == syscall.ESRCH:
		return guest.Process{}, refuse(guest.CodeNoProcess, "process %s has ended", p.view.ID)
	case err != nil:
		return guest.Process{}, refuse(codeOf(err), "signal process %s: %v", p.view.ID, err)
	}
	return p.view, nil
}

// refuse lets no process start or restart any more.
func (ps *processes) refuse() {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.closed = true
	for _, p := range ps.active {
		p.retire()
	}
}

// close stops all processes, after refuse.
func (ps *processes) close() {
	ps.mu.Lock()
	var running []*process
	for _, p := range ps.active {
		if p.run != nil {
			running = append(running, p)
		}
	}
	ps.mu.Unlock()
	var stopping sync.WaitGroup
	for _, p := range running {
		stopping.Go(func() { ps.stop(p, ps.server.cfg.Grace) })
	}
	stopping.Wait()
}

// wait waits for every goroutine, after close. It does not wait for background processes of
// ended processes.
func (ps *processes) wait() {
	ps.mu.Lock()
	for _, p := range ps.history {
		p.run.close()
		p.log.close()
	}
	ps.mu.Unlock()
	ps.wg.Wait()
}

// shortenAll keeps the first maxShown bytes of a list of arguments.
func shortenAll(args []string) []string {
	left := maxShown
	for i, arg := range args {
		if left -= len(arg) + 1; left < 0 {
			return append(slices.Clone(args[:i]), "…")
		}
	}
	return args
}
