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

// id returns the secret that the policy means.
func (s *Source) id(name string) (secret.ID, error) {
	mapped, ok := s.names[name]
	if !ok {
		return secret.ID{}, fmt.Errorf("%w: the rule gives the policy no secret %q", secret.ErrUnknown, name)
	}
	return secret.ID{Owner: s.owner, Name: mapped}, nil
}

func (s *Source) note(err error) error {
	if errors.Is(err, secret.ErrBadArgument) {
		s.BadArgument = err
	}
	return err
}

// Reference implements secret.Source.
func (s *Source) Reference(name string) (string, error) {
	id, err := s.id(name)
	if err != nil {
		return "", err
	}
	return s.set.Secret(id)
}

// Encode implements secret.Source.
func (s *Source) Encode(encoding int32, text string) (string, error) {
	ref, err := s.set.Encode(encoding, text)
	return ref, s.note(err)
}

// HMAC implements secret.Source.
func (s *Source) HMAC(name, prefix string, parts [][]byte) ([]byte, error) {
	id, err := s.id(name)
	if err != nil {
		return nil, err
	}
	sum, err := s.set.HMAC(id, prefix, parts)
	return sum, s.note(err)
}

// Sign implements secret.Source.
func (s *Source) Sign(name string, algorithm int32, data []byte) ([]byte, error) {
	id, err := s.id(name)
	if err != nil {
		return nil, err
	}
	signature, err := s.set.Sign(id, algorithm, data)
	return signature, s.note(err)
}

var _ secret.Source = (*Source)(nil)
