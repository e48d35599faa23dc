package policy

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/egress/secret"
)

func TestStoredValuesExpire(t *testing.T) {
	now := time.Now()
	s := &space{entries: map[string]entry{}}
	if err := s.set("a", []byte("1"), time.Second, now); err != nil {
		t.Fatal(err)
	}
	if _, ok := s.get("a", now.Add(999*time.Millisecond)); !ok {
		t.Error("it ended early")
	}
	if _, ok := s.get("a", now.Add(time.Second)); ok {
		t.Error("it did not end")
	}
	// A counter's ttl starts when the counter is created. An expired counter starts again.
	for i, want := range []int64{1, 2, 1} {
		if n, err := s.add("n", 1, 2*time.Second, now.Add(time.Duration(i)*time.Second)); n != want || err != nil {
			t.Errorf("add %d: %d, %v", i, n, err)
		}
	}
}

func TestCountersDoNotOverflow(t *testing.T) {
	now := time.Now()
	for _, most := range []int64{math.MaxInt64, math.MinInt64} {
		s := &space{entries: map[string]entry{}}
		step := most>>62 | 1 // 1 or -1
		for i, delta := range []int64{most - step, step, step, most} {
			n, err := s.add("n", delta, 0, now)
			if (err == nil) != (i < 2) || err != nil && !errors.Is(err, secret.ErrLimit) {
				t.Errorf("%d: %d, %v", delta, n, err)
			}
		}
		if n, err := s.add("n", 0, 0, now); n != most || err != nil {
			t.Errorf("it is %d, %v", n, err)
		}
	}
}

func TestForgetRemovesASpace(t *testing.T) {
	var k kv
	now := time.Now()
	set := func(s *space) { _ = s.set("key", []byte("value"), 0, now) }
	var held *space
	for _, name := range []string{"a", "b"} {
		if !k.use(name, now, func(s *space) { set(s); held = s }) {
			t.Fatal("no room")
		}
	}
	k.forget("b")
	k.forget("c")
	if held.use(set) {
		t.Error("an exchange under way still stores there")
	}
	for name, want := range map[string]bool{"a": true, "b": false} {
		k.use(name, now, func(s *space) {
			if _, ok := s.get("key", now); ok != want {
				t.Errorf("%s has it: %v", name, ok)
			}
		})
	}
}

func TestANamespaceIsBounded(t *testing.T) {
	now := time.Now()
	fill := func(keys int, value string, ttl time.Duration) (*space, error) {
		s := &space{entries: map[string]entry{}}
		for i := range keys {
			if err := s.set(fmt.Sprint("key-", i), []byte(value), ttl, now); err != nil {
				return s, err
			}
		}
		return s, nil
	}
	if _, err := fill(maxKeys, "", 0); err != nil {
		t.Error(err)
	}
	if _, err := fill(maxKeys+1, "", 0); !errors.Is(err, secret.ErrLimit) {
		t.Errorf("one key too many: %v", err)
	}
	if _, err := fill(260, strings.Repeat("x", maxValue), 0); !errors.Is(err, secret.ErrLimit) {
		t.Errorf("more than 1 MiB: %v", err)
	}
	s, _ := fill(maxKeys, "", time.Second)
	if err := s.set("new", nil, 0, now.Add(time.Minute)); err != nil {
		t.Errorf("expired values count: %v", err)
	}
	for name, err := range map[string]error{
		"no key":       s.set("", nil, 0, now),
		"long key":     s.set(strings.Repeat("k", maxKey+1), nil, 0, now),
		"long value":   s.set("k", make([]byte, maxValue+1), 0, now),
		"negative ttl": s.set("k", nil, -1, now),
	} {
		if !errors.Is(err, secret.ErrBadArgument) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for range 10 { // replacing a value takes no additional space
		if err := s.set("same", make([]byte, maxValue), 0, now.Add(time.Minute)); err != nil {
			t.Error(err)
		}
	}
	if s.expire(now.Add(time.Hour)); s.size != len("new")+len("same")+maxValue {
		t.Errorf("%d bytes", s.size)
	}
}

// Otherwise an owner could fill the node's memory with many policies.
func TestPoliciesOfANamespaceAreBoundedTogether(t *testing.T) {
	var k kv
	now := time.Now()
	fill := func(policy, namespace string) (err error) {
		k.use(spaceName(policy, namespace), now, func(s *space) {
			for i := range 250 {
				if err = s.set(fmt.Sprintf("key-%03d", i), make([]byte, maxValue), 0, now); err != nil {
					return
				}
			}
		})
		return err
	}
	const full = maxTotal / (250 * (maxValue + len("key-000")))
	for i := range full {
		if err := fill(fmt.Sprint(i), "ann"); err != nil {
			t.Fatalf("policy %d: %v", i, err)
		}
	}
	if err := fill("more", "ann"); !errors.Is(err, secret.ErrLimit) {
		t.Errorf("one policy more: %v", err)
	}
	if err := fill("0", "ann"); err != nil {
		t.Errorf("replaced values: %v", err)
	}
	if err := fill("0", "bob"); err != nil {
		t.Errorf("another namespace: %v", err)
	}
	k.forget(spaceName("0", "ann"))
	if err := fill("more", "ann"); err != nil {
		t.Errorf("after a policy was deleted: %v", err)
	}
	for i := range full {
		k.forget(spaceName(fmt.Sprint(i), "ann"))
	}
	k.forget(spaceName("more", "ann"))
	if n := k.totals["ann"].Load(); n != 0 {
		t.Errorf("%d bytes are counted without values", n)
	}
}

func TestNamespacesAreBoundedInNumber(t *testing.T) {
	var k kv
	now := time.Now()
	for i := range maxNamespaces {
		k.use(fmt.Sprint(i), now, func(s *space) { _ = s.set("a", nil, time.Second, now) })
	}
	if k.use("more", now, func(*space) {}) {
		t.Error("there is one too many")
	}
	if !k.use("more", now.Add(time.Second), func(*space) {}) {
		t.Error("those that are empty take room")
	}
}
