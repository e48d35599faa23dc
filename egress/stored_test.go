package egress

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/egress/tls/ca"
	"github.com/doze-run/doze/runtime/store/storetest"
	"github.com/doze-run/doze/testkit"
)

// stored is the state that a node left: its documents by kind and name, the key file that
// seals them, and the values that they encode.
type stored struct {
	At          time.Time
	SealKey     []byte
	Documents   map[string]map[string][]byte
	Trust       []byte
	Placeholder string
	Names       []string
}

const storedFile = "testdata/stored.json"

// The names and encodings of documents must not change between releases.
func TestDocumentsOfAnEarlierVersionAreRead(t *testing.T) {
	if testkit.Update() {
		writeStored(t)
	}
	var s stored
	text, err := os.ReadFile(storedFile)
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		t.Fatal(err)
	}
	memory := storetest.New(t)
	b := newRig(t, func(c *Config) {
		if err := os.WriteFile(filepath.Join(c.Folder, "seal.key"), s.SealKey, 0o600); err != nil {
			t.Fatal(err)
		}
		for kind, all := range s.Documents {
			for name, value := range all {
				err := errors.Join(c.Documents.PutDocument(testkit.Context(t), kind, name, value), memory.PutDocument(testkit.Context(t), kind, name, value))
				if err != nil {
					t.Fatal(err)
				}
			}
		}
	}).box("k3f9x2m7q1az")
	if log := b.log.String(); log != "" {
		t.Errorf("the log has %s", log)
	}
	authority, err := ca.Open(testkit.Context(t), ca.Config{Documents: memory, Key: b.key, Now: func() time.Time { return s.At }})
	if err != nil || !bytes.Equal(authority.Bundle(), s.Trust) {
		t.Errorf("the certificate authority is another: %v", err)
	}
	if got := b.Environment(b.sb.ID)["API_TOKEN"]; got != s.Placeholder {
		t.Errorf("the placeholder is %q, want %q", got, s.Placeholder)
	}
	if got := slices.Sorted(maps.Values(b.names.known(b.sb.ID))); !slices.Equal(got, s.Names) {
		t.Errorf("the names are %q, want %q", got, s.Names)
	}
	if p, err := b.modules.Get(owner, "bearer"); err != nil || p.Size == 0 {
		t.Errorf("the policy is %+v, %v", p, err)
	}
	if set := b.sets.Get(ruleset.Scope{Owner: owner}); set.Revision != 1 || len(set.Rules) != 1 || set.Rules[0].Name != "stored" {
		t.Errorf("the owner's rules are %+v", set)
	}
	r := newRequest(t, "GET", "https://a.web.test/", nil)
	r.Header.Set("Authorization", "Bearer "+s.Placeholder)
	b.want(b.do(r), 200, "")
	if got := b.servers.last(t).Header.Get("Authorization"); got != "Bearer "+token {
		t.Errorf("the server got %q", got)
	}
}

// writeStored writes storedFile, with documents of every kind.
func writeStored(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.push("bearer", bearer(1))
	b.secret("api", token, "a.web.test")
	if _, _, err := b.SetRules(testkit.Context(t), owner, "", ruleset.Update{Rules: []rule.Rule{{Name: "stored", Hosts: []string{"b.web.test"}, Action: rule.Allow}}}); err != nil {
		t.Fatal(err)
	}
	b.rules(offering("a.web.test"))
	b.want(b.get("https://a.web.test/"), 200, "")
	s := stored{At: time.Now().UTC(), Documents: map[string]map[string][]byte{}, Trust: b.Trust(), Placeholder: b.Environment(b.sb.ID)["API_TOKEN"]}
	b.names.flush()
	s.Names = slices.Sorted(maps.Values(b.names.known(b.sb.ID)))
	var err error
	if s.SealKey, err = os.ReadFile(filepath.Join(b.config.Folder, "seal.key")); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"names", "rules", "policies", "secrets", "ca", "keys"} {
		s.Documents[kind] = map[string][]byte{}
		err := b.documents.Documents(testkit.Context(t), kind, func(name string, value []byte) error {
			s.Documents[kind][name] = value
			return nil
		})
		if err != nil || len(s.Documents[kind]) == 0 {
			t.Fatalf("%d documents %s: %v", len(s.Documents[kind]), kind, err)
		}
	}
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	testkit.Golden(t, storedFile, text)
}
