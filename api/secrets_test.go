package api

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/secret/vault"
	"github.com/doze-run/doze/problem"
)

const canary = "canary-5f1d0c7e9a"

func TestSecretsArePutAndNeverRead(t *testing.T) {
	s := newServer(t, Limits{})
	body := map[string]any{"value": canary, "hosts": []string{"api.github.com", "*.example.com"}}
	first := must[types.Secret](s, http.StatusOK, "PUT", "/secrets/github", body)
	second := must[types.Secret](s, http.StatusOK, "PUT", "/secrets/github", body)
	if first.Version != 1 || second.Version != 2 || strings.Join(first.Hosts, " ") != "api.github.com *.example.com" {
		t.Errorf("put %+v, then %+v", first, second)
	}
	if value, err := s.egress.Secret(t, testOwner, "github", "api.github.com"); err != nil || value != canary {
		t.Errorf("it is %q, %v", value, err)
	}
	must[types.Secret](s, http.StatusOK, "PUT", "/secrets/another", map[string]any{
		"value": base64.StdEncoding.EncodeToString([]byte("\x00binary\xff")), "encoding": "base64", "hosts": []string{"a.example"}})
	if value, err := s.egress.Secret(t, testOwner, "another", "a.example"); err != nil || value != "\x00binary\xff" {
		t.Errorf("it is %q, %v", value, err)
	}
	list := must[types.SecretList](s, http.StatusOK, "GET", "/secrets", nil)
	if len(list.Secrets) != 2 || list.Secrets[0].Name != "another" {
		t.Errorf("got %+v", list)
	}
	for _, got := range []response{s.do("GET", "/secrets", nil), s.do("GET", "/secrets/github", nil), s.do("PUT", "/secrets/github", body)} {
		if got.status != http.StatusOK || bytes.Contains(got.body, []byte("canary")) {
			t.Errorf("%d: %s", got.status, got.body)
		}
	}
	must[struct{}](s, http.StatusNoContent, "DELETE", "/secrets/github", nil)
	s.refused(problem.SecretNotFound, "GET", "/secrets/github", nil)
	s.refused(problem.SecretNotFound, "DELETE", "/secrets/github", nil)
}

func TestSecretsAreTheirOwners(t *testing.T) {
	s := newServer(t, Limits{})
	if _, err := s.egress.Secrets.Put(t.Context(), "another", "theirs", []byte(canary), []string{"a.example"}); err != nil {
		t.Fatal(err)
	}
	if list := s.do("GET", "/secrets", nil); strings.TrimSpace(string(list.body)) != `{"secrets":[]}` {
		t.Errorf("got %s", list.body)
	}
	s.refused(problem.SecretNotFound, "GET", "/secrets/theirs", nil)
	s.refused(problem.SecretNotFound, "DELETE", "/secrets/theirs", nil)
}

// A refusal never repeats the value, wherever it was by mistake, and nor does the log.
func TestRefusalsDoNotRepeatTheValue(t *testing.T) {
	var log bytes.Buffer
	s := newServer(t, Limits{})
	s.api.cfg.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	for _, c := range []struct {
		code           problem.Code
		path, body     string
		where, details string
	}{
		{problem.NameInvalid, "/secrets/A%20B", `{"value":"` + canary + `","hosts":["a.example"]}`, "path.name", "1 to 64"},
		{problem.RequestInvalid, "/secrets/a", `{"value":"canary","hosts":["a.example"]}`, "body.value", "at least 8"},
		{problem.RequestInvalid, "/secrets/a", `{"value":"` + canary + `","hosts":["a.example","**"]}`, "body.hosts[1]", "name those that need it"},
		{problem.RequestInvalid, "/secrets/a", `{"value":"` + canary + `","hosts":["*.com"]}`, "body.hosts", "anyone can register a name below com"},
		{problem.RequestInvalid, "/secrets/a", `{"value":"` + canary + `","hosts":[]}`, "body.hosts", "such as"},
		{problem.RequestInvalid, "/secrets/a", `{"value":["` + canary + `"],"hosts":["a.example"]}`, "body.value", ""},
		{problem.RequestInvalid, "/secrets/a", `{"value":"` + canary + `","hosts":"a.example"}`, "body.hosts", ""},
		{problem.RequestInvalid, "/secrets/a", `{"value":"` + canary + `"}`, "body.hosts", "missing"},
		{problem.RequestInvalid, "/secrets/a", `{"value":"` + canary + `","encoding":"base64","hosts":["a.example"]}`, "body.value", "invalid base64"},
		{problem.RequestInvalid, "/secrets/a", `{"value":"` + canary + `","value":"` + canary + `","hosts":["a.example"]}`, "body.value", "duplicate field"},
		{problem.JSONInvalid, "/secrets/a", `{"value":` + canary + `}`, "", ""},
		{problem.JSONInvalid, "/secrets/a", canary, "", ""},
	} {
		p := s.refused(c.code, "PUT", c.path, c.body)
		if text := p.Error() + p.Title; strings.Contains(text, "canary") || !strings.Contains(text, c.details) {
			t.Errorf("%s: %s", c.body, text)
		}
		if c.where != "" && (len(p.Errors) != 1 || p.Errors[0].Location != c.where || strings.Contains(p.Errors[0].Message+p.Errors[0].Hint, "canary")) {
			t.Errorf("%s: %+v, want %s", c.body, p.Errors, c.where)
		}
	}
	s.egress.Documents.Close()
	s.refused(problem.InternalError, "PUT", "/secrets/a", `{"value":"`+canary+`","hosts":["a.example"]}`)
	if !strings.Contains(log.String(), "store the secret a") || strings.Contains(log.String(), "canary") {
		t.Errorf("the log is %s", log.String())
	}
}

func TestSecretsOfAHostAreBounded(t *testing.T) {
	s := newServer(t, Limits{})
	put := func(name string, size int) response {
		return s.do("PUT", "/secrets/"+name, types.SetSecretRequest{Value: strings.Repeat("x", size), Hosts: []string{"*.example.com"}})
	}
	for n := range vault.MaxHostBytes / vault.MaxValue {
		if got := put(fmt.Sprint(n), vault.MaxValue); got.status != http.StatusOK {
			t.Fatalf("%d: %s", got.status, got.body)
		}
	}
	if p := s.checkProblem(problem.SecretLimitExceeded, "one more", put("more", vault.MinValue)); !strings.Contains(p.Detail, "*.example.com") {
		t.Errorf("got %s", p.Detail)
	}
}
