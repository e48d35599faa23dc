package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"github.com/dgraph-io/badger/v4"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store/document"
)

var _ document.Store = (*Badger)(nil)

// Documents are small values of other packages, such as rules, secrets and policies, that
// the store holds under a kind and a name. The store does not interpret them. Like records
// they are on the disk when a write returns.

// maxDocumentName, in bytes, suffices for the names of certificates, which have the name of
// the issuer and twice a host name.
const maxDocumentName = 1000

// maxDocumentKind bounds the kind, in bytes.
const maxDocumentKind = 32

// encodingBytes marks a value that is stored unchanged.
const encodingBytes = 2

// PutDocument writes the document, replacing an older one of the same kind and
// name. Kinds have 1 to 32 characters of a-z, names 1 to 1000 arbitrary bytes. A value of
// more than 800 KiB is refused with a *sandbox.InvalidError, as is an invalid kind or
// name; a full disk returns sandbox.ErrStoreFull (wrapped).
func (s *Badger) PutDocument(ctx context.Context, kind, name string, value []byte) error {
	key, err := documentKey(kind, name)
	if err != nil {
		return err
	}
	encoded, err := seal(kind, encodingBytes, value, s.maxRecord, "")
	if err != nil {
		return err
	}
	return s.writeAndWait(ctx, &write{key: key, value: encoded})
}

// DeleteDocument removes the document. Idempotent.
func (s *Badger) DeleteDocument(ctx context.Context, kind, name string) error {
	key, err := documentKey(kind, name)
	if err != nil {
		return err
	}
	return s.writeAndWait(ctx, &write{key: key})
}

// Document returns the value of a document, which the caller then owns, or fs.ErrNotExist
// (wrapped).
func (s *Badger) Document(ctx context.Context, kind, name string) (value []byte, err error) {
	key, err := documentKey(kind, name)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	err = s.view(func(txn *badger.Txn) error {
		item, err := txn.Get(key)
		if errors.Is(err, badger.ErrKeyNotFound) {
			err = fs.ErrNotExist
		}
		if err == nil {
			value, err = item.ValueCopy(nil)
		}
		if err == nil {
			value, err = unseal(encodingBytes, value)
		}
		if err != nil {
			return fmt.Errorf("document of kind %s: %w", kind, err)
		}
		return nil
	})
	return value, err
}

// DocumentNames calls yield for the names that begin with prefix of all documents of the
// kind, in byte order, and reads no values. If yield returns a name, DocumentNames continues
// with the first one that is not less. An error of yield ends the iteration.
func (s *Badger) DocumentNames(ctx context.Context, kind, prefix string, yield func(name string) (next string, err error)) error {
	if err := checkKind(kind); err != nil {
		return err
	}
	ofKind := documentPrefix(kind)
	return s.view(func(txn *badger.Txn) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: slices.Concat(ofKind, []byte(prefix))})
		defer it.Close()
		for it.Rewind(); it.Valid(); {
			if err := ctx.Err(); err != nil {
				return err
			}
			next, err := yield(string(it.Item().Key()[len(ofKind):]))
			if err != nil {
				return err
			}
			if next == "" {
				it.Next()
			} else {
				it.Seek(slices.Concat(ofKind, []byte(next)))
			}
		}
		return nil
	})
}

// Documents calls yield for every document of the kind, in the byte order of the names,
// until yield returns an error, which Documents then returns. yield owns the value, and
// may call the methods of the store.
func (s *Badger) Documents(ctx context.Context, kind string, yield func(name string, value []byte) error) error {
	if err := checkKind(kind); err != nil {
		return err
	}
	return s.each(ctx, documentPrefix(kind), func(name string, encoded []byte) error {
		value, err := unseal(encodingBytes, encoded)
		if err != nil {
			return fmt.Errorf("document %s %q: %w", kind, name, err)
		}
		return yield(name, slices.Clone(value))
	})
}

// checkKind refuses kinds that would make a key ambiguous.
func checkKind(kind string) error {
	if len(kind) == 0 || len(kind) > maxDocumentKind || strings.Trim(kind, "abcdefghijklmnopqrstuvwxyz") != "" {
		return &sandbox.InvalidError{Field: "kind", Reason: fmt.Sprintf("%.40q is not a kind of document", kind), Want: "1 to 32 of a-z"}
	}
	return nil
}

func documentPrefix(kind string) []byte { return []byte("d/" + kind + "/") }

func documentKey(kind, name string) ([]byte, error) {
	if err := checkKind(kind); err != nil {
		return nil, err
	}
	if len(name) == 0 || len(name) > maxDocumentName {
		return nil, &sandbox.InvalidError{Field: "name", Reason: "a document's name has " + strconv.Itoa(len(name)) + " bytes",
			Want: "1 to " + strconv.Itoa(maxDocumentName)}
	}
	return append(documentPrefix(kind), name...), nil
}
