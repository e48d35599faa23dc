package egress

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/secret/scrub"
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
func (x *exchange) filter() intercept.Filter {
	e := x.m.e
	version := e.vault.Version() // before it is asked for secrets
	secrets := e.boundTo(x.m.owner, x.to.host)
	more := x.sent.close(secrets.bytes())
	var s *scrub.Scrubber
	switch {
	case len(more) > 0:
		s = scrub.New(append(secrets.bytes(), more...))
	case secrets.len() > 0:
		s = e.filters.of(x.m.owner, version, secrets)
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

// sent are the secrets that a request was given. A body that is sent while it is
// read may get one when the filter of the response is made already.
type sent struct {
	mu     sync.Mutex
	values [][]byte
	closed bool
}

// add notes a value. When the filter is made only those that it looks for can be
// added.
func (s *sent) add(name string, value []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case holds(s.values, value):
	case s.closed:
		return fmt.Errorf("secret %q was changed while the request was sent: send it again", name)
	default:
		s.values = append(s.values, value)
	}
	return nil
}

// close says which secrets the filter looks for, and returns those that it has to
// look for beside them.
func (s *sent) close(bound [][]byte) (more [][]byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, v := range s.values {
		if !holds(bound, v) {
			more = append(more, v)
		}
	}
	s.values, s.closed = slices.Concat(bound, more), true
	return more
}

func holds(values [][]byte, value []byte) bool {
	return slices.ContainsFunc(values, func(v []byte) bool { return bytes.Equal(v, value) })
}
