package egress

import (
	"context"

	"github.com/doze-run/doze/egress/secret/vault"
)

// PutSecret keeps a secret, or a new value of one. Rules use it from their next
// request on.
func (e *Egress) PutSecret(ctx context.Context, owner, name string, value []byte, hosts []string) (vault.Secret, error) {
	return e.vault.Put(ctx, owner, name, value, hosts)
}

// Secrets lists an owner's, by name and without values.
func (e *Egress) Secrets(owner string) []vault.Secret { return e.vault.List(owner) }

// DeleteSecret forgets a secret. Requests whose rules name it are denied from then
// on. vault.ErrUnknown where there is none.
func (e *Egress) DeleteSecret(ctx context.Context, owner, name string) error {
	return e.vault.Delete(ctx, owner, name)
}
