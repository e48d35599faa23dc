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

// ErrRevision is returned (wrapped in a *RevisionError) when the rules are no longer
// those that the caller knows.
var ErrRevision = errors.New("the rules were changed meanwhile")

// RevisionError says at which revision the rules are.
type RevisionError struct{ Have, Want int64 }

func (e *RevisionError) Error() string {
	return fmt.Sprintf("%v: they are at revision %d, not %d", ErrRevision, e.Have, e.Want)
}

func (e *RevisionError) Unwrap() error { return ErrRevision }

// Scope is what a set of rules is about: all sandboxes of an owner, or one sandbox.
type Scope struct {
	owner   string
	sandbox sandbox.ID
}

// OfOwner is the scope of all that belongs to owner.
func OfOwner(owner string) Scope { return Scope{owner: owner} }

// OfSandbox is the scope of one sandbox.
func OfSandbox(id sandbox.ID) Scope { return Scope{sandbox: id} }

// Owner is empty for the scope of a sandbox.
func (s Scope) Owner() string { return s.owner }

// Sandbox is empty for the scope of an owner.
func (s Scope) Sandbox() sandbox.ID { return s.sandbox }

// Source is what rules of this scope are to package rule.
func (s Scope) Source() rule.Source {
	if s.sandbox != "" {
		return rule.Sandbox
	}
	return rule.Owner
}

func (s Scope) String() string {
	if s.sandbox != "" {
		return "sandbox " + string(s.sandbox)
	}
	return "owner " + s.owner
}

// Set is the rules of a scope.
type Set struct {
	// Revision is 0 for rules that were never set, and one more after each change.
	Revision  int64     `json:"revision"`
	UpdatedAt time.Time `json:"updated_at,omitzero"`
	// Default is what becomes of what matches no rule: inherit leaves it to the
	// rules before, deny refuses what matches neither these rules nor later ones.
	Default rule.Default `json:"default" enum:"inherit,deny"`
	Rules   []rule.Rule  `json:"rules"` // not nil; readers do not change them
}

// Update is a change of a scope's rules.
type Update struct {
	// Default is the new one; empty leaves it as it is.
	Default rule.Default
	// Rules replace all that there are.
	Rules []rule.Rule
	// IfRevision, unless nil, is the only revision that is replaced.
	IfRevision *int64
}

// Layer compiles the rules for their scope, with the presets that there are.
func (s Set) Layer(scope Scope, presets *rule.Presets) (*rule.Layer, error) {
	return s.compile(scope, presets, rule.Compile)
}

// StoredLayer is Layer for rules that were set before: see rule.CompileStored.
func (s Set) StoredLayer(scope Scope, presets *rule.Presets) (*rule.Layer, error) {
	return s.compile(scope, presets, rule.CompileStored)
}

func (s Set) compile(scope Scope, presets *rule.Presets, compile func(rule.Source, []rule.Rule, *rule.Presets) (*rule.Layer, error)) (*rule.Layer, error) {
	def, err := rule.ParseDefault(string(s.Default))
	if err != nil {
		return nil, err
	}
	l, err := compile(scope.Source(), s.Rules, presets)
	if err != nil {
		return nil, err
	}
	return l.WithDefault(def), nil
}

// Sets are the rules of all scopes. All methods may be called at once; those that
// read take no lock. Make one with Open.
type Sets struct {
	docs   document.Store
	now    func() time.Time
	faults []error

	scopes sync.Map   // of Scope to Set
	change sync.Mutex // held while a change is written, so that they stay in order
}

// documentKind is the kind of the store's documents that hold rules.
const documentKind = "rules"

// unreadable is the rule of a scope whose stored rules cannot be read.
var unreadable = rule.Rule{Name: "unreadable", Action: rule.Deny, Reason: "the stored rules cannot be read: set them again"}

