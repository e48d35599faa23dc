package sandbox

import (
	"cmp"
	"context"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/doze-run/doze/runtime/guest"
)

// Bounds of what the node stores of a guest's reports, in bytes as the store encodes them. A
// record may have 800 KiB; a guest that could fill it would prevent all further writes of
// its sandbox's record. Together with the bounds of what clients set (environment, labels, ports,
// contexts, declared processes), they leave 16 KiB: see TestLargestRecordIsStored.
const (
	maxProcesses    = 512
	maxProcessText  = 4 << 10   // one text of a process
	maxKnownText    = 128 << 10 // all processes of a sandbox
	maxEventText    = 512       // one text of a process in an event
	processOverhead = 320       // more than the rest of a process takes
	// maxBriefText is for one text of a session or terminal. Their ids, and programs, have 64
	// plain characters at most, and their commands 256 bytes.
	maxBriefText = 256
	maxKnownID   = 128
)

// noteProcess stores a process as last known and adds its start and end to the timeline.
func (b *liveSandbox) noteProcess(p guest.Process) {
	p = shorten(p, maxProcessText)
	var before *guest.Process
	stale := false
	b.change(func(sb *Sandbox) {
		list := make([]guest.Process, 0, len(sb.Processes)+1)
		for _, old := range sb.Processes {
			if old.ID != p.ID {
				list = append(list, old)
				continue
			}
			if old.State != guest.ProcessLost && isStale(p.StartedAt, p.State, old.StartedAt, old.State) {
				stale = true
				return
			}
			before = &old
		}
		sb.Processes = newest(append(list, p))
	})
	if stale {
		return
	}
	b.noteKernelEnd(p)
	b.m.journal.dirty(b)
	started := p.State == guest.ProcessRunning && (before == nil || before.State != guest.ProcessRunning || before.PID != p.PID)
	exited := p.State == guest.ProcessExited && (before == nil || before.State == guest.ProcessRunning)
	brief := shorten(p, maxEventText)
	switch {
	case started:
		b.emit(Event{Type: EventProcessStart, Process: &brief})
	case exited:
		b.emit(Event{Type: EventProcessExited, Process: &brief})
	}
}

// loseForgotten marks as lost the running processes, with their contexts, that the guest does not
// know any more: they have ended while the node received no events, and so many others since that
// the guest has forgotten how.
func (b *liveSandbox) loseForgotten(ctx context.Context) error {
	started := map[string]time.Time{} // of the running processes
	for _, p := range b.view.Load().Processes {
		if p.State == guest.ProcessRunning {
			started[p.ID] = p.StartedAt
		}
	}
	if len(started) == 0 {
		return nil
	}
	list, err := b.guest.Processes(ctx)
	if err != nil {
		return err
	}
	for _, p := range list {
		delete(started, p.ID)
	}
	if len(started) == 0 {
		return nil
	}
	var forgotten []string
	b.change(func(sb *Sandbox) {
		sb.Processes = slices.Clone(sb.Processes)
		for i, p := range sb.Processes {
			if at, ok := started[p.ID]; ok && p.State == guest.ProcessRunning && p.StartedAt.Equal(at) {
				sb.Processes[i].State = guest.ProcessLost
				forgotten = append(forgotten, p.ID)
			}
		}
		sb.loseKernels(forgotten)
	})
	for _, process := range forgotten {
		b.dropKernel(process)
	}
	b.m.journal.dirty(b)
	return nil
}

// isStale reports whether a report about a program is older than what is known
// of it: the response to a start can arrive after the event of the end.
func isStale(started time.Time, state guest.ProcessState, knownStart time.Time, known guest.ProcessState) bool {
	return started.Before(knownStart) ||
		started.Equal(knownStart) && state == guest.ProcessRunning && known != guest.ProcessRunning
}

// shorten cuts every text of a process to most bytes. The client has checked
// its State and Restart.
func shorten(p guest.Process, most int) guest.Process {
	p.Name, p.Command, p.Cwd = cutText(p.Name, most), cutText(p.Command, most), cutText(p.Cwd, most)
	p.Signal, p.LogFile = cutText(p.Signal, most), cutText(p.LogFile, most)
	room := most
	for i, arg := range p.Argv {
		if room -= written(arg) + 3; room < 0 {
			p.Argv = p.Argv[:i:i]
			break
		}
	}
	return p
}

// knownSize is an upper bound of the bytes of a process in the record.
func knownSize(p guest.Process) int {
	n := processOverhead + written(p.Name) + written(p.Command) + written(p.Cwd) + written(p.Signal) + written(p.LogFile)
	for _, arg := range p.Argv {
		n += written(arg) + 3
	}
	return n
}

// newest drops the oldest processes beyond the bounds, first of those that have ended.
func newest(list []guest.Process) []guest.Process {
	total := 0
	for _, p := range list {
		total += knownSize(p)
	}
	for _, removable := range []func(guest.Process) bool{
		func(p guest.Process) bool { return p.State != guest.ProcessRunning },
		func(guest.Process) bool { return true },
	} {
		left := len(list)
		list = slices.DeleteFunc(list, func(p guest.Process) bool {
			if left <= maxProcesses && total <= maxKnownText || !removable(p) {
				return false
			}
			left--
			total -= knownSize(p)
			return true
		})
	}
	return list
}

// cutText returns the beginning of s that takes at most most bytes in JSON.
func cutText(s string, most int) string {
	if len(s) <= most/6 {
		return s
	}
	n := 0
	for i, r := range s {
		if n += writtenRune(r); n > most {
			return s[:i]
		}
	}
	return s
}

// written is how many bytes a text takes in JSON.
func written(s string) int {
	n := 0
	for _, r := range s {
		n += writtenRune(r)
	}
	return n
}

func writtenRune(r rune) int {
	switch {
	case r < ' ' || r == '<' || r == '>' || r == '&' || r == '\u007f' || r == '\u2028' || r == '\u2029' || r == utf8.RuneError:
		return 6
	case r == '"' || r == '\\':
		return 2
	}
	return utf8.RuneLen(r)
}

// upgrade converts a record of an earlier version: it adds ids of processes, and renames
// modes.
func (sb *Sandbox) upgrade() {
	sb.Persist = cmp.Or(sb.Persist, PersistMemory)
	for i := range sb.Ports {
		sb.Ports[i].upgrade()
	}
	for i := range sb.Declared {
		if sb.Declared[i].ID == "" {
			sb.Declared[i].ID = guest.NewProcessID()
		}
	}
	for i := range sb.Processes {
		if sb.Processes[i].ID == "" {
			sb.Processes[i].ID = guest.NewProcessID()
		}
	}
}

// lost marks the running processes as lost: how they ended is unknown.
func lost(processes []guest.Process) []guest.Process {
	list := make([]guest.Process, len(processes))
	for i, p := range processes {
		if p.State == guest.ProcessRunning {
			p.State, p.ExitCode = guest.ProcessLost, nil
		}
		list[i] = p
	}
	return list
}
