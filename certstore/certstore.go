// Package certstore stores what Caddy needs for TLS in the node's store: certificates, their
// keys, accounts at certificate authorities, and Caddy's own authorities. A backup of the
// node's data then contains them.
//
// Every value is sealed with the node's key and bound to its name: see package seal.
package certstore

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/certmagic"

	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/runtime/store"
)

// Kinds of documents: values by key, and the state of this package.
const (
	valueKind = "certificates"
	stateKind = "certstore"
)

// Config of a Storage. Log is optional.
type Config struct {
	Store *store.Badger
	Key   *seal.Key
	// Folder is where earlier versions had Caddy's files. Open imports them once. The
	// public certificates of Caddy's authorities are written there as files, for
	// programs that trust them.
	Folder string
	Log    *slog.Logger
}

// Storage implements certmagic.Storage, whose comments are the contract. Locks belong to this
// value, so a store has one Storage. Its methods may be called concurrently.
//
// A key has at most 1000 bytes, and a value at most about 800 KiB.
type Storage struct {
	cfg   Config
	locks locks
}

// Open opens the storage. When a store has none yet, it imports the files in cfg.Folder, which
// stay. Values that an old key has sealed are sealed again.
func Open(ctx context.Context, cfg Config) (*Storage, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Storage{cfg: cfg}
	if err := s.importOnce(ctx); err != nil {
		return nil, fmt.Errorf("import Caddy's files from %s: %w", cfg.Folder, err)
	}
	if err := s.sealAgain(ctx); err != nil {
		return nil, fmt.Errorf("read the stored certificates: %w", err)
	}
	if err := s.writeRoots(ctx); err != nil {
		return nil, err
	}
	return s, nil
}

// String names the storage, for logs.
func (s *Storage) String() string { return "doze" }

// clean returns a key without superfluous slashes. No key leads out of the root, which is
// empty.
func clean(key string) string { return path.Clean("/" + key)[1:] }

// purpose of the seal of a value.
func purpose(key string) string { return valueKind + "/" + key }

// modifiedSize is the size of the time of modification, in front of a value.
const modifiedSize = 8

// Store implements certmagic.Storage. The value is on the disk when Store returns.
func (s *Storage) Store(ctx context.Context, key string, value []byte) error {
	key = clean(key)
	if err := s.put(ctx, key, time.Now(), value); err != nil {
		return err
	}
	if isRoot(key) {
		s.writeRoot(key, value)
	}
	return nil
}

func (s *Storage) put(ctx context.Context, key string, modified time.Time, value []byte) error {
	plain := binary.BigEndian.AppendUint64(make([]byte, 0, modifiedSize+len(value)), uint64(modified.UnixNano()))
	sealed, err := s.cfg.Key.Seal(purpose(key), append(plain, value...))
	if err != nil {
		return err
	}
	return s.cfg.Store.PutDocument(ctx, valueKind, key, sealed)
}

// get returns a value, or fs.ErrNotExist (wrapped).
func (s *Storage) get(ctx context.Context, key string) (modified time.Time, value []byte, err error) {
	if key == "" || len(key) > maxKey { // no value has such a key
		return time.Time{}, nil, fmt.Errorf("certificate storage: %w", fs.ErrNotExist)
	}
	sealed, err := s.cfg.Store.Document(ctx, valueKind, key)
	if err != nil {
		return time.Time{}, nil, err
	}
	plain, err := s.cfg.Key.Open(purpose(key), sealed)
	if err != nil {
		return time.Time{}, nil, err
	}
	if len(plain) < modifiedSize {
		return time.Time{}, nil, fmt.Errorf("certificate storage: a value has %d bytes: %w", len(plain), seal.ErrBroken)
	}
	return time.Unix(0, int64(binary.BigEndian.Uint64(plain))), plain[modifiedSize:], nil
}

// maxKey is the maximum length of a key and of a document's name, in bytes.
const maxKey = 1000

// Load implements certmagic.Storage.
func (s *Storage) Load(ctx context.Context, key string) ([]byte, error) {
	_, value, err := s.get(ctx, clean(key))
	return value, err
}

