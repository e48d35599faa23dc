package sandbox

import (
	"slices"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// program is a session, a terminal or a context as last known.
type program interface {
	// key identifies it among the programs of its kind; empty: clients do not see it.
	key() string
	status() (state guest.ProcessState, startedAt time.Time)
	// current reports whether the present guest may know it.
	current() bool
}

// losable is a pointer to a program.
type losable[P program] interface {
	*P
	// lose records that the sandbox has stopped.
	lose(StateReason)
}

// programs are the programs of one kind that a sandbox has, in the order of their starts.
type programs[P program] struct {
	of     func(*Sandbox) *[]P
	most   int // that are stored
	exited int // of these, that have ended by themselves
}

// find returns the program with that key.
func find[P program](list []P, key string) (found P, ok bool) {
	i := slices.IndexFunc(list, func(p P) bool { return key != "" && p.key() == key })
	if i < 0 {
		return found, false
	}
	return list[i], true
}

// lostPrograms are the programs of a sandbox that has stopped.
func lostPrograms[P program, L losable[P]](list []P, reason StateReason) []P {
	list = slices.Clone(list)
	for i := range list {
		L(&list[i]).lose(reason)
	}
	return list
}

// note stores a program as last known, or forgets a closed one.
func (k programs[P]) note(b *liveSandbox, p P, closed bool) {
	b.change(func(sb *Sandbox) {
		list := k.of(sb)
		if old, ok := find(*list, p.key()); ok && isOlder(p, old) {
			return
		}
		rest := slices.DeleteFunc(slices.Clone(*list), func(old P) bool { return old.key() == p.key() })
		if !closed {
			rest, _ = k.bound(append(rest, p))
		}
		*list = rest
	})
	b.m.journal.dirty(b)
}

// isOlder reports whether p was reported before old; see isStale.
func isOlder[P program](p, old P) bool {
	state, startedAt := p.status()
	oldState, oldStart := old.status()
	return isStale(startedAt, state, oldStart, oldState)
}

// bound sorts the list, and drops the oldest programs beyond the bounds, first of those that have
// ended.
func (k programs[P]) bound(list []P) (kept, dropped []P) {
	slices.SortStableFunc(list, func(a, b P) int {
		_, startA := a.status()
		_, startB := b.status()
		return startA.Compare(startB)
	})
	surplus, exited := len(list)-k.most, -k.exited
	for _, p := range list {
		if state, _ := p.status(); state == guest.ProcessExited {
			exited++
		}
	}
	for _, p := range list {
		state, _ := p.status()
		if state == guest.ProcessRunning || surplus <= 0 && (state != guest.ProcessExited || exited <= 0) {
			kept = append(kept, p)
			continue
		}
		if state == guest.ProcessExited {
			exited--
		}
		surplus--
		dropped = append(dropped, p)
	}
	more := max(0, len(kept)-k.most)
	return kept[more:], append(dropped, kept[:more]...)
}

// forget forgets a closed program, unless another one has been opened with its key since.
func (k programs[P]) forget(b *liveSandbox, closed P) {
	_, startedAt := closed.status()
	b.change(func(sb *Sandbox) {
		list := k.of(sb)
		*list = slices.DeleteFunc(slices.Clone(*list), func(p P) bool {
			_, start := p.status()
			return p.key() == closed.key() && !start.After(startedAt)
		})
	})
	b.m.journal.dirty(b)
}

// forgetExcept forgets the programs that the guest no longer knows. Those that were lost with an
// earlier guest stay.
func (k programs[P]) forgetExcept(b *liveSandbox, keys []string) {
	b.change(func(sb *Sandbox) {
		list := k.of(sb)
		*list = slices.DeleteFunc(slices.Clone(*list), func(p P) bool { return p.current() && !slices.Contains(keys, p.key()) })
	})
	b.m.journal.dirty(b)
}

// losePrograms records that the sandbox has stopped, and with it all that ran.
func (sb *Sandbox) losePrograms(reason StateReason) {
	sb.Processes, sb.Listening = lost(sb.Processes), nil
	sb.Terminals, sb.Sessions = lostPrograms(sb.Terminals, reason), lostPrograms(sb.Sessions, reason)
	sb.Contexts = withoutSpares(lostPrograms(sb.Contexts, reason))
}
