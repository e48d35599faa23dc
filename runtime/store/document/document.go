// Package document declares the store of small values that outlive the node, such as
// rules, secrets and policies.
package document

import "context"

// Store holds values under a kind and a name. The comments of store.Badger are the
// contract.
type Store interface {
	PutDocument(ctx context.Context, kind, name string, value []byte) error
	DeleteDocument(ctx context.Context, kind, name string) error
	Documents(ctx context.Context, kind string, yield func(name string, value []byte) error) error
}
