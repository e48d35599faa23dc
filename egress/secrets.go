package egress

import (
	"context"

	"github.com/doze-run/doze/egress/secret/vault"
)

// PutSecret stores a secret, or replaces its value. Rules use it from their next
// request on.
func (e *Egress) PutSecret(ctx context.Context, owner, name string, value []byte, hosts []string) (vault.Secret, error) {
	return e.vault.Put(ctx, owner, name, value, hosts)
}

// Secrets lists an owner's secrets, by name and without values.
func (e *Egress) Secrets(owner string) []vault.Secret { return e.vault.List(owner) }

// DeleteSecret deletes a secret. Requests whose rules name it are denied from then on.
// It returns vault.ErrUnknown if the secret does not exist.
func (e *Egress) DeleteSecret(ctx context.Context, owner, name string) error {
	return e.vault.Delete(ctx, owner, name)
}
