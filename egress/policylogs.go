package egress

import (
	"log/slog"

	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/policy/policylog"
)

// HasPolicy reports whether an owner's rules can name a policy.
func (e *Egress) HasPolicy(owner, name string) bool {
	_, err := e.moduleOf(owner, name)
	return err == nil
}

// PolicyLogs returns the log lines of an owner's policy, oldest first.
func (e *Egress) PolicyLogs(owner, name string, f policylog.Filter) []policylog.Line {
	return e.pool.lines.Lines(policylog.Policy{Owner: owner, Name: name}, f)
}

// FollowPolicyLogs returns the lines of PolicyLogs and then new ones, until the policy is
// deleted, the node closes, or stop is called.
func (e *Egress) FollowPolicyLogs(owner, name string, f policylog.Filter) (lines <-chan policylog.Line, stop func()) {
	return e.pool.lines.Follow(policylog.Policy{Owner: owner, Name: name}, f)
}

// keepLines returns a function that stores the log lines of an owner's policy.
func (p *pool) keepLines(owner, name string) func(policy.Line) {
	of := policylog.Policy{Owner: owner, Name: name}
	return func(line policy.Line) {
		p.lines.Add(of, policylog.Line{
			Level: levelOf(line.Level), Text: line.Text,
			Flow: line.Flow, Sandbox: line.Sandbox, SandboxName: line.SandboxName,
		})
	}
}

func levelOf(l slog.Level) policylog.Level {
	switch {
	case l < slog.LevelInfo:
		return policylog.Debug
	case l < slog.LevelWarn:
		return policylog.Info
	case l < slog.LevelError:
		return policylog.Warn
	}
	return policylog.Error
}
