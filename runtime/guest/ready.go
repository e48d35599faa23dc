package guest

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"time"
)

// Limits of readiness that both ends enforce.
const (
	// MaxListening bounds the ports of one EventPorts, so that it fits into one line of the
	// event stream. Of more ports it has the lowest.
	MaxListening = 100
	// MaxWait bounds Wait.Timeout.
	MaxWait = time.Hour
	// MaxListenAddresses and MaxListenProgram bound a Listening: addresses, and bytes of the
	// program's name. The kernel's own limit on the latter is 15.
	MaxListenAddresses = 4
	MaxListenProgram   = 64
	// MaxWaitGroups and MaxWaitLine bound a WaitResult: groups of the expression, and bytes
	// of the line, which each group is a part of.
	MaxWaitGroups = 16
	MaxWaitLine   = 8 << 10
)

// Listening is a TCP port on which a process of the sandbox listens.
type Listening struct {
	Port      uint16   `json:"port"`
	Addresses []string `json:"addresses"` // as bound, such as "0.0.0.0"; at most 4
	// PID of the process inside the sandbox; 0 if it is unknown, as of another user's.
	PID     int    `json:"pid,omitempty"`
	Program string `json:"program,omitempty"` // name of its program, at most 64 bytes
	// Process is the id of the background process that it is, or that started it.
	Process string `json:"process,omitempty"`
}

// Wait is a condition of a background process. Exactly one of Port, Log, Exit and HTTP is set.
type Wait struct {
	// Port: the process, or one that it started, listens on the TCP port, on any address. A
	// listener whose process is unknown counts, too.
	Port uint16 `json:"port,omitempty"`
	// Log is a regular expression in the syntax of package regexp that matches a line of
	// the process's output since its last start. Lines have no escape sequences of
	// terminals, and end after 8 KiB.
	Log string `json:"log,omitempty"`
	// Exit: the process has ended. One that the guest restarts ends each time.
	Exit bool `json:"exit,omitempty"`
	// HTTP: the response to a request has the status.
	HTTP *WaitHTTP `json:"http,omitempty"`

	Timeout time.Duration `json:"timeout"` // at most MaxWait
}

// WaitHTTP is a GET request to a port on which the process listens.
type WaitHTTP struct {
	Port   uint16 `json:"port"`
	Path   string `json:"path"`   // with its query
	Status string `json:"status"` // such as "204", or a class such as "2xx"
}

// WaitOutcome is how a wait ended.
type WaitOutcome string

const (
	WaitMet WaitOutcome = "met" // the condition holds
	// WaitExited: the process ended before. A process that the guest restarts has then
	// ended several times in a row.
	WaitExited  WaitOutcome = "exited"
	WaitExpired WaitOutcome = "expired" // after the timeout
)

// WaitResult is the guest's response to a Wait.
type WaitResult struct {
	Outcome WaitOutcome `json:"outcome"`
	Process Process     `json:"process"` // at the end of the wait
	// Detail describes, after WaitExpired and WaitExited, what the last check found.
	Detail string `json:"detail,omitempty"`
	// Of WaitMet: Listening of Port and HTTP, Line and Match (the matched text, then the
	// groups) of Log, Status of HTTP.
	Listening *Listening `json:"listening,omitempty"`
	Line      string     `json:"line,omitempty"`
	Match     []string   `json:"match,omitempty"`
	Status    int        `json:"status,omitempty"`
}

// WaitProcess waits for a condition of a background process. It returns early when the
// process has ended. Errors: CodeNoProcess, CodeInvalid, CodeTooMany.
func (c *Client) WaitProcess(ctx context.Context, id string, w Wait) (WaitResult, error) {
	result, err := get[WaitResult](ctx, c, request{method: http.MethodPost, route: processRoute(id, SuffixWait), json: w, wait: w.Timeout})
	if err == nil {
		err = result.validate()
	}
	if err != nil {
		return WaitResult{}, err
	}
	return result, nil
}

// validate refuses an invalid result, and cuts its texts.
func (r *WaitResult) validate() error {
	r.Detail = Shorten(r.Detail, maxMessage)
	switch {
	case r.Outcome != WaitMet && r.Outcome != WaitExited && r.Outcome != WaitExpired:
		return fmt.Errorf("guest reported the unknown outcome %q", Shorten(string(r.Outcome), 20))
	case len(r.Line) > MaxWaitLine || len(r.Match) > MaxWaitGroups:
		return fmt.Errorf("guest reported a line of %d bytes with %d groups", len(r.Line), len(r.Match))
	case r.Status != 0 && (r.Status < 100 || r.Status > 999):
		return fmt.Errorf("guest reported the HTTP status %d", r.Status)
	}
	for _, group := range r.Match {
		if !strings.Contains(r.Line, group) {
			return fmt.Errorf("guest reported a group that is not in the line: %q", Shorten(group, 20))
		}
	}
	if r.Listening != nil {
		if err := r.Listening.validate(); err != nil {
			return err
		}
	}
	return r.Process.check()
}

// validate refuses an invalid port.
func (l *Listening) validate() error {
	if l.Port == 0 || l.PID < 0 || len(l.Program) > MaxListenProgram || len(l.Addresses) > MaxListenAddresses || l.Process != "" && !IsProcessID(l.Process) {
		return fmt.Errorf("guest reported an unusable listener on port %d", l.Port)
	}
	for _, address := range l.Addresses {
		if addr, err := netip.ParseAddr(Shorten(address, 64)); err != nil || addr.Zone() != "" {
			return fmt.Errorf("guest reported a listener on the address %q", Shorten(address, 64))
		}
	}
	return nil
}

// checkListening refuses an invalid list of ports.
func checkListening(list []Listening) error {
	if len(list) > MaxListening {
		return fmt.Errorf("guest reported %d ports", len(list))
	}
	for i := range list {
		if err := list[i].validate(); err != nil {
			return err
		}
		if i > 0 && list[i-1].Port >= list[i].Port {
			return fmt.Errorf("guest reported ports out of order: %d after %d", list[i].Port, list[i-1].Port)
		}
	}
	return nil
}
