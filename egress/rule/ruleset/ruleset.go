// Package ruleset stores the rules of owners and sandboxes: checked before they are
// accepted, durable when they are acknowledged, and with revisions, so that
// concurrent changes do not undo each other.
package ruleset

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"strings"
	"sync"
	"time"

	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store/document"
)

// ErrRevision is returned (wrapped) when the rules have changed since the caller
// read them.
var ErrRevision = errors.New("the rules were changed meanwhile")

// Scope is the scope of rules: all sandboxes of an owner, or one sandbox. The zero Scope
// has all sandboxes of the node, whose rules are not stored here.
type Scope struct {
	Owner   string     // empty for the scope of a sandbox
	Sandbox sandbox.ID // empty for the scope of an owner
}

// Source returns the source of rules of this scope.
func (s Scope) Source() rule.Source {
	switch s {
	case Scope{}:
		return rule.Node
	case Scope{Owner: s.Owner}:
		return rule.Owner
	}
	return rule.Sandbox
}

// String returns "node", "owner NAME" or "sandbox ID".
func (s Scope) String() string {
	return strings.TrimSpace(string(s.Source()) + " " + s.Owner + string(s.Sandbox))
}

// Set is the rules of a scope.
type Set struct {
	// Revision is 0 for rules that were never set, and one more after each change.
	Revision  int64     `json:"revision"`
	UpdatedAt time.Time `json:"updated_at,omitzero"`
	// Default applies to requests that match no rule: inherit leaves them to the
	// rules before, deny refuses those that match neither these rules nor later ones.
	Default rule.Default `json:"default"`
	Rules   []rule.Rule  `json:"rules"` // not nil; readers do not change them

	layer *rule.Layer // nil for rules that were never set
}

// Update is a change of a scope's rules.
type Update struct {
	// Default is the new one; empty leaves it unchanged.
	Default rule.Default
	// Rules replace all rules.
	Rules []rule.Rule
	// IfRevision, unless nil, is the only revision that is replaced.
	IfRevision *int64
}

// Layer returns the compiled rules with the presets that are defined now; nil for rules
// that were never set. See rule.Layer.WithPresets for presets that are not defined.
func (s Set) Layer(presets *rule.Presets) *rule.Layer { return s.layer.WithPresets(presets) }

// compile sets the layer.
func (s *Set) compile(scope Scope, presets *rule.Presets, compile func(rule.Source, []rule.Rule, *rule.Presets) (*rule.Layer, error)) error {
	def, err := rule.ParseDefault(string(s.Default))
	if err != nil {
		return err
	}
	l, err := compile(scope.Source(), s.Rules, presets)
	if err != nil {
		return err
	}
	s.layer = l.WithDefault(def)
	return nil
}

// Sets are the rules of all scopes. All methods are safe for concurrent use; the ones that
// read take no lock. Make one with Open.
type Sets struct {
	docs   document.Store
	faults []error

	scopes sync.Map   // of Scope to Set
	change sync.Mutex // held while a change is written, so that they stay in order
}

// documentKind is the kind of the store's documents that hold rules.
const documentKind = "rules"

// unreadable is the rule of a scope whose stored rules cannot be read.
var unreadable = rule.Rule{Name: "unreadable", Action: rule.Deny, Reason: "the stored rules cannot be read: set them again"}

