// Package ca is the node's own certificate authority, which only its sandboxes
// trust: it signs the leaf certificates of intercepted connections.
//
// Its key is made once and kept, sealed, in a record. Some months before a root
// certificate ends a new one is made; for a while sandboxes are told to trust
// both, and only then does the new one sign.
package ca

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/runtime/store/document"
)

// documentKind and documentName are where the authority is stored.
const documentKind, documentName = "ca", "egress-ca"

// Config of an Authority. Documents and Key are required.
type Config struct {
	Documents document.Store
	Key       *seal.Key
	// Now is the clock. Default time.Now.
	Now func() time.Time
	// Log hears of roots that are made, of a renewal that failed, and of a record
	// that is still sealed with an old key. Default slog.Default().
	Log *slog.Logger
}

// Authority signs leaf certificates. It may be used by several goroutines.
type Authority struct {
	cfg    Config
	record seal.Document
	// key of every leaf. One is enough: a leaf's key only proves to a sandbox
	// that it talks to this process, which holds the authority's key as well.
	key    *ecdsa.PrivateKey
	keyID  []byte
	leaves *cache

	roots    atomic.Pointer[roots]
	renewing sync.Mutex // held while roots are made and kept
}

// Open returns the authority that is kept in the record, and makes it if there
// is none. A record that cannot be opened is an error: a new authority would
// be trusted by no sandbox that runs.
func Open(ctx context.Context, cfg Config) (*Authority, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making the key of leaf certificates: %w", err)
	}
	id, err := keyID(&key.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("making the key of leaf certificates: %w", err)
	}
	a := &Authority{cfg: cfg, record: seal.Document{Store: cfg.Documents, Key: cfg.Key, Kind: documentKind, Name: documentName}, key: key, keyID: id, leaves: newCache(cacheSize)}
	kept, err := a.load(ctx)
	if err != nil {
		return nil, err
	}
	a.roots.Store(kept)
	if err := a.renew(ctx); err != nil {
		return nil, err
	}
	return a, nil
}

// Bundle returns, in PEM, all roots that sandboxes should trust now: one, or
// two while a new one takes the place of the old.
func (a *Authority) Bundle() []byte { return a.current(context.Background()).bundle }

// current returns the roots after what was due has been renewed. If that fails
// they go on as they are until the last of them ends: it is tried again with
// the next call.
func (a *Authority) current(ctx context.Context) *roots {
	now := a.cfg.Now()
	if kept := a.roots.Load(); now.Before(kept.due) {
		return kept
	}
	// The caller may be a request whose client leaves: others need it as well.
	if err := a.renew(context.WithoutCancel(ctx)); err != nil {
		a.cfg.Log.Error("renewing the egress CA", "error", err)
	}
	return a.roots.Load()
}