// Open reads all rules. A scope whose rules cannot be read is denied everything until
// they are set again, and Faults says why.
func Open(ctx context.Context, docs document.Store) (*Sets, error) {
	s := &Sets{docs: docs, now: time.Now}
	err := docs.Documents(ctx, documentKind, func(name string, value []byte) error {
		scope, ok := parseDocumentName(name)
		if !ok {
			s.faults = append(s.faults, fmt.Errorf("the stored rules %q are nobody's", name))
			return nil
		}
		set, err := decode(scope, value)
		if err != nil {
			s.faults = append(s.faults, fmt.Errorf("the stored rules of %s cannot be read, so it is denied everything: %w", scope, err))
		}
		s.scopes.Store(scope, set)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading the rules: %w", err)
	}
	return s, nil
}

// Faults are what was wrong with stored rules at Open, for the log.
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

// Updated returns what a scope's rules become.
func (s *Sets) Updated(scope Scope, u Update) Set {
	set := s.Get(scope)
	set.Rules = append([]rule.Rule{}, u.Rules...)
	if u.Default != "" {
		set.Default = u.Default
	}
	return set
}

// Replace sets the rules of a scope, all at once: on the disk and in force when it
// returns, and not at all when it fails.
//
// Errors: ErrRevision (wrapped), those of Set.Layer, or the store's.
func (s *Sets) Replace(ctx context.Context, scope Scope, u Update, presets *rule.Presets) (Set, error) {
	s.change.Lock()
	defer s.change.Unlock()
	next := s.Updated(scope, u)
	if _, err := next.Layer(scope, presets); err != nil {
		return Set{}, err
	}
	if u.IfRevision != nil && *u.IfRevision != next.Revision {
		return Set{}, &RevisionError{Have: next.Revision, Want: *u.IfRevision}
	}
	next.Revision++
	next.UpdatedAt = s.now().UTC().Round(0)
	value, err := json.Marshal(next)
	if err != nil {
		return Set{}, fmt.Errorf("encoding the rules of %s: %w", scope, err)
	}
	// What is in force is what another Open would read: nothing of it is the caller's.
	set, err := decode(scope, value)
	if err != nil {
		return Set{}, fmt.Errorf("the rules of %s: %w", scope, err)
	}
	if err := s.docs.PutDocument(ctx, documentKind, documentName(scope), value); err != nil {
		return Set{}, fmt.Errorf("storing the rules of %s: %w", scope, err)
	}
	s.scopes.Store(scope, set)
	return set, nil
}

// Delete forgets the rules of a scope that is no more. Its revisions begin again
// after that, so it is not for scopes that live on: those get an empty set.
// Idempotent.
func (s *Sets) Delete(ctx context.Context, scope Scope) error {
	s.change.Lock()
	defer s.change.Unlock()
	if _, ok := s.scopes.Load(scope); !ok {
		return nil
	}
	if err := s.docs.DeleteDocument(ctx, documentKind, documentName(scope)); err != nil {
		return fmt.Errorf("deleting the rules of %s: %w", scope, err)
	}
	s.scopes.Delete(scope)
	return nil
}

func documentName(scope Scope) string {
	if scope.sandbox != "" {
		return "sandbox/" + string(scope.sandbox)
	}
	return "owner/" + scope.owner
}

func parseDocumentName(name string) (Scope, bool) {
	kind, of, _ := strings.Cut(name, "/")
	switch kind {
	case "sandbox":
		return OfSandbox(sandbox.ID(of)), of != ""
	case "owner":
		return OfOwner(of), of != ""
	}
	return Scope{}, false
}

// decode reads what is stored for a scope. With an error it returns what denies
// everything.
func decode(scope Scope, value []byte) (Set, error) {
	set := Set{Default: rule.Inherit}
	dec := json.NewDecoder(bytes.NewReader(value))
	dec.DisallowUnknownFields() // a newer doze may have written rules that match less
	err := dec.Decode(&set)
	if err == nil {
		_, err = set.StoredLayer(scope, nil) // presets come and go
	}
	if err != nil {
		set.Rules = []rule.Rule{unreadable}
		if _, err := rule.ParseDefault(string(set.Default)); err != nil {
			set.Default = rule.Inherit
		}
	}
	return set, err
}
