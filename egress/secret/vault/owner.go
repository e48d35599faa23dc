package vault

import (
	"slices"
	"strings"
)

// entry is a secret with its value. It does not change.
type entry struct {
	Secret
	value    []byte // nil if unreadable
	patterns []pattern
}

func (e *entry) public() Secret {
	s := e.Secret
	s.Hosts = slices.Clone(s.Hosts)
	return s
}

func (e *entry) boundTo(host string) bool {
	return slices.ContainsFunc(e.patterns, func(p pattern) bool { return p.match(host) })
}

// ownerSecrets has all secrets of one owner, with an index of hosts. It does not change.
type ownerSecrets struct {
	secrets map[string]*entry
	// index has the values of each pattern, by name.
	index map[pattern][]Value
}

var noSecrets = &ownerSecrets{}

func newOwnerSecrets(secrets map[string]*entry) *ownerSecrets {
	s := &ownerSecrets{secrets: secrets, index: map[pattern][]Value{}}
	for name, e := range secrets {
		if e.Unreadable {
			continue // it is never sent, so no response can contain it
		}
		for _, p := range e.patterns {
			s.index[p] = append(s.index[p], Value{Name: name, Bytes: e.value})
		}
	}
	for _, values := range s.index {
		slices.SortFunc(values, byName)
	}
	return s
}

func byName(a, b Value) int { return strings.Compare(a.Name, b.Name) }

// boundTo finds the patterns of the host and of all names below its parents.
func (s *ownerSecrets) boundTo(host string) []Value {
	if len(s.index) == 0 {
		return nil
	}
	found := s.index[pattern{name: host}]
	several := false
	for i := 1; i < len(host); i++ {
		if host[i] != '.' {
			continue
		}
		more := s.index[pattern{name: host[i+1:], below: true}]
		switch {
		case len(more) == 0:
		case len(found) == 0:
			found = more
		default:
			found, several = append(slices.Clip(found), more...), true
		}
	}
	if several { // a secret may be bound to both
		slices.SortFunc(found, byName)
		found = slices.CompactFunc(found, func(a, b Value) bool { return a.Name == b.Name })
	}
	return found
}
