// Package ca implements the node's own certificate authority, which only its
// sandboxes trust. It signs the leaf certificates of intercepted connections.
//
// Its key is generated once and stored, sealed, in a record. Some months before a
// root certificate expires a new one is made. For a while sandboxes receive both
// roots to trust, and only then does the new one sign.
package ca

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/runtime/store/document"
)

// documentKind and documentName identify the record of the authority.
const documentKind, documentName = "ca", "egress-ca"

// Config of an Authority. Documents and Key are required.
type Config struct {
	Documents document.Store
	Key       *seal.Key
	// Now is the clock. Default time.Now.
	Now func() time.Time
	// Log receives the creation of roots, failed renewals, and a record that is still
	// sealed with an old key. Default slog.Default().
	Log *slog.Logger
}

// Authority signs leaf certificates. It is safe for concurrent use.
type Authority struct {
	cfg    Config
	record seal.Document
	// key is the key of all leaves. One is enough: a leaf's key only proves to a
	// sandbox that it communicates with this process, which holds the authority's key
	// as well.
	key   *ecdsa.PrivateKey
	keyID []byte
	cache cache

	roots    atomic.Pointer[roots]
	renewing sync.Mutex // held while roots are made and stored
}

// Open returns the stored authority, or creates and stores one if the record does
// not exist. A record that cannot be opened is an error: no running sandbox would
// trust a new authority.
func Open(ctx context.Context, cfg Config) (*Authority, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	a := &Authority{cfg: cfg, record: seal.Document{Store: cfg.Documents, Key: cfg.Key, Kind: documentKind, Name: documentName, Log: cfg.Log}}
	var err error
	if a.key, a.keyID, err = newKey(); err != nil {
		return nil, fmt.Errorf("make the key of leaf certificates: %w", err)
	}
	stored, err := a.load(ctx)
	if err != nil {
		return nil, err
	}
	a.roots.Store(newRoots(stored))
	if err := a.renew(ctx); err != nil {
		return nil, err
	}
	return a, nil
}

// newKey returns a key with its identifier, by which a certificate refers to the key that
// signed it (RFC 7093, section 2, method 1).
func newKey() (key *ecdsa.PrivateKey, id []byte, err error) {
	if key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return nil, nil, err
	}
	point, err := key.PublicKey.Bytes()
	sum := sha256.Sum256(point)
	return key, sum[:20], err
}

// Bundle returns, in PEM, all roots that sandboxes should trust now: one, or two
// while a new one replaces the old one.
func (a *Authority) Bundle() []byte { return a.current(context.Background()).bundle }

// current returns the roots, renewed if they are due. If the renewal fails, it
// returns the present ones, which are valid until the last of them expires; the
// next call tries again.
func (a *Authority) current(ctx context.Context) *roots {
	now := a.cfg.Now()
	if roots := a.roots.Load(); now.Before(roots.due) {
		return roots
	}
	// The caller may be a request whose client disconnects; others need the renewal, too.
	if err := a.renew(context.WithoutCancel(ctx)); err != nil {
		a.cfg.Log.Error("failed to renew the egress CA", "error", err)
	}
	return a.roots.Load()
}
