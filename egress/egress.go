// Package egress is the outbound network of sandboxes: it identifies the sandbox and
// the host name of every connection, permits traffic by rules, and adds credentials
// that the sandbox never sees.
//
// Egress puts the parts together:
//
//	network/stack    packets of a sandbox ↔ connections
//	network/dns      names ↔ addresses that stand for them
//	network/dial     resolves, checks and dials real addresses
//	rule             what may leave, and through which policies
//	proxy            the same for programs outside of sandboxes
//	http/intercept   requests within TLS, with leaf certificates of tls/ca
//	policy           runs WASM modules over requests
//	secret/vault     secrets; reference, placeholder and scrub keep them out of sandboxes
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
	"time"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/egress/secret/vault"
	"github.com/doze-run/doze/egress/tls/ca"
	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store/document"
)

// DeviceFunc makes a network device in a sandbox; the comments of netns.Client.TUN are
// the contract.
type DeviceFunc func(ctx context.Context, id sandbox.ID, pid int) (device *os.File, listener *net.TCPListener, err error)

// Sandboxes is what egress needs of *sandbox.Manager, whose comments are the
// contract.
type Sandboxes interface {
	ByID(id sandbox.ID) (sandbox.Sandbox, bool)
	Touch(id sandbox.ID)
	// Rouse is the Manager's, without the lease: a program that does not read must
	// not keep its sandbox awake.
	Rouse(ctx context.Context, id sandbox.ID) error
}

// Of adapts a Manager.
func Of(m *sandbox.Manager) Sandboxes { return manager{m} }

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
	Sandboxes Sandboxes
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
	server         *intercept.Server
	audit          *audit.Log
	connections    *quota.Pool // of all clients
	wide           *quota.Pool
	load           load
	key            *seal.Key
	names          *nameBook
	filters        *filters
	placeholderKey []byte

	upstream atomic.Pointer[upstreams]
	settings atomic.Pointer[Settings]
	requests atomic.Int64  // under way
	flows    atomic.Uint64 // the number of the latest connection; they begin at the time in microseconds

	ctx context.Context // ends with Close
	end context.CancelFunc

	// changes are those of owners, of which each makes one at a time. An owner's turn
	// is taken before changing, with which nobody waits for the compiler.
	changes ownerTurns
	// changing is held while rules, modules or settings are replaced.
	changing turn
	node     *layer                // guarded by changing
	owners   map[string]*layer     // guarded by changing
	own      map[sandbox.ID]*layer // of sandboxes, guarded by changing

	mu      sync.RWMutex
	members map[sandbox.ID]*member
	outside map[string]*outside // by owner
	closed  bool
	// served are the connections and requests from outside of sandboxes.
	served sync.WaitGroup
}

// maxWide bounds the connections of all sandboxes whose buffers may grow: to some
// 3.5 MiB each, so that all of them take 1.8 GiB at most. It bounds the requests of
// all, too, see maxWideRequests.
const maxWide = 512

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
		connections: quota.New(int64(cfg.Settings.MaxConnections)), wide: quota.New(maxWide),
		load:    newLoad(),
		owners:  map[string]*layer{},
		own:     map[sandbox.ID]*layer{},
		members: map[sandbox.ID]*member{},
		outside: map[string]*outside{},
		filters: newFilters(),

		changes:  ownerTurns{of: map[string]*ownerTurn{}},
		changing: newTurn(),
	}
	if e.audit = cfg.Flows; e.audit == nil {
		e.audit = audit.New(audit.Config{Log: cfg.Log, Name: e.nameOf})
	}
	e.flows.Store(uint64(time.Now().UnixMicro()))
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
	e.server = intercept.New(intercept.Config{Certificate: e.ca.Certificate, Log: e.log})
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
	e.changing.Lock()
	defer e.changing.Unlock()
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

// Close detaches every sandbox and ends what runs.
func (e *Egress) Close() error {
	e.mu.Lock()
	e.closed = true
	members := slices.Collect(maps.Values(e.members))
	e.mu.Unlock()
	e.end()
	endAll(members)
	e.served.Wait()
	var errs []error
	if e.server != nil {
		errs = append(errs, e.server.Close())
	}
	if e.names != nil {
		e.names.close()
	}
	if u := e.upstream.Swap(nil); u != nil {
		u.retire()
	}
	if e.pool != nil {
		errs = append(errs, e.pool.host.Close())
		e.pool.lines.Close()
	}
	e.audit.Close()
	return errors.Join(errs...)
}

// endsAtOnce bounds the members that end at once. The kernel removes a network device
// after RCU grace periods, 17 ms, which those that are removed at once share: 64 in
// 50 ms. Each takes a thread.
const endsAtOnce = 128

// endAll ends members, each of which waits for the kernel.
func endAll(members []*member) {
	var ends sync.WaitGroup
	slots := make(chan struct{}, endsAtOnce)
	for _, m := range members {
		slots <- struct{}{}
		ends.Go(func() {
			defer func() { <-slots }()
			m.end()
		})
	}
	ends.Wait()
}

// Trust implements sandbox.Uplink.
func (e *Egress) Trust() []byte { return e.ca.Bundle() }

// Bundle is the certificates (PEM) that sandboxes trust besides public ones.
func (e *Egress) Bundle() []byte { return e.ca.Bundle() }
