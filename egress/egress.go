// Package egress controls the outbound network of sandboxes: it decides which rules,
// policies, secrets and settings apply to which client. Package flow carries the traffic.
//
// Egress puts the parts together:
//
//	network/stack    packets of a sandbox ↔ connections
//	network/dns      names ↔ addresses that stand for them
//	network/dial     resolves, checks and dials real addresses
//	rule             what may leave, and through which policies
//	flow             connections and requests: decided on, sent, recorded
//	proxy            the same for programs outside of sandboxes
//	http/intercept   requests within TLS, with leaf certificates of tls/ca
//	policy           runs WASM modules over requests
//	secret/vault     secrets; session, reference, placeholder and scrub keep them out of sandboxes
//	audit            what was decided
package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/flow"
	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/egress/secret/vault"
	"github.com/doze-run/doze/egress/tls/ca"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store/document"
)

// DeviceFunc makes a network device in a sandbox; the comments of netns.Client.TUN are
// the contract.
type DeviceFunc func(ctx context.Context, id sandbox.ID, pid int) (device *os.File, listener *net.TCPListener, err error)

// Of adapts a Manager.
func Of(m *sandbox.Manager) flow.Sandboxes { return manager{m} }

type manager struct{ *sandbox.Manager }

func (m manager) Rouse(ctx context.Context, id sandbox.ID) error {
	lease, err := m.Manager.Rouse(ctx, id, sandbox.CauseEgress)
	if err != nil {
		return err
	}
	lease.Release()
	return nil
}

// Config of an Egress. All but Operator and Log are required.
type Config struct {
	// Folder is where modules and their compiled forms are kept.
	Folder    string
	Documents document.Store
	Device    DeviceFunc
	// Sandboxes are asked about what is attached, and woken; see Of. The Manager need
	// not have started.
	Sandboxes flow.Sandboxes
	// Operator is the owner whose secrets and modules the node's rules use.
	Operator string
	// Settings to begin with.
	Settings Settings
	Log      *slog.Logger
	// PolicyCompiler is policy.Config.Compiler.
	PolicyCompiler string
	// Flows and PolicyLogs get what is sent and what policies write, and are closed with
	// the Egress; nil makes new ones.
	Flows      *audit.Log
	PolicyLogs *policylog.Log
}

// Egress is the way out of all sandboxes of a node. It implements
// sandbox.Uplink.
type Egress struct {
	cfg            Config
	log            *slog.Logger
	vault          *vault.Vault
	sets           *ruleset.Sets
	modules        *catalog.Modules
	pool           *pool
	ca             *ca.Authority
	audit          *audit.Log
	carrier        *flow.Carrier
	key            *seal.Key
	names          *nameBook
	placeholderKey []byte

	settings atomic.Pointer[Settings]

	ctx context.Context // ends with Close
	end context.CancelFunc

	// changes locks an owner's changes, one at a time. It is locked before changeMu, under
	// which no change waits for the compiler.
	changes ownerLocks
	// changeMu is held while rules, modules or settings are replaced.
	changeMu contextMutex
	node     *layer                // guarded by changeMu
	owners   map[string]*layer     // guarded by changeMu
	own      map[sandbox.ID]*layer // of sandboxes, guarded by changeMu

	mu           sync.RWMutex
	attachments  map[sandbox.ID]*flow.Attachment
	proxyClients map[string]*flow.ProxyClient // by owner
	closed       bool
}

// Open reads what is kept, and makes what is missing: the key that seals
// secrets, and the certificate authority.
func Open(ctx context.Context, cfg Config) (_ *Egress, err error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := os.MkdirAll(cfg.Folder, 0o700); err != nil {
		return nil, fmt.Errorf("making the folder of egress: %w", err)
	}
	e := &Egress{
		cfg: cfg, log: cfg.Log,
		owners: map[string]*layer{},
		own:    map[sandbox.ID]*layer{},

		attachments:  map[sandbox.ID]*flow.Attachment{},
		proxyClients: map[string]*flow.ProxyClient{},

		changeMu: newContextMutex(),
	}
	if e.audit = cfg.Flows; e.audit == nil {
		e.audit = audit.New(audit.Config{Log: cfg.Log, Name: e.nameOf})
	}
	e.ctx, e.end = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close())
		}
	}()
	if err := e.openKept(ctx); err != nil {
		return nil, err
	}
	if err := e.openModules(ctx); err != nil {
		return nil, err
	}
	change, err := e.Prepare(ctx, cfg.Settings)
	if err != nil {
		return nil, err
	}
	change.Apply()
	return e, e.armOwners(ctx)
}

