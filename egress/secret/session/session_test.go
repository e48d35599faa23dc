package session_test

import (
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/egress/secret/session"
	"github.com/doze-run/doze/egress/secret/vault"
	"github.com/doze-run/doze/runtime/store/storetest"
)

const host = "api.example.com"

var token = secret.ID{Owner: "owner/a", Name: "token"}

// newVault returns a vault with the secrets token of owner/a and of operator.
func newVault(t *testing.T) *vault.Vault {
	t.Helper()
	key, err := seal.Open(filepath.Join(t.TempDir(), "seal.key"))
	if err != nil {
		t.Fatal(err)
	}
	v, err := vault.Open(t.Context(), storetest.New(t), key)
	if err != nil {
		t.Fatal(err)
	}
	put(t, v, token.Owner, "value-of-the-owner")
	put(t, v, "operator", "value-of-the-operator")
	return v
}

func put(t *testing.T, v *vault.Vault, owner, value string) {
	t.Helper()
	if _, err := v.Put(t.Context(), owner, token.Name, []byte(value), []string{host}); err != nil {
		t.Fatal(err)
	}
}

func TestValueIsForVerifiedTLSAndBoundHosts(t *testing.T) {
	v := newVault(t)
	for name, c := range map[string]struct {
		session *session.Session
		id      secret.ID
		want    string // value or part of the error
	}{
		"bound":        {session.New(v, host, true), token, "value-of-the-owner"},
		"other owner":  {session.New(v, host, true), secret.ID{Owner: "operator", Name: "token"}, "value-of-the-operator"},
		"without TLS":  {session.New(v, host, false), token, "TLS only"},
		"another host": {session.New(v, "api.example.org", true), token, "not bound to api.example.org"},
		"unknown":      {session.New(v, host, true), secret.ID{Owner: token.Owner, Name: "other"}, "does not exist"},
		"its owner":    {session.New(v, host, true), secret.ID{Owner: "owner", Name: "a/token"}, "does not exist"},
	} {
		value, err := c.session.Value(c.id)
		if err != nil {
			value = []byte(err.Error())
		}
		if (err == nil) != strings.HasPrefix(c.want, "value") || !strings.Contains(string(value), c.want) {
			t.Errorf("%s: got %q, %v", name, value, err)
		}
	}
}

func TestSealedSessionGivesOutOnlyKnownValues(t *testing.T) {
	v := newVault(t)
	s := session.New(v, host, true)
	if _, err := s.Value(token); err != nil {
		t.Fatal(err)
	}
	put(t, v, token.Owner, "second-value")
	extra := s.Seal([][]byte{[]byte("second-value")})
	if diff := cmp.Diff([][]byte{[]byte("value-of-the-owner")}, extra); diff != "" {
		t.Error(diff)
	}
	if _, err := s.Value(token); err != nil {
		t.Errorf("a value that the filter knows: %v", err)
	}
	put(t, v, token.Owner, "third-value")
	if _, err := s.Value(token); err == nil || !strings.Contains(err.Error(), "changed while the request was sent") {
		t.Errorf("a value that the filter does not know: %v", err)
	}
}

func TestUsedSecretsAreRenderedOrDerivedFrom(t *testing.T) {
	s := session.New(newVault(t), host, true)
	if s.Used() != nil {
		t.Error("used before a policy asked for any")
	}
	names := map[string]string{"key": token.Name}
	own, operators := s.For(token.Owner, names), s.For("operator", names)
	if _, err := own.Reference("key"); err != nil {
		t.Fatal(err)
	}
	if used := s.Used(); used != nil {
		t.Errorf("a reference that is not in the request: %v", used)
	}
	if _, err := operators.HMAC("key", "", [][]byte{nil}); err != nil {
		t.Fatal(err)
	}
	ref, _ := own.Reference("key")
	r := httptest.NewRequest("GET", "https://"+host+"/", nil)
	before := r.Clone(t.Context())
	r.Header.Set("Authorization", "Bearer "+ref)
	if s.Moved(before, r, nil, token.Owner) || !s.Moved(before, r, nil, "operator") {
		t.Error("the reference moved for its owner, or not for another")
	}
	if err := s.Render(r, false); err != nil {
		t.Fatal(err)
	}
	if got := r.Header.Get("Authorization"); got != "Bearer value-of-the-owner" {
		t.Errorf("got %q", got)
	}
	if diff := cmp.Diff([]secret.ID{{Owner: "operator", Name: "token"}, token}, s.Used()); diff != "" {
		t.Error(diff)
	}
}
