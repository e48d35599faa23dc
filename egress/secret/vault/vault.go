// Package vault stores the secrets of owners: values that the node puts into their
// requests, only to the hosts that the secret is bound to, and that no client can
// read again.
//
// At rest they are sealed. In memory they are not: each request to a bound host
// needs the values, to render references and to search responses for them. Unsealing for
// each use would leave a copy in memory every time, which Go does not wipe, next to a key
// that opens them all.
package vault

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/runtime/store/document"
)

var (
	// ErrUnknown is returned if the owner has no secret of the name.
	ErrUnknown = errors.New("unknown secret")
	// ErrNotBound is returned when the secret must not go to that host.
	ErrNotBound = errors.New("the secret is not bound to that host")
	// ErrUnreadable is returned for a stored secret that cannot be unsealed: it has to
	// be put again.
	ErrUnreadable = errors.New("the secret cannot be unsealed: put it again")
	// ErrTooMany is returned when an owner has as many secrets as fit, and
	// wrapped in a *HostFullError when one of the hosts has.
	ErrTooMany = fmt.Errorf("the limit of %d secrets is reached; delete one first", MaxSecrets)
)

// Secret describes a secret, without its value.
type Secret struct {
	Name string `json:"name"`
	// Hosts that it may be sent to, as patterns: `api.github.com`, `*.example.com`.
	Hosts []string `json:"hosts"`
	// Version is 1 for the first value and one more for each that replaces it.
	Version   int64     `json:"version"`
	CreatedAt time.Time `json:"created_at"`
	UpdatedAt time.Time `json:"updated_at"`
	// Unreadable: the stored secret cannot be unsealed. See ErrUnreadable.
	Unreadable bool `json:"unreadable,omitempty"`
}

// Vault holds secrets. All methods are safe for concurrent use; those that read take no
// lock. Make one with Open.
type Vault struct {
	docs document.Store
	key  *seal.Key

	change  sync.Mutex   // held while a change is written, so that they stay in order
	owners  sync.Map     // of owner to *ownerSecrets, which does not change
	version atomic.Int64 // counts changes
	faults  []error
}

// Open reads all secrets. One that does not open stays in the list as unreadable,
// and Faults has the reasons: a node with a lost key runs on without its secrets.
func Open(ctx context.Context, docs document.Store, key *seal.Key) (*Vault, error) {
	v := &Vault{docs: docs, key: key}
	all := map[string]map[string]*entry{}
	err := docs.Documents(ctx, documentKind, func(document string, value []byte) error {
		owner, e, err := v.load(ctx, document, value)
		if err != nil {
			v.faults = append(v.faults, err)
		}
		if e == nil {
			return nil
		}
		if all[owner] == nil {
			all[owner] = map[string]*entry{}
		}
		all[owner][e.Name] = e
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the secrets: %w", err)
	}
	for owner, secrets := range all {
		v.owners.Store(owner, newOwnerSecrets(secrets))
	}
	v.version.Store(1)
	return v, nil
}

// Faults returns the errors in stored secrets that Open found, for the log.
func (v *Vault) Faults() []error { return v.faults }

// Version grows with each change of any secret, and is a key for what is derived
// from them: while it is the same, BoundTo returns the same. Get it first.
func (v *Vault) Version() int64 { return v.version.Load() }

// Put makes a secret, or replaces value and hosts of an existing one. It is on
// the disk and in force when Put returns. value is copied.
//
// Errors: *problem.InvalidError, ErrTooMany, *HostFullError, or the store's.
func (v *Vault) Put(ctx context.Context, owner, name string, value []byte, hosts []string) (Secret, error) {
	patterns, err := check(owner, name, value, hosts)
	if err != nil {
		return Secret{}, err
	}
	v.change.Lock()
	defer v.change.Unlock()
	have := v.ofOwner(owner).secrets
	now := time.Now().UTC().Round(0)
	e := &entry{
		Secret:   Secret{Name: name, Version: 1, CreatedAt: now, UpdatedAt: now},
		value:    slices.Clone(value),
		patterns: patterns,
	}
	for _, p := range patterns {
		e.Hosts = append(e.Hosts, p.String())
	}
	if old := have[name]; old != nil {
		e.Version, e.CreatedAt = old.Version+1, old.CreatedAt
	} else if len(have) >= MaxSecrets {
		return Secret{}, ErrTooMany
	}
	secrets := map[string]*entry{}
	maps.Copy(secrets, have)
	secrets[name] = e
	all := newOwnerSecrets(secrets)
	if err := all.checkHostQuota(e); err != nil {
		return Secret{}, err
	}
	if err := v.store(ctx, owner, e); err != nil {
		return Secret{}, fmt.Errorf("store the secret %s: %w", name, err)
	}
	v.replace(owner, all)
	return e.public(), nil
}

// Delete forgets a secret. Errors: ErrUnknown, or the store's.
func (v *Vault) Delete(ctx context.Context, owner, name string) error {
	v.change.Lock()
	defer v.change.Unlock()
	have := v.ofOwner(owner).secrets
	if have[name] == nil {
		return ErrUnknown
	}
	if err := v.docs.DeleteDocument(ctx, documentKind, documentName(owner, name)); err != nil {
		return fmt.Errorf("delete the secret %s: %w", name, err)
	}
	secrets := maps.Clone(have)
	delete(secrets, name)
	v.replace(owner, newOwnerSecrets(secrets))
	return nil
}

// replace puts the secrets in force. The caller holds change.
func (v *Vault) replace(owner string, s *ownerSecrets) {
	v.owners.Store(owner, s)
	v.version.Add(1)
}

// List returns the owner's secrets by name.
func (v *Vault) List(owner string) []Secret {
	secrets := v.ofOwner(owner).secrets
	list := make([]Secret, 0, len(secrets))
	for _, e := range secrets {
		list = append(list, e.public())
	}
	slices.SortFunc(list, func(a, b Secret) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// Get describes one secret. It returns ErrUnknown if the secret does not exist.
func (v *Vault) Get(owner, name string) (Secret, error) {
	e := v.ofOwner(owner).secrets[name]
	if e == nil {
		return Secret{}, ErrUnknown
	}
	return e.public(), nil
}

// Use returns the value for a request to host, which is clean (rule.CleanHost). It
// is shared: the caller does not change it and does not keep it longer than the
// request. Errors: ErrUnknown, ErrNotBound, ErrUnreadable (wrapped, with the name).
func (v *Vault) Use(owner, name, host string) ([]byte, error) {
	e := v.ofOwner(owner).secrets[name]
	switch {
	case e == nil:
		return nil, fmt.Errorf("%.64q: %w", name, ErrUnknown)
	case e.Unreadable:
		return nil, fmt.Errorf("%q: %w", name, ErrUnreadable)
	case !e.boundTo(host):
		return nil, fmt.Errorf("%q, %.80q: %w", name, host, ErrNotBound)
	}
	return e.value, nil
}

// BoundTo returns all secrets of the owner that may be sent to host, which is clean:
// its responses have to be searched for. The list is shared: see Use. It costs a
// look-up for each label of the name, and memory only where several patterns match.
func (v *Vault) BoundTo(owner, host string) []Value { return v.ofOwner(owner).boundTo(host) }

func (v *Vault) ofOwner(owner string) *ownerSecrets {
	if s, ok := v.owners.Load(owner); ok {
		return s.(*ownerSecrets)
	}
	return noSecrets
}