// Open reads all rules. A scope whose rules cannot be read is denied everything until
// they are set again, and Faults has the reason.
func Open(ctx context.Context, docs document.Store) (*Sets, error) {
	s := &Sets{docs: docs}
	err := docs.Documents(ctx, documentKind, func(name string, value []byte) error {
		scope, ok := parseDocumentName(name)
		if !ok {
			s.faults = append(s.faults, fmt.Errorf("the stored rules %q belong to neither an owner nor a sandbox", name))
			return nil
		}
		set, err := decode(scope, value)
		if err != nil {
			s.faults = append(s.faults, fmt.Errorf("cannot read the stored rules of %s; all its traffic is denied: %w", scope, err))
		}
		s.scopes.Store(scope, set)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the rules: %w", err)
	}
	return s, nil
}

// Faults returns the errors in stored rules that Open found, for the log.
func (s *Sets) Faults() []error { return s.faults }

// Get returns the rules of a scope.
func (s *Sets) Get(scope Scope) Set {
	if set, ok := s.scopes.Load(scope); ok {
		return set.(Set)
	}
	return Set{Default: rule.Inherit, Rules: []rule.Rule{}}
}

// All yields each scope that has rules, in no order.
func (s *Sets) All() iter.Seq2[Scope, Set] {
	return func(yield func(Scope, Set) bool) {
		s.scopes.Range(func(scope, set any) bool { return yield(scope.(Scope), set.(Set)) })
	}
}

// Compile checks an update and returns the rules as Replace would store them. They
// share no memory with the update.
func (s *Sets) Compile(scope Scope, u Update, presets *rule.Presets) (Set, error) {
	next := s.Get(scope)
	next.Rules = append([]rule.Rule{}, u.Rules...)
	if u.Default != "" {
		next.Default = u.Default
	}
	value, err := json.Marshal(next)
	if err != nil { // because of a rule, whose problem Compile names
		return Set{}, errors.Join(next.compile(scope, presets, rule.Compile), err)
	}
	var set Set
	if err := json.Unmarshal(value, &set); err != nil {
		return Set{}, fmt.Errorf("decode the rules of %s: %w", scope, err)
	}
	return set, set.compile(scope, presets, rule.Compile)
}

// Replace stores rules that Compile has returned, and returns them with their revision.
// ifRevision, unless nil, is the only revision that is replaced; otherwise the error is
// ErrRevision (wrapped).
func (s *Sets) Replace(ctx context.Context, scope Scope, set Set, ifRevision *int64) (Set, error) {
	s.change.Lock()
	defer s.change.Unlock()
	have := s.Get(scope).Revision
	if ifRevision != nil && *ifRevision != have {
		return Set{}, fmt.Errorf("%w: they are at revision %d, not %d", ErrRevision, have, *ifRevision)
	}
	set.Revision = have + 1
	set.UpdatedAt = time.Now().UTC().Round(0)
	value, err := json.Marshal(set)
	if err != nil {
		return Set{}, fmt.Errorf("encode the rules of %s: %w", scope, err)
	}
	if err := s.docs.PutDocument(ctx, documentKind, documentName(scope), value); err != nil {
		return Set{}, fmt.Errorf("store the rules of %s: %w", scope, err)
	}
	s.scopes.Store(scope, set)
	return set, nil
}

// Delete deletes the rules of a scope that no longer exists. Its revisions would begin
// again: to remove the rules of an existing scope, replace them with an empty set. Delete is
// idempotent.
func (s *Sets) Delete(ctx context.Context, scope Scope) error {
	s.change.Lock()
	defer s.change.Unlock()
	if _, ok := s.scopes.Load(scope); !ok {
		return nil
	}
	if err := s.docs.DeleteDocument(ctx, documentKind, documentName(scope)); err != nil {
		return fmt.Errorf("delete the rules of %s: %w", scope, err)
	}
	s.scopes.Delete(scope)
	return nil
}

func documentName(scope Scope) string {
	if scope.Sandbox != "" {
		return "sandbox/" + string(scope.Sandbox)
	}
	return "owner/" + scope.Owner
}

func parseDocumentName(name string) (Scope, bool) {
	kind, of, _ := strings.Cut(name, "/")
	switch kind {
	case "sandbox":
		return Scope{Sandbox: sandbox.ID(of)}, of != ""
	case "owner":
		return Scope{Owner: of}, of != ""
	}
	return Scope{}, false
}

// decode decodes the stored rules of a scope. With an error it returns rules that deny
// everything.
func decode(scope Scope, value []byte) (Set, error) {
	set := Set{Default: rule.Inherit}
	dec := json.NewDecoder(bytes.NewReader(value))
	dec.DisallowUnknownFields() // a newer doze may have written rules that match less
	err := dec.Decode(&set)
	if err == nil {
		err = set.compile(scope, nil, rule.CompileStored) // presets come and go
	}
	if err != nil {
		set.Rules = []rule.Rule{unreadable}
		if _, err := rule.ParseDefault(string(set.Default)); err != nil {
			set.Default = rule.Inherit
		}
		if invalid := set.compile(scope, nil, rule.CompileStored); invalid != nil {
			return set, errors.Join(err, invalid)
		}
	}
	return set, err
}
