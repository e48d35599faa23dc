// Package egress controls the outbound network of sandboxes: it decides which rules,
// policies, secrets and settings apply to which client. Package flow carries the traffic.
//
// Egress puts the parts together:
//
//	network/stack    packets of a sandbox ↔ connections
//	network/dns      names ↔ addresses that stand for them
//	network/dial     resolves, checks and dials real addresses
//	rule             decides which traffic may leave, and through which policies
//	flow             decides on, sends and records connections and requests
//	proxy            the same for programs outside of sandboxes
//	http/intercept   requests within TLS, with leaf certificates of tls/ca
//	policy           runs WASM modules over requests
//	secret/vault     secrets; session, reference, placeholder and scrub keep them out of sandboxes
//	audit            records the decisions
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

// ManagedSandboxes returns the sandboxes of a Manager.
func ManagedSandboxes(m *sandbox.Manager) flow.Sandboxes { return manager{m} }

type manager struct{ *sandbox.Manager }

func (m manager) Rouse(ctx context.Context, id sandbox.ID) error {
	lease, err := m.Manager.Rouse(ctx, id, sandbox.CauseEgress)
	if err != nil {
		return err
	}
	lease.Release()
	return nil
}

// Config configures an Egress. All fields but Operator and Log are required.
type Config struct {
	// Folder stores modules and their compiled forms.
	Folder    string
	Documents document.Store
	Device    DeviceFunc
	// Sandboxes looks up attached sandboxes and wakes them; see ManagedSandboxes. The
	// Manager need not have started.
	Sandboxes flow.Sandboxes
	// Operator is the owner whose secrets and modules the node's rules use.
	Operator string
	// Settings are the initial settings.
	Settings Settings
	Log      *slog.Logger
	// PolicyCompiler is policy.Config.Compiler.
	PolicyCompiler string
}

// SealingKeyFile is the name of the file in Config.Folder with the key that encrypts secrets:
// see seal.Open.
const SealingKeyFile = "seal.key"

// Egress carries the outbound traffic of all sandboxes of a node. It implements
// sandbox.Uplink.
type Egress struct {
	// Flows has the flows of all clients, by flow.Client.Name.
	Flows *audit.Log
	// PolicyLogs has the lines that policies log.
	PolicyLogs *policylog.Log
	// Secrets has the secrets of owners. Rules use a change from their next request on.
	Secrets *vault.Vault

	cfg            Config
	log            *slog.Logger
	sets           *ruleset.Sets
	modules        *catalog.Modules
	pool           *pool
	ca             *ca.Authority
	carrier        *flow.Carrier
	key            *seal.Key
	names          *nameBook
	placeholderKey []byte

	settings atomic.Pointer[Settings]

	ctx context.Context // ends with Close
	end context.CancelFunc

	// changes serializes the changes of each owner. It is locked before changeMu; no
	// change waits for the compiler while it holds changeMu.
	changes ownerLocks
	// changeMu is held while rules, modules or settings are replaced.
	changeMu contextMutex
	layers   map[ruleset.Scope]*flow.Layer // guarded by changeMu

	mu           sync.RWMutex
	attachments  map[sandbox.ID]*flow.Attachment
	proxyClients map[string]*flow.ProxyClient // by owner
	closed       bool
}

// Open reads the stored state and creates missing parts: the key that seals
// secrets, and the certificate authority.
func Open(ctx context.Context, cfg Config) (_ *Egress, err error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := os.MkdirAll(cfg.Folder, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of egress: %w", err)
	}
	e := &Egress{
		cfg: cfg, log: cfg.Log,
		layers:       map[ruleset.Scope]*flow.Layer{},
		attachments:  map[sandbox.ID]*flow.Attachment{},
		proxyClients: map[string]*flow.ProxyClient{},
		changeMu:     newContextMutex(),
		PolicyLogs:   policylog.New(),
	}
	e.Flows = audit.New(cfg.Log, e.nameOf)
	e.ctx, e.end = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close())
		}
	}()
	if err := e.openDocuments(ctx); err != nil {
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
	return e, e.loadOwnerLayers(ctx)
}

// openDocuments opens the stored state.
func (e *Egress) openDocuments(ctx context.Context) (err error) {
	documents := e.cfg.Documents
	if e.key, err = seal.Open(filepath.Join(e.cfg.Folder, SealingKeyFile)); err != nil {
		return err
	}
	if e.placeholderKey, err = e.NodeKey(ctx, placeholderKey); err != nil {
		return err
	}
	if e.Secrets, err = vault.Open(ctx, documents, e.key); err != nil {
		return err
	}
	if e.sets, err = ruleset.Open(ctx, documents); err != nil {
		return err
	}
	for _, fault := range slices.Concat(e.Secrets.Faults(), e.sets.Faults()) {
		e.log.Error("ignoring unreadable record", "error", fault)
	}
	if e.names, err = openNameBook(ctx, documents, e.log); err != nil {
		return err
	}
	if e.ca, err = ca.Open(ctx, ca.Config{Documents: documents, Key: e.key, Log: e.log}); err != nil {
		return err
	}
	e.carrier = flow.NewCarrier(flow.Config{
		Sandboxes: e.cfg.Sandboxes, Operator: e.cfg.Operator, Vault: e.Secrets, Certificate: e.ca.Certificate, Audit: e.Flows, Log: e.log,
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
	e.pool = newPool(host, e.PolicyLogs)
	if e.modules, err = catalog.Open(ctx, e.cfg.Documents, filepath.Join(e.cfg.Folder, "policies")); err != nil {
		return err
	}
	for _, fault := range e.modules.Faults() {
		e.log.Error("ignoring unreadable policy", "error", fault)
	}
	return nil
}

// loadOwnerLayers makes the layers of the stored rules of owners. A sandbox's layer is
// made when it is attached.
func (e *Egress) loadOwnerLayers(ctx context.Context) error {
	e.changeMu.Lock()
	defer e.changeMu.Unlock()
	for scope := range e.sets.All() {
		if owner := scope.Owner; owner != "" {
			if err := e.loadLayer(ctx, scope, owner); err != nil {
				return err
			}
		}
	}
	return nil
}

// nameOf returns the name of a sandbox, for the log. It returns "" for other ids, such
// as a proxy client's.
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
	var ends errgroup.Group
	ends.SetLimit(maxEnding)
	for _, a := range attachments {
		ends.Go(func() error {
			a.End()
			return nil
		})
	}
	_ = ends.Wait()
	if e.carrier != nil {
		e.carrier.Close()
	}
	if e.names != nil {
		e.names.close()
	}
	var err error
	if e.pool != nil {
		err = e.pool.host.Close()
	}
	e.PolicyLogs.Close()
	e.Flows.Close()
	return err
}

// maxEnding bounds the attachments that end concurrently, because each waits for the kernel.
// It removes a network device after RCU grace periods, 17 ms, which concurrent removals
// share: 64 in 50 ms. Each removal occupies a thread.
const maxEnding = 128

// Trust implements sandbox.Uplink. It returns the certificates (PEM) that sandboxes trust
// in addition to public ones.
func (e *Egress) Trust() []byte { return e.ca.Bundle() }
