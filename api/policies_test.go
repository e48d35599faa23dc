package api

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/egresstest"
	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/policies/builtin"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

func TestPoliciesArePushedAndListed(t *testing.T) {
	s := newServer(t, Limits{})
	module := egresstest.Module(1)
	got := must[types.Policy](s, http.StatusOK, "PUT", "/policies/sign", bytes.NewReader(module), "Content-Type", "application/wasm")
	if got.Digest != catalog.Digest(module) || got.Size != int64(len(module)) || got.BuiltIn {
		t.Errorf("got %+v", got)
	}
	must[types.Policy](s, http.StatusOK, "PUT", "/policies/sign", bytes.NewReader(egresstest.Module(2)))
	list := must[types.PolicyList](s, http.StatusOK, "GET", "/policies", nil)
	var names []string
	for _, p := range list.Policies {
		names = append(names, p.Name)
		if p.BuiltIn != (p.Name != "sign") || p.Name == "sign" && p.Digest != catalog.Digest(egresstest.Module(2)) {
			t.Errorf("got %+v", p)
		}
	}
	testkit.Diff(t, "names", names, slices.Sorted(slices.Values(append(builtin.Names(), "sign"))))
	must[types.RuleSet](s, http.StatusOK, "PUT", "/egress/rules", `{"rules":[{"name":"gh","hosts":["a.example"],"policies":[{"name":"sign"}]}]}`)
	if p := must[types.Policy](s, http.StatusOK, "GET", "/policies/sign", nil); strings.Join(p.UsedBy, " ") != "owner/gh" {
		t.Errorf("got %+v", p)
	}
	if p := s.refused(problem.PolicyInUse, "DELETE", "/policies/sign", nil); !strings.Contains(p.Detail, "owner/gh") {
		t.Errorf("got %s", p.Detail)
	}
	must[types.RuleSet](s, http.StatusOK, "PUT", "/egress/rules", `{"rules":[]}`)
	must[struct{}](s, http.StatusNoContent, "DELETE", "/policies/sign", nil)
	s.refused(problem.PolicyNotFound, "GET", "/policies/sign", nil)
	s.refused(problem.PolicyNotFound, "DELETE", "/policies/sign", nil)
}

func TestInvalidPoliciesAreRefused(t *testing.T) {
	s := newServer(t, Limits{})
	p := s.refused(problem.PolicyInvalid, "PUT", "/policies/sign", strings.NewReader("#!/bin/sh"))
	if len(p.Errors) != 1 || p.Errors[0].Location != "body" || !strings.Contains(p.Detail, "not a WebAssembly module") {
		t.Errorf("got %+v", p)
	}
	s.refused(problem.PolicyInvalid, "PUT", "/policies/sign", nil)
	s.refused(problem.NameInvalid, "PUT", "/policies/Sign", bytes.NewReader(egresstest.Module(1)))
	s.refused(problem.MediaTypeUnsupported, "PUT", "/policies/sign", `{"module":"…"}`)
	large := s.refused(problem.BodyTooLarge, "PUT", "/policies/sign", bytes.NewReader(make([]byte, catalog.MaxModule+1)))
	if strings.Contains(large.Detail, "raw bytes") {
		t.Errorf("the remedy is another's: %s", large.Detail)
	}
	// Of a length that is not known beforehand, too.
	s.refused(problem.BodyTooLarge, "PUT", "/policies/sign", io.LimitReader(zeros{}, catalog.MaxModule+1))
	if list := must[types.PolicyList](s, http.StatusOK, "GET", "/policies", nil); len(list.Policies) != len(builtin.Names()) {
		t.Errorf("got %+v", list)
	}
}

