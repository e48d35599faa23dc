package server

import (
	"errors"
	"io"
	"net/http"
	"sync"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/trust"
)

// trusted are the CAs that this run of the guest has installed.
type trusted struct {
	installing sync.Mutex // held through an installation
	store      trust.Store

	mu     sync.Mutex
	digest string
	vars   map[string]string // replaced, never changed
}

func newTrusted(cfg Config) *trusted {
	return &trusted{store: trust.Store{
		Root: cfg.Root, Env: cfg.Env,
		Write: func(path string, content io.Reader) error { return replaceFile(path, 0, content) },
	}}
}

// last returns the digest of the CAs that were installed last.
func (t *trusted) last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.digest
}

// variables returns the variables that name the CAs' files.
func (t *trusted) variables() map[string]string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.vars
}

func (t *trusted) install(ca, roots []byte) (needsRoots bool, err error) {
	t.installing.Lock()
	defer t.installing.Unlock()
	needsRoots, err = t.store.Install(ca, roots)
	if errors.Is(err, trust.ErrInvalid) {
		return false, refuse(guest.CodeInvalid, "%v", err)
	}
	vars := t.store.Variables()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.digest, t.vars = guest.TrustDigest(ca), vars
	return needsRoots, err
}

func (s *Server) putTrust(w http.ResponseWriter, r *http.Request) error {
	var req guest.Trust
	if err := readJSON(r, &req); err != nil {
		return err
	}
	needsRoots, err := s.trust.install([]byte(req.CA), []byte(req.Roots))
	if err != nil {
		return err
	}
	return writeJSON(w, guest.TrustResult{NeedsRoots: needsRoots})
}
