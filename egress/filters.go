package egress

import (
	"slices"
	"strings"
	"sync"

	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/secret/scrub"
	"github.com/doze-run/doze/egress/secret/session"
	"github.com/doze-run/doze/egress/secret/vault"
)

// maxFilters bounds the filters that are kept, in bytes: one takes some 20 KB, and
// of each secret 5 KB and its value. When there are as many, all are made anew as
// they are needed.
const maxFilters = 64 << 20

// filters keeps what takes secrets out of responses, by whose secrets and which.
type filters struct {
	mu      sync.Mutex
	version int64 // of the vault
	made    map[filterKey]*scrub.Scrubber
	size    int // of all that are made, in bytes
}

// filterKey is whose secrets, and which: of the owner, and of the operator.
type filterKey struct{ owner, own, operators string }

func newFilters() *filters { return &filters{made: map[filterKey]*scrub.Scrubber{}} }

// of returns the filter of secrets, which are those of a version of the vault.
// Hosts to which the same secrets are bound share it: a sandbox can ask for any
// number of hosts below a name.
func (f *filters) of(owner string, version int64, secrets bound) *scrub.Scrubber {
	key := filterKey{owner, namesOf(secrets.own), namesOf(secrets.operators)}
	f.mu.Lock()
	defer f.mu.Unlock()
	size := 20 << 10
	for _, s := range secrets.all() {
		size += 5<<10 + len(s.Bytes)
	}
	if version != f.version || f.size+size > maxFilters {
		f.version, f.size = version, 0
		clear(f.made)
	}
	s, ok := f.made[key]
	if !ok {
		s = scrub.New(secrets.bytes())
		f.made[key] = s
		f.size += size
	}
	return s
}

// filter looks for every secret that may have been sent to the host: the owner's
// and the node's that are bound to it, and those that are in this request, which
// may have been replaced meanwhile. Nil means that there is none. No other secret
// can be sent afterwards.
func (m *sender) filter(host string, secrets *session.Session) intercept.Filter {
	e := m.e
	version := e.vault.Version() // before it is asked for secrets
	bound := e.boundTo(m.owner, host)
	more := secrets.Seal(bound.bytes())
	var s *scrub.Scrubber
	switch {
	case len(more) > 0:
		s = scrub.New(append(bound.bytes(), more...))
	case bound.len() > 0:
		s = e.filters.of(m.owner, version, bound)
	}
	if s == nil {
		return nil
	}
	return s
}

// bound are the secrets that may be sent to a host.
type bound struct {
	own, operators []vault.Value // both of which may have one of a name
}

func (e *Egress) boundTo(owner, host string) bound {
	b := bound{own: e.vault.BoundTo(owner, host)}
	if owner != e.cfg.Operator {
		b.operators = e.vault.BoundTo(e.cfg.Operator, host)
	}
	return b
}

func (b bound) len() int { return len(b.own) + len(b.operators) }

func (b bound) all() []vault.Value { return slices.Concat(b.own, b.operators) }

func (b bound) bytes() [][]byte {
	values := make([][]byte, 0, b.len())
	for _, s := range b.all() {
		values = append(values, s.Bytes)
	}
	return values
}

func namesOf(secrets []vault.Value) string {
	var names strings.Builder
	for _, s := range secrets {
		names.WriteString(s.Name)
		names.WriteByte('/')
	}
	return names.String()
}
