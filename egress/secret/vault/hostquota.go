package vault

import "fmt"

// Limits of an owner's secrets that may be sent to one host: each of the host's responses
// is searched for all of them, also if a request used none. The operator's secrets are
// searched for, too. 100 secrets of 40 bytes halve the speed of the search for 20, and
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
	return fmt.Sprintf("%d secrets of %d bytes in all would be bound to %s, whose responses are searched for each: at most %d of %d bytes fit; name fewer hosts, or delete a secret",
		e.Secrets, e.Bytes, e.Host, MaxHostSecrets, MaxHostBytes)
}

func (e *HostFullError) Unwrap() error { return ErrTooMany }

// hostUsage is the number and size of secrets that are bound to a host.
type hostUsage struct{ secrets, bytes int }

func (w hostUsage) fits() bool { return w.secrets <= MaxHostSecrets && w.bytes <= MaxHostBytes }

func usageOf(values []Value) hostUsage {
	w := hostUsage{secrets: len(values)}
	for _, v := range values {
		w.bytes += len(v.Bytes)
	}
	return w
}

// checkHostQuota returns an error if too much is bound to a host of e, which is among the
// owner's secrets.
func (s *ownerSecrets) checkHostQuota(e *entry) error {
	own := newOwnerSecrets(map[string]*entry{e.Name: e})
	usages := make(map[pattern]hostUsage, len(s.index))
	for p, values := range s.index {
		usages[p] = usageOf(values)
	}
	var full *HostFullError
	// Each host has what is bound to it by name, or else as much as any host below the
	// nearest pattern: *.example.com stands for one, as none has this name.
	for p := range usages {
		host := p.String()
		if len(own.boundTo(host)) == 0 || upperBound(usages, host).fits() {
			continue
		}
		w := usageOf(s.boundTo(host))
		if !w.fits() && (full == nil || host < full.Host) { // the same host each time
			full = &HostFullError{host, w.secrets, w.bytes}
		}
	}
	if full == nil {
		return nil
	}
	return full
}

// upperBound returns the usage of a host. It counts a secret again for each pattern that
// binds it. Unlike boundTo it makes no list: there may be 100,000 patterns.
func upperBound(usages map[pattern]hostUsage, host string) hostUsage {
	w := usages[pattern{name: host}]
	for i := range len(host) {
		if host[i] == '.' {
			more := usages[pattern{name: host[i+1:], below: true}]
			w.secrets += more.secrets
			w.bytes += more.bytes
		}
	}
	return w
}
