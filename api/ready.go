package api

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

const (
	defaultReadyTimeout = time.Minute
	defaultReadyPath    = "/"
	defaultReadyStatus  = "2xx"
	// maxExpression limits the size of a regular expression in instructions of a matcher,
	// each some 40 bytes in the sandbox's guest: nested repetitions make a short one large.
	maxExpression = 10_000
)

// readyCodes are the codes of routes that wait for a process.
var readyCodes = []problem.Code{problem.ProcessNotReady, problem.ProcessExited, problem.CallLimitExceeded}

func (a *API) registerReady() {
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/process/{process}/wait", id: "wait-process", tag: "processes",
		summary: "Wait until a process is ready, or has ended",
		description: "Wakes the sandbox and keeps it awake. Responds as soon as the condition holds. If the process ends before, responds with process_exited immediately; " +
			"a process that is restarted may end up to three times.",
		codes: slices.Concat(wakeCodes, readyCodes, []problem.Code{problem.ProcessNotFound}),
	}, withSandboxBody(a, a.waitProcess))
}

func (a *API) waitProcess(ctx context.Context, in *ProcessPath, body *types.ReadyCondition, sb sandbox.Sandbox) (*output[types.ReadyProcess], error) {
	wait, err := waitOf(*body, "body")
	if err != nil {
		return nil, err
	}
	if err := a.calls.acquire(ctx, 1); err != nil {
		return nil, err
	}
	ready, err := a.awaitProcess(ctx, sb, in.Process, wait)
	if err != nil {
		return nil, err
	}
	return respond(ready)
}

// awaitProcess returns the process once the condition holds. Otherwise it returns
// problem.ProcessNotReady or problem.ProcessExited.
func (a *API) awaitProcess(ctx context.Context, sb sandbox.Sandbox, process string, wait guest.Wait) (types.ReadyProcess, error) {
	began := time.Now()
	r, err := a.cfg.Sandboxes.WaitProcess(ctx, sb.ID, process, wait)
	if err != nil {
		return types.ReadyProcess{}, fromGuest(noProcess(sb, err))
	}
	if r.Outcome != guest.WaitMet {
		return types.ReadyProcess{}, notReady(r, wait.Timeout)
	}
	return types.ReadyProcess{
		Process: processOf(r.Process), Listening: listeningOf(r.Listening), Line: r.Line, Match: r.Match, Status: r.Status,
		WaitedMS: milliseconds(time.Since(began)),
	}, nil
}

// notReady returns the problem of a wait whose condition was not met.
func notReady(r sandbox.WaitResult, timeout time.Duration) *problem.Problem {
	name, reason := validText(r.Process.Name, maxGuestMessage), validText(r.Detail, maxGuestMessage)
	p := problem.Newf(problem.ProcessNotReady, "process %s is not ready after %s: %s", name, timeout, reason)
	if r.Outcome == guest.WaitExited {
		p = problem.Newf(problem.ProcessExited, "process %s %s before it was ready: %s", name, r.Process.Ending(), reason)
	}
	p.Process = &problem.FailedProcess{ID: r.Process.ID, Name: name, ExitCode: r.Process.ExitCode, Signal: validText(r.Process.Signal, maxGuestMessage), Output: r.Output}
	return p
}

// waitOf checks a condition and converts it for the guest. location is the condition's.
func waitOf(c types.ReadyCondition, location string) (guest.Wait, error) {
	wait := guest.Wait{Port: c.Port, Log: c.Log, Exit: c.Exit, Timeout: cmp.Or(time.Duration(c.Timeout), defaultReadyTimeout)}
	conditions := 0
	for _, set := range []bool{c.Port != 0, c.Log != "", c.Exit, c.HTTP != nil} {
		if set {
			conditions++
		}
	}
	if conditions != 1 {
		return wait, invalid(location, fmt.Sprintf("%d conditions are given", conditions), `send one of "port": 3000, "log": "ready", "http": {"port": 3000} and "exit": true`)
	}
	if wait.Timeout > guest.MaxWait {
		return wait, invalid(location+".timeout", "longer than 1h", "use at most 1h, and repeat the request")
	}
	if c.Log != "" {
		if err := checkExpression(c.Log); err != nil {
			return wait, invalid(location+".log", err.Error(), "use RE2 syntax, such as \"ready in \\d+ ms\"")
		}
	}
	if c.HTTP != nil {
		wait.HTTP = &guest.WaitHTTP{Port: c.HTTP.Port, Path: cmp.Or(c.HTTP.Path, defaultReadyPath), Status: cmp.Or(c.HTTP.Status, defaultReadyStatus)}
		if !strings.HasPrefix(wait.HTTP.Path, "/") || strings.ContainsFunc(wait.HTTP.Path, func(r rune) bool { return r <= ' ' || r > '~' || r == '#' }) {
			return wait, invalid(location+".http.path", "not the path of a URL", `begin it with "/", and percent-encode other characters than printable ASCII`)
		}
	}
	return wait, nil
}

// checkExpression refuses a regular expression that is invalid or too large.
func checkExpression(text string) error {
	parsed, err := syntax.Parse(text, syntax.Perl)
	if err != nil {
		return err
	}
	if expressionSize(parsed) > maxExpression {
		return fmt.Errorf("too large: its repetitions make more than %d parts", maxExpression)
	}
	_, err = regexp.Compile(text)
	return err
}

// expressionSize is an estimate of the instructions of a regular expression.
func expressionSize(e *syntax.Regexp) int {
	size := 1 + len(e.Rune)
	for _, sub := range e.Sub {
		size += expressionSize(sub)
	}
	if e.Op == syntax.OpRepeat {
		size *= max(e.Min, e.Max, 1)
	}
	return min(size, 2*maxExpression)
}
