package stack

import "time"

// Limits of one stack. Zero means the default.
type Limits struct {
	// Connections is how many connections may exist at the same time, in any state,
	// including those that the Handler has closed and the sandbox has not; default
	// 1024. Further ones are reset.
	Connections int
	// Attempts is how many connections may wait for the Handler to decide, which
	// may take as long as dialing does, or for the sandbox to complete the
	// handshake; default 128. Further ones are reset.
	Attempts int
	// Wide is how many connections may have socket buffers that grow with their use,
	// up to link.MaxReceiveBuffer and link.MaxSendBuffer; default 64. All others have
	// 128 KiB each way. So a hostile sandbox can make the node buffer at most 0.4 GiB.
	Wide int
	// Queries is how many name queries may be in flight; default 64. Further ones
	// are dropped, and the client sends them again.
	Queries int
	// Idle is how long the stack accepts on the listener without a connection; default 1 minute.
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

// Exceeded is a limit that was reached.
type Exceeded string

const (
	Connections    Exceeded = "connections"
	Attempts       Exceeded = "connection attempts"
	AllConnections Exceeded = "connections of all sandboxes"
	Queries        Exceeded = "name queries"
)

// exceededEvery is the minimum interval of calls to Config.Exceeded for one limit: short
// enough for a log, and no load if a sandbox constantly exceeds the limit.
const exceededEvery = 10 * time.Second

// tell calls Config.Exceeded, at most once per exceededEvery and limit. Only the reader calls it.
func (s *Stack) tell(what Exceeded) {
	now := time.Now()
	if last, told := s.exceeded[what]; s.cfg.Exceeded == nil || told && now.Sub(last) < exceededEvery {
		return
	}
	s.exceeded[what] = now
	s.cfg.Exceeded(what)
}
