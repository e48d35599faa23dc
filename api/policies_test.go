package api

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/egresstest"
	"github.com/doze-run/doze/egress/modules"
	"github.com/doze-run/doze/egress/ruleset"
)

func TestPoliciesArePushedAndListed(t *testing.T) {
	s := newServer(t, Limits{})
	module := egresstest.Module(1)
	got := must[modules.Info](s, http.StatusOK, "PUT", "/policies/sign", bytes.NewReader(module), "Content-Type", "application/wasm")
	if got.Digest != modules.Digest(module) || got.Size != int64(len(module)) || got.BuiltIn {
		t.Errorf("got %+v", got)
	}
	must[modules.Info](s, http.StatusOK, "PUT", "/policies/sign", bytes.NewReader(egresstest.Module(2)))
	list := must[PolicyList](s, http.StatusOK, "GET", "/policies", nil)
	if len(list.Policies) != 2 || list.Policies[0].Name != egresstest.BuiltIn || !list.Policies[0].BuiltIn || list.Policies[1].Digest != modules.Digest(egresstest.Module(2)) {
		t.Errorf("got %+v", list)
	}
	must[ruleset.Set](s, http.StatusOK, "PUT", "/egress/rules", `{"rules":[{"name":"gh","hosts":["a.example"],"action":"policies","policies":[{"policy":"sign"}]}]}`)
	if p := must[modules.Info](s, http.StatusOK, "GET", "/policies/sign", nil); strings.Join(p.UsedBy, " ") != "owner/gh" {
		t.Errorf("got %+v", p)
	}
	if p := s.refused(CodePolicyInUse, "DELETE", "/policies/sign", nil); !strings.Contains(p.Detail, "owner/gh") {
		t.Errorf("got %s", p.Detail)
	}
	must[ruleset.Set](s, http.StatusOK, "PUT", "/egress/rules", `{"rules":[]}`)
	must[struct{}](s, http.StatusNoContent, "DELETE", "/policies/sign", nil)
	s.refused(CodePolicyNotFound, "GET", "/policies/sign", nil)
	s.refused(CodePolicyNotFound, "DELETE", "/policies/sign", nil)
}

func TestWhatIsNoPolicyIsRefused(t *testing.T) {
	s := newServer(t, Limits{})
	p := s.refused(CodePolicyInvalid, "PUT", "/policies/sign", strings.NewReader("#!/bin/sh"))
	if len(p.Errors) != 1 || p.Errors[0].Location != "body" || !strings.Contains(p.Detail, "no WebAssembly module") {
		t.Errorf("got %+v", p)
	}
	s.refused(CodePolicyInvalid, "PUT", "/policies/sign", nil)
	s.refused(CodeNameInvalid, "PUT", "/policies/Sign", bytes.NewReader(egresstest.Module(1)))
	s.refused(CodeUnsupportedMediaType, "PUT", "/policies/sign", `{"module":"…"}`)
	large := s.refused(CodeBodyTooLarge, "PUT", "/policies/sign", bytes.NewReader(make([]byte, modules.MaxModule+1)))
	if strings.Contains(large.Detail, "raw bytes") {
		t.Errorf("the remedy is another's: %s", large.Detail)
	}
	// Of a length that is not known beforehand, too.
	s.refused(CodeBodyTooLarge, "PUT", "/policies/sign", io.LimitReader(zeros{}, modules.MaxModule+1))
	if list := must[PolicyList](s, http.StatusOK, "GET", "/policies", nil); len(list.Policies) != 1 {
		t.Errorf("got %+v", list)
	}
}

// zeros is an endless file.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func TestPushesAreBounded(t *testing.T) {
	s := newServer(t, Limits{MaxCalls: callsOfPush - 1})
	s.refused(CodeTooManyCalls, "PUT", "/policies/sign", bytes.NewReader(egresstest.Module(1)))
}

func TestTrustedCertificatesAreThere(t *testing.T) {
	s := newServer(t, Limits{})
	if got := s.do("GET", "/egress/ca", nil); got.status != http.StatusOK || string(got.body) != egresstest.PEM || got.header.Get("Content-Type") != pemType {
		t.Errorf("%d, %s: %s", got.status, got.header.Get("Content-Type"), got.body)
	}
	s.refused(CodeUnauthorized, "GET", "/egress/ca", nil, "Authorization", "")
}
