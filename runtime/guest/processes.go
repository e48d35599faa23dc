package guest

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

// maxSignal bounds the name of a signal; the longest is "SIGSTKFLT".
const maxSignal = 16

const (
	processIDPrefix = "p-"
	processIDChars  = "abcdefghijklmnopqrstuvwxyz0123456789"
	processIDLength = 8 // 40 bits: unique within a sandbox
)

// NewProcessID returns a random id of a process, such as "p-k3f9x2m7".
func NewProcessID() string {
	return processIDPrefix + randomID()
}

func randomID() string { return strings.ToLower(rand.Text()[:processIDLength]) }

// IsProcessID reports whether s has the form of a process's id.
func IsProcessID(s string) bool {
	random, ok := strings.CutPrefix(s, processIDPrefix)
	return ok && len(random) == processIDLength && strings.Trim(random, processIDChars) == ""
}

// StartProcess starts a background process. Errors: CodeExists when a running
// process has that name, CodeTooMany, CodeNoCommand, CodeNoShell, CodeInvalid.
func (c *Client) StartProcess(ctx context.Context, spec ProcessSpec) (Process, error) {
	spec.Ready = nil
	spec.Defaults, spec.Changes = c.defaultsOr(spec.Defaults), c.changesOr(spec.Changes)
	return c.process(ctx, request{method: http.MethodPost, route: RouteProcess, json: spec})
}

// maxProcesses bounds a list of processes: more than twice as many as a guest has.
const maxProcesses = 1000

// processList is the JSON of a list of processes. Decoding stops at the first beyond
// maxProcesses: MaxJSON bytes hold more than a million.
type processList []Process

func (l *processList) UnmarshalJSON(b []byte) error {
	d := json.NewDecoder(bytes.NewReader(b))
	if token, err := d.Token(); err != nil || token != json.Delim('[') {
		return fmt.Errorf("%.20q is not a list of processes", b)
	}
	for d.More() {
		if len(*l) == maxProcesses {
			return fmt.Errorf("more than %d processes", maxProcesses)
		}
		var p Process
		if err := d.Decode(&p); err != nil {
			return err
		}
		*l = append(*l, p)
	}
	return nil
}

// Processes lists the running processes and the most recent of those that
// ended, oldest first.
func (c *Client) Processes(ctx context.Context) ([]Process, error) {
	list, err := get[processList](ctx, c, request{method: http.MethodGet, route: RouteProcess})
	if err != nil {
		return nil, err
	}
	for _, p := range list {
		if err := p.check(); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// StopProcess sends SIGTERM to the process and all its descendants, SIGKILL to those that
// are left after grace, and returns when they have ended. The process is not restarted.
// For an ended process it returns nil.
func (c *Client) StopProcess(ctx context.Context, id string, grace time.Duration) (Process, error) {
	return c.process(ctx, request{
		method: http.MethodPost, route: processRoute(id, SuffixStop),
		query: url.Values{"grace": {grace.String()}}, wait: grace,
	})
}

// SignalProcess delivers a signal, such as "SIGHUP" or "HUP", and returns the process.
// SIGTERM, SIGINT, SIGQUIT and SIGKILL go to its whole process group and end its restarts.
// Any other goes to the process alone; if it ends the process, that is not restarted either.
func (c *Client) SignalProcess(ctx context.Context, id string, signal string) (Process, error) {
	return c.process(ctx, request{
		method: http.MethodPost, route: processRoute(id, SuffixSignal),
		query: url.Values{"signal": {signal}},
	})
}

func (c *Client) process(ctx context.Context, r request) (Process, error) {
	p, err := get[Process](ctx, c, r)
	if err != nil {
		return Process{}, err
	}
	return p, p.check()
}

func processRoute(id, suffix string) string { return RouteProcess + "/" + url.PathEscape(id) + suffix }

// check refuses an invalid process.
func (p *Process) check() error {
	switch {
	case !slices.Contains([]ProcessState{ProcessRunning, ProcessExited, ProcessLost}, p.State):
		return fmt.Errorf("guest reported a process in the unknown state %q", Shorten(string(p.State), 20))
	case !slices.Contains(Restarts, p.Restart):
		return fmt.Errorf("guest reported a process with the unknown restart %q", Shorten(string(p.Restart), 20))
	case !IsProcessID(p.ID):
		return fmt.Errorf("guest reported a process with the id %q", Shorten(p.ID, 20))
	case p.PID <= 0:
		return fmt.Errorf("guest reported a process with the pid %d", p.PID)
	}
	return checkEnd(p.State, p.ExitCode, p.Signal)
}

// checkEnd refuses an end that does not fit the state of a process.
func checkEnd(state ProcessState, code *int, signal string) error {
	switch {
	case state == ProcessExited && code != nil && isExit(*code, signal):
		return nil
	case state != ProcessExited && code == nil && signal == "":
		return nil
	}
	return fmt.Errorf("guest reported a process that is %s with an unusable exit code or signal", Shorten(string(state), 20))
}

// isExit reports whether a process can have ended with that code and signal.
func isExit(code int, signal string) bool {
	return code >= 0 && code <= 255 && len(signal) <= maxSignal &&
		strings.Trim(signal, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") == ""
}