// Delete implements certmagic.Storage.
func (s *Storage) Delete(ctx context.Context, key string) error {
	key = clean(key)
	keys, err := s.below(ctx, key)
	if err != nil {
		return err
	}
	if key != "" && len(key) <= maxKey {
		keys = append(keys, key)
	}
	for _, key := range keys {
		if err := s.cfg.Store.DeleteDocument(ctx, valueKind, key); err != nil {
			return err
		}
		if isRoot(key) {
			s.removeRoot(key)
		}
	}
	return nil
}

// prefix of the keys in a directory.
func prefix(directory string) string {
	if directory == "" {
		return ""
	}
	return directory + "/"
}

// below returns the keys of all values in a directory and those below it.
func (s *Storage) below(ctx context.Context, directory string) (keys []string, err error) {
	err = s.cfg.Store.DocumentNames(ctx, valueKind, prefix(directory), func(key string) (string, error) {
		keys = append(keys, key)
		return "", nil
	})
	return keys, err
}

// Exists implements certmagic.Storage.
func (s *Storage) Exists(ctx context.Context, key string) bool {
	_, err := s.Stat(ctx, key)
	return err == nil
}

// Stat implements certmagic.Storage.
func (s *Storage) Stat(ctx context.Context, key string) (certmagic.KeyInfo, error) {
	name := clean(key)
	modified, value, err := s.get(ctx, name)
	if err == nil {
		return certmagic.KeyInfo{Key: key, Modified: modified, Size: int64(len(value)), IsTerminal: true}, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return certmagic.KeyInfo{}, err
	}
	found := errors.New("found")
	failed := s.cfg.Store.DocumentNames(ctx, valueKind, prefix(name), func(string) (string, error) { return "", found })
	if errors.Is(failed, found) {
		return certmagic.KeyInfo{Key: key}, nil
	}
	return certmagic.KeyInfo{}, cmp.Or(failed, err)
}

// List implements certmagic.Storage. As certmagic.FileStorage does, it lists directories,
// too, and returns fs.ErrNotExist (wrapped) for one that does not exist.
func (s *Storage) List(ctx context.Context, directory string, recursive bool) ([]string, error) {
	name := clean(directory)
	prefix := prefix(name)
	var keys []string
	previous := ""
	err := s.cfg.Store.DocumentNames(ctx, valueKind, prefix, func(key string) (next string, err error) {
		rest := key[len(prefix):]
		if !recursive {
			child, _, nested := strings.Cut(rest, "/")
			keys = append(keys, prefix+child)
			if nested {
				next = prefix + child + string(rune('/'+1)) // behind all keys of the directory
			}
			return next, nil
		}
		for i := range len(rest) {
			// The keys of a directory follow each other.
			if rest[i] == '/' && !strings.HasPrefix(previous, key[:len(prefix)+i+1]) {
				keys = append(keys, prefix+rest[:i])
			}
		}
		keys = append(keys, key)
		previous = key
		return "", nil
	})
	if err != nil {
		return nil, err
	}
	if len(keys) == 0 {
		_, err := s.Stat(ctx, name) // a value has no keys below it
		return nil, err
	}
	slices.Sort(keys)
	return slices.Compact(keys), nil
}

// sealAgain seals all values with the present key, so that old ones can be removed.
func (s *Storage) sealAgain(ctx context.Context) error {
	return s.cfg.Store.Documents(ctx, valueKind, func(key string, sealed []byte) error {
		if !s.cfg.Key.Old(sealed) {
			return nil
		}
		plain, err := s.cfg.Key.Open(purpose(key), sealed)
		if err == nil {
			sealed, err = s.cfg.Key.Seal(purpose(key), plain)
		}
		if err == nil {
			err = s.cfg.Store.PutDocument(ctx, valueKind, key, sealed)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			s.cfg.Log.Error("failed to seal a certificate value again that is sealed with an old key", "error", err)
		}
		return nil
	})
}

var (
	_ certmagic.Storage   = (*Storage)(nil)
	_ certmagic.TryLocker = (*Storage)(nil)
)
