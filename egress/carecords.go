package egress

import (
	"context"
)

// caKind is the kind of the documents that hold the certificate authority.
const caKind = "ca"

// caRecords keeps the authority among the documents. It implements ca.Records.
type caRecords struct{ documents Documents }

func (r caRecords) Get(ctx context.Context, name string) (value []byte, err error) {
	err = r.documents.Documents(ctx, caKind, func(n string, v []byte) error {
		if n == name {
			value = v
		}
		return nil
	})
	return value, err
}

func (r caRecords) Put(ctx context.Context, name string, value []byte) error {
	return r.documents.PutDocument(ctx, caKind, name, value)
}
