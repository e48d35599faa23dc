package reference

import (
	"errors"
	"fmt"

	"github.com/doze-run/doze/egress/secret"
)

// Source gives one policy the secrets that its rule names. It implements secret.Source.
type Source struct {
	// BadArgument is the last error for which the policy received only a code.
	BadArgument error

	set   *Set
	owner string
	names map[string]string
}

// Source returns a source of an owner's secrets. names maps the names that the policy
// uses to names of secrets; all others are unknown.
func (s *Set) Source(owner string, names map[string]string) *Source {
	return &Source{set: s, owner: owner, names: names}
}

// use calls f with the secret that the policy means.
func use[T any](s *Source, name string, f func(secret.ID) (T, error)) (result T, err error) {
	mapped, ok := s.names[name]
	if !ok {
		return result, fmt.Errorf("%w: the rule gives the policy no secret %q", secret.ErrUnknown, name)
	}
	result, err = f(secret.ID{Owner: s.owner, Name: mapped})
	return result, s.note(err)
}

func (s *Source) note(err error) error {
	if errors.Is(err, secret.ErrBadArgument) {
		s.BadArgument = err
	}
	return err
}

// Reference implements secret.Source.
func (s *Source) Reference(name string) (string, error) { return use(s, name, s.set.Secret) }

// Encode implements secret.Source.
func (s *Source) Encode(encoding int32, text string) (string, error) {
	ref, err := s.set.Encode(encoding, text)
	return ref, s.note(err)
}

// HMAC implements secret.Source.
func (s *Source) HMAC(name, prefix string, parts [][]byte) ([]byte, error) {
	return use(s, name, func(id secret.ID) ([]byte, error) { return s.set.HMAC(id, prefix, parts) })
}

// Sign implements secret.Source.
func (s *Source) Sign(name string, algorithm int32, data []byte) ([]byte, error) {
	return use(s, name, func(id secret.ID) ([]byte, error) { return s.set.Sign(id, algorithm, data) })
}

var _ secret.Source = (*Source)(nil)
