// Package session provides the secrets of one request, wherever it needs them: in what
// policies write, in the place of placeholders, and for the filter of its response.
package session

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"

	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/egress/secret/reference"
	"github.com/doze-run/doze/egress/secret/vault"
)

// Session is the secrets of one request. Value is safe for concurrent use; the other
// methods belong to the goroutine of the request.
type Session struct {
	vault *vault.Vault
	host  string
	tls   bool
	refs  *reference.Set // nil before the first call of For
	used  []secret.ID    // rendered

	mu     sync.Mutex
	values [][]byte // given out; once sealed, all that can still be given out
	sealed bool
}

// New returns the session of a request to host, which is clean (rule.CleanHost).
func New(v *vault.Vault, host string, tls bool) *Session {
	return &Session{vault: v, host: host, tls: tls}
}

// Value returns a secret: only over TLS, which is always verified, and only to a host
// that it is bound to. It may be called while the body of the request is sent.
func (s *Session) Value(id secret.ID) ([]byte, error) {
	if !s.tls {
		return nil, fmt.Errorf("secret %q is sent over TLS only: use https", id.Name)
	}
	value, err := s.vault.Use(id.Owner, id.Name, s.host)
	switch {
	case errors.Is(err, vault.ErrNotBound):
		return nil, fmt.Errorf("secret %q is not bound to %s", id.Name, s.host)
	case errors.Is(err, vault.ErrUnknown):
		return nil, fmt.Errorf("secret %q does not exist", id.Name)
	case err != nil:
		return nil, err
	}
	return value, s.add(id, value)
}

// add notes a value that is given out. A sealed session gives out only values that the
// filter of the response knows.
func (s *Session) add(id secret.ID, value []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case contains(s.values, value):
	case s.sealed:
		return fmt.Errorf("secret %q was changed while the request was sent: send it again", id.Name)
	default:
		s.values = append(s.values, value)
	}
	return nil
}

// Seal restricts later calls of Value to the given values and those given out before. It
// returns the latter unless they are among the former: secrets that were replaced since.
func (s *Session) Seal(bound [][]byte) (extra [][]byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, v := range s.values {
		if !contains(bound, v) {
			extra = append(extra, v)
		}
	}
	s.values, s.sealed = slices.Concat(bound, extra), true
	return extra
}

func contains(values [][]byte, value []byte) bool {
	return slices.ContainsFunc(values, func(v []byte) bool { return bytes.Equal(v, value) })
}

// For returns an owner's secrets for one policy. names maps the names that the policy
// uses to names of secrets.
func (s *Session) For(owner string, names map[string]string) secret.Source {
	if s.refs == nil {
		s.refs = reference.NewSet(s.Value)
	}
	return s.refs.Source(owner, names)
}

// Moved reports whether a policy of this owner placed a reference to a secret of another
// owner. Policies see the references that earlier policies placed, and could have the
// node publish a secret of the operator. wrote is the body that the policy wrote, or nil.
func (s *Session) Moved(before, after *http.Request, wrote []byte, owner string) bool {
	return s.refs.Moved(before, after, wrote, func(id secret.ID) bool { return id.Owner != owner })
}

// Render replaces references by values in the header and the URL, and in the body if a
// policy wrote it. A client's body has none: references never leave the node.
func (s *Session) Render(r *http.Request, wroteBody bool) error {
	used, err := s.refs.Render(r, wroteBody)
	s.used = append(s.used, used...)
	return err
}

// Used returns the secrets that policies placed in the request, or derived something
// from.
func (s *Session) Used() []secret.ID { return slices.Concat(s.refs.Derived(), s.used) }
