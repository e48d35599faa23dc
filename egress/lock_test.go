package egress

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/doze-run/doze/egress/internal/wat"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

func TestWaitingForAChangeEndsWithItsContext(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	r.changeMu.Lock() // as another change does
	why := errors.New("it took too long")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	other := sandbox.Sandbox{ID: "other0000000", Owner: owner}
	r.sandboxes.put(other)
	for name, wait := range map[string]func() error{
		"rules":         func() error { _, _, err := r.SetRules(ctx, owner, b.sb.ID, ruleset.Update{}); return err },
		"a deletion":    func() error { return r.DeletePolicy(ctx, owner, "bearer") },
		"an attachment": func() error { return r.Attach(ctx, other, 1) },
		"an explanation": func() error {
			_, err := r.Explain(ctx, other.ID, "GET", "https://a.web.test/", nil)
			return err
		},
		"the proxy": func() error { _, err := r.ExplainProxy(ctx, owner, "GET", "https://a.web.test/", nil); return err },
		"settings":  func() error { _, err := r.Prepare(ctx, *r.settings.Load()); return err },
	} {
		if err := wait(); !errors.Is(err, why) {
			t.Errorf("%s: %v", name, err)
		}
	}
	r.changeMu.Unlock()
	b.rules()
	if len(r.changes.byOwner) != 0 {
		t.Errorf("left are locks of %v", r.changes.byOwner)
	}
}

func TestOwnerLocksAreIndependent(t *testing.T) {
	var locks ownerLocks
	leave, err := locks.LockContext(testkit.Context(t), "ann")
	if err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := locks.LockContext(ended, "ann"); !errors.Is(err, context.Canceled) {
		t.Errorf("the second of ann: %v", err)
	}
	others, err := locks.LockContext(testkit.Context(t), "bob")
	if err != nil {
		t.Fatal(err)
	}
	next := make(chan func())
	go func() { // ends when it has the lock
		leave, err := locks.LockContext(testkit.Context(t), "ann")
		if err != nil {
			t.Error(err)
		}
		next <- leave
	}()
	others()
	leave()
	(<-next)()
	if len(locks.byOwner) != 0 {
		t.Errorf("left are %v", locks.byOwner)
	}
}

// The compiler may be busy for seconds. Other owners' changes must not wait for it.
func TestModulesAreCompiledBeforeAChangeBegins(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.push("bearer", bearer(1))
	cache := filepath.Join(r.config.Folder, "compiled")
	if err := os.RemoveAll(cache); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(cache, 0o700); err != nil {
		t.Fatal(err)
	}
	r.changeMu.Lock()
	set := make(chan error)
	go func() { // ends when the rules are set
		_, _, err := r.SetRules(testkit.Context(t), owner, b.sb.ID, ruleset.Update{Rules: []rule.Rule{through("a.web.test", "bearer", "")}})
		set <- err
	}()
	testkit.Eventually(t, "the module is compiled", func() bool {
		entries, err := os.ReadDir(cache)
		return err == nil && len(entries) > 0
	})
	r.changeMu.Unlock()
	if err := <-set; err != nil {
		t.Error(err)
	}
}

// Nested blocks occupy a compiler until it is killed.
func TestPushesOfOwnersAreIndependent(t *testing.T) {
	r := newRig(t)
	const depth = 100_000
	hostile := guest("", wat.Code(bytes.Repeat(wat.Block, depth), bytes.Repeat(wat.End, depth), next))
	ctx, cancel := context.WithCancel(testkit.Context(t))
	pushed := make(chan error, 3)
	for i := range cap(pushed) { // end with ctx
		go func() {
			_, err := r.PutPolicy(ctx, "mallory", fmt.Sprint("slow", i), append(bytes.Clone(hostile), 0, 2, 1, byte('a'+i)))
			pushed <- err
		}()
	}
	testkit.Eventually(t, "a compiler runs", func() bool { return r.pool.host.Compilers() > 0 })
	if _, err := r.PutPolicy(testkit.Context(t), owner, "note", noting("a note")); err != nil {
		t.Error(err)
	}
	if n := r.pool.host.Compilers(); n != 1 || len(pushed) != 0 {
		t.Errorf("of an owner's modules %d are compiled concurrently, %d were", n, len(pushed))
	}
	cancel()
	for range cap(pushed) {
		if err := <-pushed; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	}
}

func TestSlowPoliciesAreRefusedWithTheirPosition(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.push("bearer", bearer(1))
	limited, cancel := context.WithCancelCause(t.Context())
	cancel(errReadyLimit)
	rules := []rule.Rule{{Name: "first", Hosts: []string{"b.test"}, Action: rule.Allow}, through("a.web.test", "bearer", "")}
	compiled, err := rule.Compile(rule.Sandbox, rules, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.newValidLayer(limited, r.moduleOf, owner, compiled)
	var fault *rule.Error
	if !errors.As(err, &fault) || fault.Index != 1 || fault.Field != "policies[0]" || fault.Problem != `"bearer": `+errReadyLimit.Error() {
		t.Errorf("got %v", err)
	}
	r.uses(t, 0)
}
