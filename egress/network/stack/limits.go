package stack

import (
	"sync/atomic"
	"time"
)

// Limits of one stack. Zero means the default.
type Limits struct {
	// Connections that there may be at once, in whatever state, also those which
	// the Handler has closed and the sandbox has not; default 1024. One more is reset.
	Connections int
	// Attempts is how many connections may wait for the Handler to decide, which
	// may take as long as dialling does, or for the sandbox to complete the
	// handshake; default 128. One more is reset.
	Attempts int
	// Wide is how many connections may have socket buffers that grow with their use,
	// up to link.MaxReceiveBuffer and link.MaxSendBuffer; default 64. All others have
	// 128 KiB each way. So what a hostile sandbox makes the node hold is 0.4 GiB at most.
	Wide int
	// Queries is how many name queries may be in flight; default 64. One more gets
	// no answer, and whoever asked asks again.
	Queries int
	// Idle is how long the listener is served without a connection; default 1 minute.
	Idle time.Duration
}

func (l Limits) withDefaults() Limits {
	for _, d := range []struct {
		limit *int
		value int
	}{
		{&l.Connections, 1024}, {&l.Attempts, 128}, {&l.Wide, 64}, {&l.Queries, 64},
	} {
		if *d.limit == 0 {
			*d.limit = d.value
		}
	}
	if l.Idle == 0 {
		l.Idle = time.Minute
	}
	return l
}

// Budget bounds what all stacks have together. A nil Budget bounds nothing.
type Budget struct {
	connections, wide share
}

// NewBudget returns a Budget of so many connections, of which so many may have
// buffers that grow. That bounds the memory which hostile sandboxes can tie up: 3 MiB
// for each that is wide, 256 KiB for each that is not.
func NewBudget(connections, wide int) *Budget {
	b := new(Budget)
	b.SetConnections(connections)
	b.wide.limit.Store(int64(wide))
	return b
}

// SetConnections changes how many there may be. Those that there are stay.
func (b *Budget) SetConnections(n int) { b.connections.limit.Store(int64(n)) }

// Connections is how many there are.
func (b *Budget) Connections() int { return int(b.connections.used.Load()) }

// Take takes room for a connection, and says whether there is any. Who took it gives
// it back.
func (b *Budget) Take() bool { return b == nil || b.connections.take() }

// Give gives back what Take took.
func (b *Budget) Give() { b.give(false) }

func (b *Budget) takeWide() bool { return b == nil || b.wide.take() }

func (b *Budget) give(wide bool) {
	if b == nil {
		return
	}
	b.connections.used.Add(-1)
	if wide {
		b.wide.used.Add(-1)
	}
}

// share of a Budget.
type share struct {
	limit, used atomic.Int64
}

func (s *share) take() bool {
	if s.used.Add(1) > s.limit.Load() {
		s.used.Add(-1)
		return false
	}
	return true
}

// Exceeded is a limit that was reached.
type Exceeded string

const (
	Connections    Exceeded = "connections"
	Attempts       Exceeded = "connection attempts"
	AllConnections Exceeded = "connections of all sandboxes"
	Queries        Exceeded = "name queries"
)

// exceededEvery is how often Config.Exceeded is told of one kind: often enough for
// a log, and no load if a sandbox does nothing else.
const exceededEvery = 10 * time.Second

// tell tells Config.Exceeded. Only the reader calls it.
func (s *Stack) tell(what Exceeded) {
	now := time.Now()
	if last, told := s.exceeded[what]; s.cfg.Exceeded == nil || told && now.Sub(last) < exceededEvery {
		return
	}
	s.exceeded[what] = now
	s.cfg.Exceeded(what)
}
