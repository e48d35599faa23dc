package audit

import (
	"log/slog"
	"sync"
	"unsafe"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/doze-run/doze/egress/feed"
	"github.com/doze-run/doze/loglimit"
)

// Limits of the stored entries, of each sandbox and of all. An entry takes some 600 bytes.
const (
	maxEntries    = 1000
	maxBytes      = 512 << 10
	maxTotalBytes = 128 << 20
)

// Limits of the lines of each sandbox in the node's log. They apply twice, because refusals
// and failures are counted separately from other entries. One sandbox writes at most some
// 500 MB a day, but an installation of a thousand packages is logged completely.
const (
	linesPerSecond = 10
	lineBurst      = 1000
)

// Log records the flows of all sandboxes. It has no goroutines and is safe for
// concurrent use. It implements prometheus.Collector.
type Log struct {
	prometheus.Collector // of metrics

	log     *slog.Logger
	name    func(sandbox string) string
	metrics *metrics
	feed    *feed.Feed[string, Entry]

	newLimit func() *loglimit.Limit
	mu       sync.Mutex
	limits   map[string]limits // by sandbox
}

// limits bound the lines of a sandbox in the node's log, by level: a flood of harmless
// requests does not hide a refusal.
type limits map[slog.Level]*loglimit.Limit

// New returns an empty Log, which writes lines to log. name returns the name of a sandbox
// for its lines, or "".
func New(log *slog.Logger, name func(sandbox string) string) *Log {
	entries := feed.New[string](feed.Config[Entry]{
		Entries: maxEntries, Bytes: maxBytes, TotalBytes: maxTotalBytes, Size: (*Entry).size,
		Header: func(e *Entry) feed.Header { return feed.Header{Seq: &e.Seq, Time: &e.Time, Dropped: &e.Dropped} },
	})
	registry := prometheus.NewRegistry()
	return &Log{
		Collector: registry, log: log, name: name, metrics: newMetrics(promauto.With(registry)), feed: entries,
		newLimit: func() *loglimit.Limit { return loglimit.New(linesPerSecond, lineBurst) }, limits: map[string]limits{},
	}
}

// Record stores an entry, sends it to followers, counts it in the metrics and logs it.
// Record sets Seq, Time and Dropped. It never waits for a reader, but it waits for the
// handler of the node's log.
func (l *Log) Record(e Entry) {
	e.bound()
	l.metrics.count(&e)
	l.feed.Add(e.Sandbox, &e)
	l.line(&e)
}

// size returns the approximate memory of an entry, in bytes.
func (e *Entry) size() int {
	n := int(unsafe.Sizeof(*e)) + len(e.Flow) + len(e.Host) + len(e.Method) + len(e.Path) + len(e.Rule) + len(e.Reason)
	for _, p := range e.Policies {
		n += int(unsafe.Sizeof(p)) + len(p.Name) + len(p.Digest)
	}
	for _, list := range [][]string{e.Secrets, e.Notes} {
		for _, s := range list {
			n += int(unsafe.Sizeof(s)) + len(s)
		}
	}
	return n
}

// Entries returns the stored entries of a sandbox that f matches, oldest first.
func (l *Log) Entries(sandbox string, f Filter) []Entry { return l.feed.Entries(sandbox, f.match) }

// Follow returns the stored entries, as Entries does, and then new ones. The channel is
// closed when stop is called, the sandbox is forgotten or the Log closes. A reader that
// lags behind by more than 256 entries loses some; Entry.Dropped of the next one is
// their number. Follow may be called before the sandbox has sent anything.
func (l *Log) Follow(sandbox string, f Filter) (entries <-chan Entry, stop func()) {
	return l.feed.Follow(sandbox, f.match)
}

// Forget deletes the entries of a sandbox and ends its followers. The caller must end
// the sandbox's flows first: later entries are stored as if of a new sandbox.
func (l *Log) Forget(sandbox string) {
	l.feed.Forget(sandbox)
	l.lastLine(sandbox)
}

// Close ends all followers. Entries may still be recorded and read.
func (l *Log) Close() { l.feed.Close() }

// limitsOf returns the limits of a sandbox.
func (l *Log) limitsOf(sandbox string) limits {
	l.mu.Lock()
	defer l.mu.Unlock()
	limit := l.limits[sandbox]
	if limit == nil {
		limit = limits{slog.LevelInfo: l.newLimit(), slog.LevelWarn: l.newLimit()}
		l.limits[sandbox] = limit
	}
	return limit
}
