package vault

import "fmt"

// What may be sent to one host, of an owner's secrets: all of it is looked for in
// each of the host's answers, also if a request used none. The operator's secrets
// come beside it. 100 secrets of 40 bytes halve the speed of the search for 20, and
// 1,000 halve it again (docs/RATIONALE.md); values of 64 KiB take as much memory.
const (
	MaxHostSecrets = 100
	MaxHostBytes   = 256 << 10
)

// HostFullError refuses a secret because too much would be bound to a host. It is an
// ErrTooMany.
type HostFullError struct {
	Host    string // or *.example.com, for whatever is below it
	Secrets int    // that it would have
	Bytes   int    // of these
}

func (e *HostFullError) Error() string {
	return fmt.Sprintf("%d secrets of %d bytes in all would be bound to %s, whose answers are searched for each: at most %d of %d bytes fit; name fewer hosts, or delete a secret",
		e.Secrets, e.Bytes, e.Host, MaxHostSecrets, MaxHostBytes)
}

func (e *HostFullError) Unwrap() error { return ErrTooMany }

// weight is how much is bound to something.
type weight struct{ secrets, bytes int }

func (w weight) fits() bool { return w.secrets <= MaxHostSecrets && w.bytes <= MaxHostBytes }

func weigh(values []Value) weight {
	w := weight{secrets: len(values)}
	for _, v := range values {
		w.bytes += len(v.Bytes)
	}
	return w
}

// room returns an error if too much is bound to a host of e, which is among the
// shelf's.
func (s *shelf) room(e *entry) error {
	own := newShelf(map[string]*entry{e.Name: e})
	weights := make(map[pattern]weight, len(s.index))
	for p, values := range s.index {
		weights[p] = weigh(values)
	}
	var full *HostFullError
	// Each host has what is bound to it by name, or else as much as any host below the
	// nearest pattern: *.example.com stands for one, as none has this name.
	for p := range weights {
		host := p.String()
		if len(own.boundTo(host)) == 0 || atMost(weights, host).fits() {
			continue
		}
		w := weigh(s.boundTo(host))
		if !w.fits() && (full == nil || host < full.Host) { // the same host each time
			full = &HostFullError{host, w.secrets, w.bytes}
		}
	}
	if full == nil {
		return nil
	}
	return full
}

// atMost is what is bound to a host, and more where secrets are by several patterns.
// Unlike boundTo it makes no list: there may be 100,000 patterns.
func atMost(weights map[pattern]weight, host string) weight {
	w := weights[pattern{name: host}]
	for i := range len(host) {
		if host[i] == '.' {
			more := weights[pattern{name: host[i+1:], below: true}]
			w.secrets += more.secrets
			w.bytes += more.bytes
		}
	}
	return w
}
