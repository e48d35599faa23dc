// Package catalog stores the policies that owners push. They are too large for the
// store's documents, so each is a file named after its digest, and a document has
// its names by owner.
package catalog

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/doze-run/doze/internal/durable"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/store/document"
)

// Limits. Put refuses modules beyond them.
const (
	// MaxModule bytes of one module: five times what Go makes of a small policy.
	MaxModule = 16 << 20
	// MaxOfOwner bytes of all modules of an owner.
	MaxOfOwner = 256 << 20
	// MaxModules of an owner.
	MaxModules = 100
	// maxOwner leaves space for a name in the document's name.
	maxOwner = 128
)

var (
	// ErrUnknown is returned if the owner has no policy of the name.
	ErrUnknown = errors.New("unknown policy")
	// ErrDamaged is returned for a module whose file is gone or was changed.
	ErrDamaged = errors.New("the stored module is damaged: push it again")
	// ErrInUse is for callers that know the rules: a policy in use cannot be deleted.
	ErrInUse = errors.New("rules name the policy")
	// ErrBuiltIn is returned for a policy that doze ships, which has no module of the owner's.
	ErrBuiltIn = errors.New("the policy is part of doze")
	// ErrTooMany is returned when an owner has as much as fits.
	ErrTooMany = fmt.Errorf("an owner has at most %d policies of %d MiB in all: delete one first", MaxModules, MaxOfOwner>>20)
)

// Info describes a policy.
type Info struct {
	Name   string `json:"name"`
	Digest string `json:"digest"` // sha256:<hex> of the module
	Size   int64  `json:"size"`   // bytes
	// BuiltIn policies come with doze. They are not stored here.
	BuiltIn   bool      `json:"built_in,omitempty"`
	UpdatedAt time.Time `json:"updated_at,omitzero"`
	// UsedBy lists the rules that use the policy: owner/NAME or sandbox/ID/NAME. Callers
	// that know the rules set it.
	UsedBy []string `json:"used_by,omitempty"`
	// ReplacesBuiltIn means that the policy was pushed under the name of a built-in policy,
	// which the owner's rules then do not use.
	ReplacesBuiltIn bool `json:"replaces_built_in,omitempty"`
}

// Modules holds modules on the disk. All methods are safe for concurrent use. Make one
// with Open.
type Modules struct {
	docs   document.Store
	dir    string
	now    func() time.Time
	faults []error

	change sync.Mutex // held while a change is written, so that they stay in order
	mu     sync.RWMutex
	owners map[string]map[string]Info // guarded by mu
}

const documentKind = "policies"

// Open reads the stored policies, creates dir if it is missing, and removes unreferenced
// files. No other program may use the folder.
func Open(ctx context.Context, docs document.Store, dir string) (*Modules, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create the folder of policies: %w", err)
	}
	m := &Modules{docs: docs, dir: dir, now: time.Now, owners: map[string]map[string]Info{}}
	err := docs.Documents(ctx, documentKind, func(document string, value []byte) error {
		owner, info, err := decode(document, value)
		if err != nil {
			m.faults = append(m.faults, fmt.Errorf("the stored policy %q cannot be read, push it again: %w", document, err))
			return nil
		}
		m.set(owner, info)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the policies: %w", err)
	}
	return m, m.removeUnreferenced()
}

// Faults returns the errors of stored policies at Open, for the log. Rules that use such a
// policy deny.
func (m *Modules) Faults() []error { return m.faults }

func decode(document string, value []byte) (owner string, info Info, err error) {
	cut := strings.LastIndexByte(document, '/')
	if cut < 0 {
		return "", Info{}, errors.New("the name has no owner")
	}
	if err := json.Unmarshal(value, &info); err != nil {
		return "", Info{}, err
	}
	if !digestPattern.MatchString(info.Digest) || info.Name != document[cut+1:] {
		return "", Info{}, fmt.Errorf("its record has the name %.80q and the digest %.80q", info.Name, info.Digest)
	}
	return document[:cut], info, nil
}

// removeUnreferenced removes files without a document, which a killed node can leave.
func (m *Modules) removeUnreferenced() error {
	entries, err := os.ReadDir(m.dir)
	if err != nil {
		return fmt.Errorf("clean up the folder of policies: %w", err)
	}
	for _, e := range entries {
		digest := "sha256:" + strings.TrimSuffix(e.Name(), ".wasm")
		if m.referenced(digest) {
			continue
		}
		if err := os.Remove(filepath.Join(m.dir, e.Name())); err != nil {
			return fmt.Errorf("clean up the folder of policies: %w", err)
		}
	}
	return nil
}

var namePattern = regexp.MustCompile(`\A[a-z0-9_-]{1,64}\z`)

