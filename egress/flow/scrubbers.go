package flow

import (
	"slices"
	"strings"
	"sync"

	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/secret/scrub"
	"github.com/doze-run/doze/egress/secret/session"
	"github.com/doze-run/doze/egress/secret/vault"
)

// maxScrubbers bounds the scrubbers in memory, in bytes: each takes some 20 KB, and 5 KB
// and its value for each secret. When the limit is reached, all are dropped.
const maxScrubbers = 64 << 20

// scrubbers caches the scrubbers that remove secrets from responses. The zero value is
// ready for use.
type scrubbers struct {
	mu      sync.Mutex
	version int64 // of the vault
	cached  map[scrubberKey]*scrub.Scrubber
	size    int // of all that are cached, in bytes
}

// scrubberKey is the owner, and the names of the secrets: the owner's and the operator's.
type scrubberKey struct{ owner, own, operators string }

// of returns the scrubber of secrets of a version of the vault. Hosts to which the same
// secrets are bound share it: a sandbox can send requests to any number of hosts below a
// name.
func (f *scrubbers) of(owner string, version int64, own, operators []vault.Value, values [][]byte) *scrub.Scrubber {
	key := scrubberKey{owner, namesOf(own), namesOf(operators)}
	f.mu.Lock()
	defer f.mu.Unlock()
	size := 20 << 10
	for _, v := range values {
		size += 5<<10 + len(v)
	}
	if f.cached == nil || version != f.version || f.size+size > maxScrubbers {
		f.version, f.size = version, 0
		f.cached = map[scrubberKey]*scrub.Scrubber{}
	}
	s, ok := f.cached[key]
	if !ok {
		s = scrub.New(values)
		f.cached[key] = s
		f.size += size
	}
	return s
}

// Scrubber returns a filter that removes each secret that may be in a response: the
// owner's and the operator's that are bound to the host, and those in this request, which
// may have been replaced since. It is nil if there are none. After it, the session gives
// out no other secret.
func (c *Client) Scrubber(host string, secrets *session.Session) intercept.Filter {
	v := c.carrier.cfg.Vault
	version := v.Version() // before its secrets
	own := v.BoundTo(c.Owner, host)
	var operators []vault.Value // may have the same names as the owner's
	if operator := c.carrier.cfg.Operator; c.Owner != operator {
		operators = v.BoundTo(operator, host)
	}
	values := bytesOf(own, operators)
	switch extra := secrets.Seal(values); {
	case len(extra) > 0:
		return scrub.New(append(values, extra...))
	case len(values) > 0:
		return c.carrier.scrubbers.of(c.Owner, version, own, operators, values)
	}
	return nil
}

func bytesOf(lists ...[]vault.Value) [][]byte {
	var values [][]byte
	for _, list := range lists {
		values = slices.Grow(values, len(list))
		for _, s := range list {
			values = append(values, s.Bytes)
		}
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