// openKept opens what is in the store.
func (e *Egress) openKept(ctx context.Context) (err error) {
	documents := e.cfg.Documents
	if e.key, err = seal.Open(filepath.Join(e.cfg.Folder, "seal.key")); err != nil {
		return err
	}
	if err := e.openPlaceholderKey(ctx); err != nil {
		return err
	}
	if e.vault, err = vault.Open(ctx, documents, e.key); err != nil {
		return err
	}
	if e.sets, err = ruleset.Open(ctx, documents); err != nil {
		return err
	}
	for _, fault := range slices.Concat(e.vault.Faults(), e.sets.Faults()) {
		e.log.Error("something that is stored cannot be used", "error", fault)
	}
	if e.names, err = openNameBook(ctx, documents, e.log); err != nil {
		return err
	}
	if e.ca, err = ca.Open(ctx, ca.Config{Documents: documents, Key: e.key, Log: e.log}); err != nil {
		return err
	}
	e.carrier = flow.NewCarrier(flow.Config{
		Sandboxes: e.cfg.Sandboxes, Operator: e.cfg.Operator, Vault: e.vault, Certificate: e.ca.Certificate, Audit: e.audit, Log: e.log,
	})
	return nil
}

func (e *Egress) openModules(ctx context.Context) error {
	s := e.cfg.Settings
	host, err := policy.NewHost(policy.Config{
		CacheDir:    filepath.Join(e.cfg.Folder, "compiled"),
		Compiler:    e.cfg.PolicyCompiler,
		Documents:   e.cfg.Documents,
		MemoryLimit: int(s.PolicyMemory),
		TimeLimit:   s.PolicyTime,
		Log:         e.log,
	})
	if err != nil {
		return err
	}
	e.pool = newPool(host, e.cfg.PolicyLogs)
	if e.modules, err = catalog.Open(ctx, e.cfg.Documents, filepath.Join(e.cfg.Folder, "policies")); err != nil {
		return err
	}
	for _, fault := range e.modules.Faults() {
		e.log.Error("a policy that is stored cannot be used", "error", fault)
	}
	return nil
}

// armOwners makes the rules of owners ready that were given before; those of
// sandboxes follow when they are attached.
func (e *Egress) armOwners(ctx context.Context) (err error) {
	e.changeMu.Lock()
	defer e.changeMu.Unlock()
	for scope := range e.sets.All() {
		if owner := scope.Owner(); owner != "" {
			if e.owners[owner], err = e.armKept(ctx, scope, owner); err != nil {
				return err
			}
		}
	}
	return nil
}

// nameOf returns the name of a sandbox, for the log. What is not a sandbox, such as a
// client of the proxy, has none.
func (e *Egress) nameOf(id string) string {
	sb, _ := e.cfg.Sandboxes.ByID(sandbox.ID(id))
	return sb.Name
}

// Close detaches every sandbox and ends all flows.
func (e *Egress) Close() error {
	e.mu.Lock()
	e.closed = true
	attachments := slices.Collect(maps.Values(e.attachments))
	e.mu.Unlock()
	e.end()
	endAll(attachments)
	var errs []error
	if e.carrier != nil {
		errs = append(errs, e.carrier.Close())
	}
	if e.names != nil {
		e.names.close()
	}
	if e.pool != nil {
		errs = append(errs, e.pool.host.Close())
		e.pool.lines.Close()
	}
	e.audit.Close()
	return errors.Join(errs...)
}

// maxEnding bounds the attachments that end at a time. The kernel removes a network
// device after RCU grace periods, 17 ms, which concurrent removals share: 64 in 50 ms.
// Each takes a thread.
const maxEnding = 128

// endAll ends attachments, each of which waits for the kernel.
func endAll(attachments []*flow.Attachment) {
	var ends errgroup.Group
	ends.SetLimit(maxEnding)
	for _, a := range attachments {
		ends.Go(func() error {
			a.End()
			return nil
		})
	}
	_ = ends.Wait()
}

// Trust implements sandbox.Uplink.
func (e *Egress) Trust() []byte { return e.ca.Bundle() }

// Bundle is the certificates (PEM) that sandboxes trust besides public ones.
func (e *Egress) Bundle() []byte { return e.ca.Bundle() }
