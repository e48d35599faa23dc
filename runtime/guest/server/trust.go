package server

import (
	"errors"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/trust"
)

// trusted are the CAs that this run of the guest has installed.
type trusted struct {
	installing sync.Mutex // held through an installation
	store      trust.Store
	last       atomic.Pointer[installed]
}

// installed is the result of an installation.
type installed struct {
	digest    string
	variables map[string]string // that name the CAs' files
}

func newTrusted(cfg Config) *trusted {
	t := &trusted{store: trust.Store{Root: cfg.Root, Env: cfg.Env, Write: replaceFile}}
	t.last.Store(&installed{})
	return t
}

func (s *Server) putTrust(r *http.Request) (any, error) {
	var req guest.Trust
	if err := readJSON(r, &req); err != nil {
		return nil, err
	}
	t := s.trust
	t.installing.Lock()
	defer t.installing.Unlock()
	needsRoots, err := t.store.Install([]byte(req.CA), []byte(req.Roots))
	if errors.Is(err, trust.ErrInvalid) {
		return nil, refuse(guest.CodeInvalid, "%v", err)
	}
	t.last.Store(&installed{guest.TrustDigest([]byte(req.CA)), t.store.Variables()})
	return guest.TrustResult{NeedsRoots: needsRoots}, err
}
