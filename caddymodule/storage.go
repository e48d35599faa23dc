package caddymodule

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/certmagic"

	"github.com/doze-run/doze/certstore"
	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/runtime/store"
)

func init() {
	caddy.RegisterModule(Storage{})
}

// Storage stores certificates, their keys, accounts at certificate authorities and
// Caddy's own authorities in the node's store, encrypted as secrets are. It uses the
// data folder of the app `doze`. Caddy's `storage` commands load no app and use `$DOZE_HOME`.
type Storage struct {
	held         *heldStore // nil until acquired
	certificates *certstore.Storage
}

// CaddyModule returns the Caddy module information.
func (Storage) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "caddy.storage.doze", New: func() caddy.Module { return new(Storage) }}
}

// Provision opens the node's store, which the node then shares: Caddy's authorities are
// loaded before any app starts.
func (s *Storage) Provision(ctx caddy.Context) error {
	home, err := storageHome(ctx)
	if err != nil {
		return err
	}
	if other := otherFolder(home); other != "" { // as in loadOpenNode, also without the app
		return node.FixedError{Option: "data", Have: other, Want: home}
	}
	if s.held, err = holdStore(home, ctx.Slogger().Handler()); err != nil {
		return err
	}
	s.certificates, err = s.held.openCertificates(ctx)
	return err
}

// storageHome returns the data folder of the app, which it provisions.
func storageHome(ctx caddy.Context) (string, error) {
	app, err := ctx.AppIfConfigured("doze")
	if errors.Is(err, caddy.ErrNotConfigured) { // as for `caddy storage export`
		return new(App).home()
	}
	if err != nil {
		return "", err
	}
	return app.(*App).config.Home, nil
}

// CertMagicStorage implements caddy.StorageConverter.
func (s *Storage) CertMagicStorage() (certmagic.Storage, error) { return s.certificates, nil }

// Cleanup releases the store.
func (s *Storage) Cleanup() error {
	if s.held == nil {
		return nil
	}
	return s.held.release()
}

// stores that are open in this process, by data folder. Nodes and Storages hold them.
var stores = caddy.NewUsagePool()

// heldStore is the open store of a node.
type heldStore struct {
	*store.Badger
	home   string
	target logTarget // of its log

	mu           sync.Mutex
	certificates *certstore.Storage // nil until it is used
}

// holdStore acquires the store in a folder, and opens it if it is not open. The caller
// releases it.
func holdStore(home string, log slog.Handler) (*heldStore, error) {
	held, _, err := stores.LoadOrNew(home, func() (_ caddy.Destructor, err error) {
		held := &heldStore{home: home}
		held.target.set(log)
		held.Badger, err = node.OpenStore(home, held.log())
		return held, err
	})
	if err != nil {
		return nil, err
	}
	return held.(*heldStore), nil
}

func (h *heldStore) log() *slog.Logger { return slog.New(logHandler{target: &h.target}) }

// openCertificates returns the storage of certificates, which all configurations share.
func (h *heldStore) openCertificates(ctx context.Context) (*certstore.Storage, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.certificates != nil {
		return h.certificates, nil
	}
	key, err := seal.Open(node.SealingKeyFile(h.home))
	if err != nil {
		return nil, err
	}
	h.certificates, err = certstore.Open(ctx, certstore.Config{
		Store: h.Badger, Key: key, Folder: filepath.Join(h.home, "caddy"), Log: h.log(),
	})
	return h.certificates, err
}

func (h *heldStore) release() error {
	_, err := stores.Delete(h.home)
	return err
}

// Destruct closes the store.
func (h *heldStore) Destruct() error { return h.Close() }

// UnmarshalCaddyfile sets up the storage. Syntax:
//
//	storage doze
func (s *Storage) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume module name
	if d.NextArg() {
		return d.ArgErr()
	}
	if d.NextBlock(0) {
		return d.Errf("unrecognized subdirective '%s'; storage doze has none", d.Val())
	}
	return nil
}

// Interface guards
var (
	_ caddy.Provisioner      = (*Storage)(nil)
	_ caddy.CleanerUpper     = (*Storage)(nil)
	_ caddy.StorageConverter = (*Storage)(nil)
	_ caddyfile.Unmarshaler  = (*Storage)(nil)
)
