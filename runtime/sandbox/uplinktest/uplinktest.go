// Package uplinktest is the conformance suite of sandbox.Uplink.
package uplinktest

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/networktest"
	"github.com/doze-run/doze/testkit"
)

// System is an Uplink with sandboxes to attach.
type System struct {
	Uplink sandbox.Uplink
	// Start starts a container without a network. The suite calls its Stop.
	Start func(t testing.TB, id sandbox.ID) Box
	// Attached reports whether the programs of that container can send.
	Attached func(id sandbox.ID, pid int) bool
}

// Box is a container.
type Box interface {
	// PID is its first process.
	PID() int
	// Stop ends all its processes and waits for their end. Idempotent.
	Stop()
}

// Run runs the suite. Each test opens a System of its own, which ends by t.Cleanup.
func Run(t *testing.T, open func(t *testing.T) System) {
	for _, c := range []struct {
		name string
		test func(*suite)
	}{
		{"AttachGivesANetworkUntilDetach", lifecycle},
		{"AttachReplacesTheAttachment", replaces},
		{"AttachReplacesTheAttachmentOfAnEarlierContainer", laterContainer},
		{"DetachLeavesOthersAttached", others},
		{"AnEndedContextAttachesNothing", endedContext},
		{"AttachToAnEndedProcessIsAnError", gone},
		{"UnknownSandboxesAreDetachedAndForgotten", unknown},
		{"ForgottenSandboxesAreAttachedAgain", forget},
		{"KnownListsSandboxesUntilTheyAreForgotten", known},
		{"AttachIsSafeForConcurrentUse", many},
		{"TrustIsPEMOfCAs", trust},
		{"EnvironmentIsValid", environment},
		{"DescriptorsAreClosed", descriptors},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.test(&suite{T: t, ctx: testkit.Context(t), System: open(t)})
		})
	}
}

type suite struct {
	*testing.T
	System
	ctx context.Context
}

type box struct {
	Box
	sb sandbox.Sandbox
}

// box starts a sandbox.
func (s *suite) box() *box {
	s.Helper()
	id := sandbox.NewID()
	b := &box{s.Start(s, id), sandbox.Sandbox{ID: id, Name: string(id), Owner: "operator"}}
	s.Cleanup(func() {
		s.Uplink.Detach(id)
		s.Uplink.Forget(id)
		b.Stop()
	})
	return b
}

func (s *suite) attach(b *box) {
	s.Helper()
	testkit.NoError(s, "attach", s.Uplink.Attach(s.ctx, b.sb, b.PID()))
}

// want fails the test unless the sandbox can, or cannot, send.
func (s *suite) want(b *box, attached bool) {
	s.Helper()
	if got := s.Attached(b.sb.ID, b.PID()); got != attached {
		s.Errorf("%s is attached: %v, want %v", b.sb.ID, got, attached)
	}
}

func lifecycle(s *suite) {
	b := s.box()
	s.want(b, false)
	for range 3 {
		s.attach(b)
		s.want(b, true)
		for range 2 {
			s.Uplink.Detach(b.sb.ID)
			s.want(b, false)
		}
	}
}

func replaces(s *suite) {
	b := s.box()
	for range 5 {
		s.attach(b)
		s.want(b, true)
	}
	s.Uplink.Detach(b.sb.ID)
	s.want(b, false)
}

func laterContainer(s *suite) {
	b := s.box()
	s.attach(b)
	b.Stop()
	b.Box = s.Start(s, b.sb.ID)
	s.attach(b)
	s.want(b, true)
}

func others(s *suite) {
	a, b := s.box(), s.box()
	s.attach(a)
	s.attach(b)
	s.Uplink.Detach(a.sb.ID)
	s.want(a, false)
	s.want(b, true)
}

func endedContext(s *suite) {
	b := s.box()
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	if err := s.Uplink.Attach(ctx, b.sb, b.PID()); err == nil {
		s.Error("Attach with an ended context succeeded")
	}
	s.want(b, false)
	s.attach(b)
}

func gone(s *suite) {
	b := s.box()
	b.Stop()
	if err := s.Uplink.Attach(s.ctx, b.sb, b.PID()); err == nil {
		s.Error("a container that has ended was attached")
	}
	b.Box = s.Start(s, b.sb.ID)
	s.attach(b)
	s.want(b, true)
}

func unknown(s *suite) {
	for range 2 {
		s.Uplink.Detach("unknown00000")
		s.Uplink.Forget("unknown00000")
	}
}

func forget(s *suite) {
	b := s.box()
	for range 3 {
		s.attach(b)
		s.want(b, true)
		s.Uplink.Detach(b.sb.ID)
		s.Uplink.Forget(b.sb.ID)
		s.Uplink.Forget(b.sb.ID)
	}
}

func known(s *suite) {
	a, b := s.box(), s.box()
	s.attach(a)
	s.attach(b)
	seen := map[sandbox.ID]bool{}
	for _, id := range s.Uplink.Known() {
		if seen[id] {
			s.Errorf("%s is listed twice", id)
		}
		seen[id] = true
	}
	s.Uplink.Detach(a.sb.ID)
	s.Uplink.Forget(a.sb.ID)
	if list := s.Uplink.Known(); slices.Contains(list, a.sb.ID) {
		s.Errorf("a forgotten sandbox is in %v", list)
	}
}

func many(s *suite) {
	const boxes = 8
	var all []*box
	for range boxes {
		all = append(all, s.box())
	}
	var wg sync.WaitGroup
	for _, b := range all {
		wg.Go(func() {
			for range 5 {
				if err := s.Uplink.Attach(s.ctx, b.sb, b.PID()); err != nil {
					s.Errorf("attach: %v", err)
				}
				s.Uplink.Environment(b.sb.ID)
				s.Uplink.Detach(b.sb.ID)
			}
			if err := s.Uplink.Attach(s.ctx, b.sb, b.PID()); err != nil {
				s.Errorf("attach: %v", err)
			}
		})
	}
	wg.Wait()
	for _, b := range all {
		s.want(b, true)
	}
}

func trust(s *suite) {
	rest := s.Uplink.Trust()
	if len(rest) == 0 {
		return
	}
	for len(strings.TrimSpace(string(rest))) > 0 {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil || block.Type != "CERTIFICATE" {
			s.Fatalf("not a certificate: %.100q", rest)
		}
		ca, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			s.Fatal(err)
		}
		if !ca.IsCA {
			s.Errorf("%s is not a CA", ca.Subject)
		}
	}
}

func environment(s *suite) {
	b := s.box()
	s.attach(b)
	for _, id := range []sandbox.ID{b.sb.ID, "unknown00000"} {
		for name, value := range s.Uplink.Environment(id) {
			if name == "" || strings.ContainsAny(name, "=\x00") || strings.ContainsRune(value, 0) {
				s.Errorf("%q=%q is not a valid variable", name, value)
			}
		}
	}
}

func descriptors(s *suite) {
	b := s.box()
	cycle := func() {
		s.attach(b)
		s.attach(b)
		s.Uplink.Detach(b.sb.ID)
	}
	cycle() // opens the descriptors that stay open
	before := networktest.Descriptors(s)
	for range 20 {
		cycle()
	}
	networktest.AwaitDescriptors(s, before)
}
