package seal

import (
	"context"
	"log/slog"

	"github.com/doze-run/doze/runtime/store/document"
)

// Document is a document of a store that is sealed for the purpose of its name.
type Document struct {
	Store      document.Store
	Key        *Key
	Kind, Name string
	// Log receives a failure to seal the value with the new key. docs/operations.md searches
	// the log for "with an old key" before it removes one.
	Log *slog.Logger
}

// Read returns the value, or nil if the document does not exist. A value that an old key has
// sealed is sealed again; if that fails, the old key is still needed. Errors: see Key.Open.
func (d Document) Read(ctx context.Context) (value []byte, err error) {
	old := false
	err = d.Store.Documents(ctx, d.Kind, func(name string, sealed []byte) (err error) {
		if name == d.Name {
			old = d.Key.Old(sealed)
			value, err = d.Key.Open(d.Name, sealed)
		}
		return err
	})
	if err == nil && old {
		if err := d.Write(ctx, value); err != nil {
			d.Log.Error("failed to seal value that is sealed with an old key", "name", d.Name, "error", err)
		}
	}
	return value, err
}

// Write stores the value. It is on the disk when Write returns.
func (d Document) Write(ctx context.Context, value []byte) error {
	sealed, err := d.Key.Seal(d.Name, value)
	if err != nil {
		return err
	}
	return d.Store.PutDocument(ctx, d.Kind, d.Name, sealed)
}
