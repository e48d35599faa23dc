package seal

import (
	"context"

	"github.com/doze-run/doze/runtime/store/document"
)

// Document is a document of a store that is sealed for the purpose of its name.
type Document struct {
	Store      document.Store
	Key        *Key
	Kind, Name string
}

// Read returns the value, or nil if the document does not exist. It reports whether the
// value should be written again because an old key has sealed it. Errors: see Key.Open.
func (d Document) Read(ctx context.Context) (value []byte, old bool, err error) {
	err = d.Store.Documents(ctx, d.Kind, func(name string, sealed []byte) (err error) {
		if name == d.Name {
			old = d.Key.Old(sealed)
			value, err = d.Key.Open(d.Name, sealed)
		}
		return err
	})
	return value, old, err
}

// Write stores the value. It is on the disk when Write returns.
func (d Document) Write(ctx context.Context, value []byte) error {
	sealed, err := d.Key.Seal(d.Name, value)
	if err != nil {
		return err
	}
	return d.Store.PutDocument(ctx, d.Kind, d.Name, sealed)
}
