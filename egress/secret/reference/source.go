package reference

import (
	"fmt"

	"github.com/doze-run/doze/egress/secret"
)

// source gives one policy the secrets that its rule names.
type source struct {
	set   *Set
	owner string
	names map[string]string
}

// Source returns a source of an owner's secrets. names maps the names that the policy
// uses to names of secrets; all others are unknown.
func (s *Set) Source(owner string, names map[string]string) secret.Source {
	return source{s, owner, names}
}

// id returns the secret that the policy means.
func (s source) id(name string) (secret.ID, error) {
	mapped, ok := s.names[name]
	if !ok {
		return secret.ID{}, fmt.Errorf("%w: the rule gives the policy no secret %q", secret.ErrUnknown, name)
	}
	return secret.ID{Owner: s.owner, Name: mapped}, nil
}

func (s source) Reference(name string) (string, error) {
	id, err := s.id(name)
	if err != nil {
		return "", err
	}
	return s.set.Secret(id)
}

func (s source) Encode(encoding int32, text string) (string, error) {
	return s.set.Encode(encoding, text)
}

func (s source) HMAC(name, prefix string, parts [][]byte) ([]byte, error) {
	id, err := s.id(name)
	if err != nil {
		return nil, err
	}
	return s.set.HMAC(id, prefix, parts)
}

func (s source) Sign(name string, algorithm int32, data []byte) ([]byte, error) {
	id, err := s.id(name)
	if err != nil {
		return nil, err
	}
	return s.set.Sign(id, algorithm, data)
}