// Put stores a module under a name, replacing an existing one. It is on the disk when Put
// returns. The caller has checked that it is a policy.
//
// Errors: *problem.InvalidError, ErrTooMany, the store's, or the disk's.
func (m *Modules) Put(ctx context.Context, owner, name string, module []byte) (Info, error) {
	switch {
	case owner == "" || len(owner) > maxOwner:
		return Info{}, fmt.Errorf("an owner has 1 to %d bytes, this one has %d", maxOwner, len(owner))
	case !namePattern.MatchString(name):
		return Info{}, &problem.InvalidError{Field: "name", Reason: fmt.Sprintf("invalid name %.80q", name), Want: "use 1 to 64 of a-z, 0-9, - and _"}
	case len(module) == 0 || len(module) > MaxModule:
		return Info{}, &problem.InvalidError{Field: "module", Reason: fmt.Sprintf("%d bytes", len(module)), Want: fmt.Sprintf("use at most %d", MaxModule)}
	}
	m.change.Lock()
	defer m.change.Unlock()
	info := Info{Name: name, Digest: Digest(module), Size: int64(len(module)), UpdatedAt: m.now().UTC().Round(0)}
	old, unknown := m.Get(owner, name)
	if !m.fits(owner, info) {
		return Info{}, ErrTooMany
	}
	if err := m.write(info.Digest, module); err != nil {
		return Info{}, fmt.Errorf("store the policy %s: %w", name, err)
	}
	value, err := json.Marshal(info)
	if err == nil {
		err = m.docs.PutDocument(ctx, documentKind, owner+"/"+name, value)
	}
	if err != nil {
		return Info{}, errors.Join(fmt.Errorf("store the policy %s: %w", name, err), m.removeFile(info.Digest))
	}
	m.set(owner, info)
	if unknown == nil {
		_ = m.removeFile(old.Digest) // one that stays is removed by the next Open
	}
	return info, nil
}

// fits reports whether a policy fits into the owner's limits.
func (m *Modules) fits(owner string, info Info) bool {
	count, size := 1, info.Size
	for _, other := range m.List(owner) {
		if other.Name != info.Name {
			count++
			size += other.Size
		}
	}
	return count <= MaxModules && size <= MaxOfOwner
}

// Delete deletes a policy. Errors: ErrUnknown, or the store's.
func (m *Modules) Delete(ctx context.Context, owner, name string) error {
	m.change.Lock()
	defer m.change.Unlock()
	old, err := m.Get(owner, name)
	if err != nil {
		return err
	}
	if err := m.docs.DeleteDocument(ctx, documentKind, owner+"/"+name); err != nil {
		return fmt.Errorf("delete the policy %s: %w", name, err)
	}
	m.mu.Lock()
	delete(m.owners[owner], name)
	m.mu.Unlock()
	_ = m.removeFile(old.Digest) // as in Put
	return nil
}

// Hold calls f. Until f returns, no policy is stored or deleted, so that each stored policy has
// its file.
func (m *Modules) Hold(f func() error) error {
	m.change.Lock()
	defer m.change.Unlock()
	return f()
}

// List returns the owner's policies by name.
func (m *Modules) List(owner string) []Info {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return slices.SortedFunc(maps.Values(m.owners[owner]), func(a, b Info) int { return strings.Compare(a.Name, b.Name) })
}

// Get returns the description of a policy, or ErrUnknown.
func (m *Modules) Get(owner, name string) (Info, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	info, ok := m.owners[owner][name]
	if !ok {
		return Info{}, ErrUnknown
	}
	return info, nil
}

// Read returns a policy with its module, whose digest it verifies. Errors: ErrUnknown,
// ErrDamaged (wrapped).
func (m *Modules) Read(owner, name string) (Info, []byte, error) {
	m.change.Lock() // a concurrent push could remove the file
	defer m.change.Unlock()
	info, err := m.Get(owner, name)
	if err != nil {
		return Info{}, nil, err
	}
	module, err := os.ReadFile(m.path(info.Digest))
	if err != nil {
		return Info{}, nil, fmt.Errorf("%q: %w: %w", name, ErrDamaged, err)
	}
	if Digest(module) != info.Digest {
		return Info{}, nil, fmt.Errorf("%q: %w", name, ErrDamaged)
	}
	return info, module, nil
}

func (m *Modules) set(owner string, info Info) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.owners[owner] == nil {
		m.owners[owner] = map[string]Info{}
	}
	m.owners[owner][info.Name] = info
}

// referenced reports whether any policy has a digest.
func (m *Modules) referenced(digest string) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for _, policies := range m.owners {
		for _, info := range policies {
			if info.Digest == digest {
				return true
			}
		}
	}
	return false
}

// Digest returns the digest of a module, in the form of Info.Digest.
func Digest(module []byte) string {
	sum := sha256.Sum256(module)
	return "sha256:" + hex.EncodeToString(sum[:])
}

var digestPattern = regexp.MustCompile(`\Asha256:[0-9a-f]{64}\z`)

// path returns the file of a valid digest.
func (m *Modules) path(digest string) string {
	return filepath.Join(m.dir, strings.TrimPrefix(digest, "sha256:")+".wasm")
}

// write stores a module. The file is complete and synced before it gets its name. An
// existing file with the same content stays unchanged.
func (m *Modules) write(digest string, module []byte) error {
	path := m.path(digest)
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, module) {
		return nil
	}
	return durable.Write(path, module, os.Rename)
}

// removeFile removes the file of a digest, unless a policy refers to it.
func (m *Modules) removeFile(digest string) error {
	if m.referenced(digest) {
		return nil
	}
	if err := os.Remove(m.path(digest)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove a module: %w", err)
	}
	return nil
}
