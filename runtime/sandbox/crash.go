package sandbox

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// crashLoop is how often a process with RestartAlways is restarted before requests no
// longer wait for it: with the guest's backoff, 0.7 s.
const crashLoop = 3

// Crashed returns the process to blame when nothing listens on a port: the declared
// process that ended last, if every declared process has ended with an error since the
// container started and no other process runs. One that ended without an error may have
// left a daemon.
func (sb *Sandbox) Crashed() (last guest.Process, ok bool) {
	for _, p := range sb.Processes {
		if p.State == guest.ProcessRunning {
			return guest.Process{}, false
		}
	}
	for _, spec := range sb.Declared {
		p, known := sb.latest(spec.Name)
		switch {
		case !known, p.StartedAt.Before(sb.StartedAt), p.State != guest.ProcessExited, p.ExitedAt == nil:
			return guest.Process{}, false
		case p.Signal == "" && (p.ExitCode == nil || *p.ExitCode == 0):
			return guest.Process{}, false
		case p.Restart == guest.RestartAlways && p.RestartCount < crashLoop:
			return guest.Process{}, false
		}
		if !ok || p.ExitedAt.After(*last.ExitedAt) {
			last, ok = p, true
		}
	}
	return last, ok
}

// latest returns the process that was started last under a name.
func (sb *Sandbox) latest(name string) (latest guest.Process, ok bool) {
	for _, p := range sb.Processes {
		if p.Name == name && (!ok || p.StartedAt.After(latest.StartedAt)) {
			latest, ok = p, true
		}
	}
	return latest, ok
}

const (
	// lastOutputLines and lastOutputBytes bound LastOutput: a stack trace fits.
	lastOutputLines = 20
	lastOutputBytes = 4 << 10
	// The guest stores 256 KiB of a process's output, and a visitor waits meanwhile.
	lastOutputTime = 2 * time.Second
)

// LastOutput returns the last lines that the process with that id wrote, at most 20 lines
// and 4 KiB, as valid UTF-8 without control characters. After an error it returns the
// lines before it.
func (l *Lease) LastOutput(ctx context.Context, process string) string {
	return l.b.lastOutput(ctx, process)
}

// lastOutput is Lease.LastOutput of a sandbox that runs.
func (b *liveSandbox) lastOutput(ctx context.Context, process string) string {
	ctx, cancel := context.WithTimeout(ctx, lastOutputTime)
	defer cancel()
	logs, err := b.guest.Logs(ctx, process, false)
	if err != nil {
		return ""
	}
	defer logs.Close()
	var tail []byte
	for {
		ev, err := logs.Next()
		if err != nil || ev.Process != nil {
			if err != nil && !errors.Is(err, io.EOF) {
				b.m.log.Debug("failed to read the last output of a process", "sandbox", b.id, "error", err)
			}
			return lastLines(tail)
		}
		tail = append(tail, ev.Data...)
		if len(tail) > 2*lastOutputBytes {
			tail = append(tail[:0], tail[len(tail)-lastOutputBytes:]...)
		}
	}
}

// lastLines returns the end of a process's output for display.
func lastLines(output []byte) string {
	output = output[max(0, len(output)-lastOutputBytes):]
	text := strings.Map(func(r rune) rune {
		if r < ' ' && r != '\n' && r != '\t' || r == '\u007f' {
			return -1
		}
		return r
	}, strings.ToValidUTF8(string(output), ""))
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-lastOutputLines):], "\n")
}