func TestAPolicyNamedLikeAShippedOneGetsAWarning(t *testing.T) {
	s := newServer(t, Limits{})
	push := func(name string) types.Policy {
		return must[types.Policy](s, http.StatusOK, "PUT", "/policies/"+name, bytes.NewReader(egresstest.Module(1)))
	}
	if p := push("sign"); p.Warnings != nil || p.ReplacesBuiltIn {
		t.Errorf("got %+v", p)
	}
	p := push(egresstest.BuiltIn)
	if len(p.Warnings) != 1 || p.Warnings[0].Location != "path.name" || !strings.Contains(p.Warnings[0].Message, `doze ships a policy "bearer"`) || !p.ReplacesBuiltIn {
		t.Errorf("got %+v", p)
	}
}

// zeros is an endless file.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func TestPushesAreBounded(t *testing.T) {
	s := newServer(t, Limits{MaxCalls: pushSlots - 1})
	s.refused(problem.CallLimitExceeded, "PUT", "/policies/sign", bytes.NewReader(egresstest.Module(1)))
}

func TestAnOwnersPushesAreBounded(t *testing.T) {
	s := newServer(t, Limits{})
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	var pushed sync.WaitGroup
	var bodies []*io.PipeWriter
	for range maxOwnerPushes {
		body, rest := io.Pipe()
		bodies = append(bodies, rest)
		entered := make(chan struct{})
		traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got100Continue: func() { close(entered) }})
		req := s.request(traced, "PUT", "/policies/sign", body, "Expect", "100-continue")
		transport := &http.Transport{ExpectContinueTimeout: testkit.Patience}
		pushed.Go(func() {
			defer transport.CloseIdleConnections()
			resp, err := transport.RoundTrip(req)
			if err != nil {
				t.Errorf("an earlier push: %v", err)
				return
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				t.Errorf("an earlier push got %d", resp.StatusCode)
			}
		})
		select {
		case <-entered: // its body is read
		case <-ctx.Done():
			t.Fatal("its body is not read")
		}
	}
	got := s.do("PUT", "/policies/sign", bytes.NewReader(egresstest.Module(1)))
	if p := s.checkProblem(problem.PushLimitExceeded, "one more", got); p.Status != http.StatusTooManyRequests || got.header.Get("Retry-After") == "" {
		t.Errorf("got %+v, %v", p, got.header)
	}
	for _, rest := range bodies {
		if _, err := rest.Write(egresstest.Module(1)); err != nil {
			t.Error(err)
		}
		rest.Close()
	}
	pushed.Wait()
	must[types.Policy](s, http.StatusOK, "PUT", "/policies/sign", bytes.NewReader(egresstest.Module(2)))
}

func TestPushesOfAllOwnersAreBoundedAndNoneTakesThemAll(t *testing.T) {
	p := newPushes()
	var leaves []func()
	push := func(owner string) error {
		c := &call{owner: owner}
		leaves = append(leaves, c.done)
		return p.acquire(context.WithValue(t.Context(), callKey{}, c))
	}
	for i := range maxPushes {
		owner := fmt.Sprint(i / maxOwnerPushes)
		if err := push(owner); err != nil {
			t.Fatalf("push %d: %v", i, err)
		}
		if i%maxOwnerPushes == maxOwnerPushes-1 {
			if err := push(owner); err == nil || !strings.Contains(err.Error(), "you are already pushing") {
				t.Errorf("an owner pushes one more: %v", err)
			}
		}
	}
	if err := push("another"); err == nil {
		t.Error("there is one more in all")
	}
	for _, leave := range leaves {
		leave()
	}
	if err := push("another"); err != nil {
		t.Error(err)
	}
	leaves[len(leaves)-1]()
	if total, owners := p.used.Used(); total != 0 || owners != 0 {
		t.Errorf("left are %d of %d owners", total, owners)
	}
}

func TestTrustedCertificatesAreServed(t *testing.T) {
	s := newServer(t, Limits{})
	if got := s.do("GET", "/egress/ca", nil); got.status != http.StatusOK || string(got.body) != string(s.egress.Trust()) || got.header.Get("Content-Type") != pemType {
		t.Errorf("%d, %s: %s", got.status, got.header.Get("Content-Type"), got.body)
	}
	s.refused(problem.Unauthorized, "GET", "/egress/ca", nil, "Authorization", "")
}
