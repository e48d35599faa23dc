package vault

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/store/document"
	"github.com/doze-run/doze/runtime/store/storetest"
)

const value = "canary-5f1d0c7e9a"

func newKey(t testing.TB) *seal.Key {
	t.Helper()
	k, err := seal.Open(filepath.Join(t.TempDir(), "seal.key"))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func openVault(t testing.TB, docs document.Store, key *seal.Key) *Vault {
	t.Helper()
	v, err := Open(context.Background(), docs, key)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func newVault(t testing.TB) *Vault { return openVault(t, storetest.New(t), newKey(t)) }

func put(t testing.TB, v *Vault, owner, name, value string, hosts ...string) Secret {
	t.Helper()
	s, err := v.Put(context.Background(), owner, name, []byte(value), hosts)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func names(values []Value) string {
	list := make([]string, len(values))
	for i, v := range values {
		list[i] = v.Name
	}
	return strings.Join(list, " ")
}

func TestSecretIsUsedOnlyForTheHostsItIsBoundTo(t *testing.T) {
	v := newVault(t)
	s := put(t, v, "a", "token", value, "API.GitHub.com.", "*.example.com")
	if got := strings.Join(s.Hosts, " "); got != "api.github.com *.example.com" {
		t.Errorf("hosts are %s", got)
	}
	for host, bound := range map[string]bool{
		"api.github.com": true, "x.example.com": true, "x.y.example.com": true,
		"example.com": false, "github.com": false, "xapi.github.com": false, "x.api.github.com": false, "xexample.com": false,
		".example.com": false, "example.com.evil.example": false, "": false,
	} {
		got, err := v.Use("a", "token", host)
		if bound && (err != nil || string(got) != value) || !bound && (got != nil || !errors.Is(err, ErrNotBound)) {
			t.Errorf("%q: got %q, %v", host, got, err)
		}
		if found := len(v.BoundTo("a", host)) == 1; found != bound {
			t.Errorf("%q: BoundTo has it: %v", host, found)
		}
	}
	for _, c := range [][2]string{{"a", "other"}, {"b", "token"}, {"", "token"}} {
		if _, err := v.Use(c[0], c[1], "api.github.com"); !errors.Is(err, ErrUnknown) {
			t.Errorf("%v: got %v, want ErrUnknown", c, err)
		}
	}
	if got := v.BoundTo("b", "api.github.com"); got != nil {
		t.Errorf("another owner has %v", got)
	}
}

func TestBoundToNamesEachSecretOnce(t *testing.T) {
	v := newVault(t)
	put(t, v, "a", "one", value, "x.y.example.com")
	put(t, v, "a", "two", value, "*.y.example.com", "x.y.example.com")
	put(t, v, "a", "all", value, "*.example.com", "*.y.example.com")
	put(t, v, "a", "not", value, "y.example.com")
	for _, name := range []string{"p", "q", "r"} { // leaves room behind them
		put(t, v, "a", name, value, "x.example.org")
	}
	put(t, v, "a", "before", value, "*.example.org")
	for host, want := range map[string]string{
		"x.example.org":   "before p q r",
		"x.y.example.com": "all one two", "z.y.example.com": "all two", "z.example.com": "all", "y.example.com": "all not", "example.com": "",
	} {
		for range 2 { // the first result changes nothing for the second
			if got := names(v.BoundTo("a", host)); got != want {
				t.Errorf("%s: got %q, want %q", host, got, want)
			}
		}
	}
}

func TestPutIncrementsTheVersion(t *testing.T) {
	v := newVault(t)
	first := put(t, v, "a", "token", value, "a.example")
	before := v.Version()
	second := put(t, v, "a", "token", "another-value", "b.example")
	if first.Version != 1 || second.Version != 2 || !second.CreatedAt.Equal(first.CreatedAt) || second.UpdatedAt.Before(first.UpdatedAt) {
		t.Errorf("got %+v, then %+v", first, second)
	}
	if v.Version() <= before {
		t.Error("the vault's version did not grow")
	}
	if _, err := v.Use("a", "token", "a.example"); !errors.Is(err, ErrNotBound) {
		t.Errorf("the old host is still bound: %v", err)
	}
	if got, err := v.Use("a", "token", "b.example"); err != nil || string(got) != "another-value" {
		t.Errorf("got %q, %v", got, err)
	}
	if got, err := v.Get("a", "token"); err != nil || got.Version != 2 {
		t.Errorf("Get: %+v, %v", got, err)
	}
}

func TestDeletedSecretsAreUnknown(t *testing.T) {
	docs, key := storetest.New(t), newKey(t)
	v := openVault(t, docs, key)
	put(t, v, "a", "token", value, "a.example")
	put(t, v, "a", "other", value, "a.example")
	before := v.Version()
	if err := v.Delete(t.Context(), "a", "token"); err != nil {
		t.Fatal(err)
	}
	if v.Version() <= before {
		t.Error("the vault's version did not grow")
	}
	for _, v := range []*Vault{v, openVault(t, docs, key)} {
		if got := v.List("a"); len(got) != 1 || got[0].Name != "other" {
			t.Errorf("got %+v, want the other only", got)
		}
		if got := names(v.BoundTo("a", "a.example")); got != "other" {
			t.Errorf("got %q", got)
		}
	}
	if err := v.Delete(t.Context(), "a", "token"); !errors.Is(err, ErrUnknown) {
		t.Errorf("again: %v, want ErrUnknown", err)
	}
	if _, err := v.Get("a", "token"); !errors.Is(err, ErrUnknown) {
		t.Errorf("Get: %v, want ErrUnknown", err)
	}
}

func TestSecretsSurviveARestart(t *testing.T) {
	docs, key := storetest.New(t), newKey(t)
	v := openVault(t, docs, key)
	put(t, v, "a/b", "token", value, "a.example")
	put(t, v, "a/b", "token", value+"2", "*.b.example", "a.example")
	put(t, v, "c", "token", value, "a.example")
	again := openVault(t, docs, key)
	if faults := again.Faults(); faults != nil {
		t.Fatal(faults)
	}
	for _, owner := range []string{"a/b", "c"} {
		was, is := v.List(owner), again.List(owner)
		if fmt.Sprint(was) != fmt.Sprint(is) {
			t.Errorf("%+v became %+v", was, is)
		}
	}
	if got, err := again.Use("a/b", "token", "x.b.example"); err != nil || string(got) != value+"2" {
		t.Errorf("got %q, %v", got, err)
	}
}

// stored returns what the store has of all secrets.
func stored(t *testing.T, docs document.Store) map[string][]byte {
	t.Helper()
	all := map[string][]byte{}
	if err := docs.Documents(t.Context(), documentKind, func(name string, value []byte) error {
		all[name] = value
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

func TestValuesAreSealedAtRest(t *testing.T) {
	docs := storetest.New(t)
	put(t, openVault(t, docs, newKey(t)), "a", "token", value, "a.example")
	text, err := json.Marshal(stored(t, docs))
	if err != nil {
		t.Fatal(err)
	}
	for _, doc := range stored(t, docs) {
		if bytes.Contains(doc, []byte(value)) || bytes.Contains(doc, []byte("Y2FuYXJ5")) {
			t.Errorf("the value is in %s", text)
		}
	}
}

// Write access to the store suffices to destroy secrets, but not to send them elsewhere.
func TestRecordsCannotBeForged(t *testing.T) {
	change := func(from, to string) func([]byte) []byte {
		return func(doc []byte) []byte {
			out := bytes.ReplaceAll(doc, []byte(from), []byte(to))
			if bytes.Equal(out, doc) {
				panic("nothing to change")
			}
			return out
		}
	}
	for name, c := range map[string]struct {
		to     string // the document's name
		change func([]byte) []byte
	}{
		"another host":    {"a/token", change("a.example", "evil.example")},
		"another version": {"a/token", change(`"version":1`, `"version":2`)},
		"another owner":   {"evil/token", bytes.Clone},
		"another name":    {"a/other", change(`"token"`, `"other"`)},
		"name moved":      {"a/other", bytes.Clone},
		"no JSON":         {"a/token", func([]byte) []byte { return []byte("{") }},
		"more hosts":      {"a/token", change(`["a.example"]`, `["a.example","evil.example"]`)},
		"every host":      {"a/token", change(`["a.example"]`, `["**"]`)},
		"a newer field":   {"a/token", change(`"version"`, `"only_for":"x","version"`)},
		"cut":             {"a/token", change(`"sealed":"`, `"sealed":"AAAA`)},
	} {
		t.Run(name, func(t *testing.T) {
			docs, key := storetest.New(t), newKey(t)
			put(t, openVault(t, docs, key), "a", "token", value, "a.example")
			doc := c.change(stored(t, docs)["a/token"])
			if err := docs.PutDocument(t.Context(), documentKind, c.to, doc); err != nil {
				t.Fatal(err)
			}
			v := openVault(t, docs, key)
			if len(v.Faults()) != 1 || strings.Contains(fmt.Sprint(v.Faults()), value) {
				t.Errorf("faults are %v", v.Faults())
			}
			owner, secret, _ := strings.Cut(c.to, "/")
			for _, host := range []string{"a.example", "evil.example"} {
				if got, err := v.Use(owner, secret, host); got != nil || !errors.Is(err, ErrUnreadable) {
					t.Errorf("%s got %q, %v; want ErrUnreadable", host, got, err)
				}
			}
			if got, err := v.Get(owner, secret); err != nil || !got.Unreadable {
				t.Errorf("got %+v, %v", got, err)
			}
			put(t, v, owner, secret, value, "a.example")
			if got, err := v.Use(owner, secret, "a.example"); err != nil || string(got) != value {
				t.Errorf("put again it is %q, %v", got, err)
			}
		})
	}
}

func TestLostKeyLosesTheSecretsAndNotTheNode(t *testing.T) {
	docs := storetest.New(t)
	put(t, openVault(t, docs, newKey(t)), "a", "token", value, "a.example")
	v := openVault(t, docs, newKey(t))
	if faults := v.Faults(); len(faults) != 1 || !errors.Is(faults[0], seal.ErrOtherKey) || !strings.Contains(faults[0].Error(), "token of a") {
		t.Errorf("faults are %v", faults)
	}
	if got := v.BoundTo("a", "a.example"); len(got) != 0 {
		t.Errorf("it is searched for: %v", got)
	}
	if err := v.Delete(t.Context(), "a", "token"); err != nil {
		t.Error(err)
	}
}

func TestSecretsOfAnOldKeyAreSealedAgain(t *testing.T) {
	dir, docs := t.TempDir(), storetest.New(t)
	open := func(name string) *seal.Key {
		t.Helper()
		key, err := seal.Open(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return key
	}
	put(t, openVault(t, docs, open("old")), "a", "token", value, "a.example")
	before := stored(t, docs)["a/token"]
	next := open("new")
	var both []byte
	for _, name := range []string{"new", "old"} {
		keys, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		both = append(both, keys...)
	}
	if err := os.WriteFile(filepath.Join(dir, "both"), both, 0o600); err != nil {
		t.Fatal(err)
	}
	v := openVault(t, docs, open("both"))
	after := stored(t, docs)["a/token"]
	if bytes.Equal(before, after) {
		t.Error("it was not sealed again")
	}
	openVault(t, docs, open("both"))
	if !bytes.Equal(after, stored(t, docs)["a/token"]) {
		t.Error("it is sealed again each time")
	}
	if got, err := openVault(t, docs, next).Use("a", "token", "a.example"); err != nil || string(got) != value || v.Faults() != nil {
		t.Errorf("got %q, %v, %v", got, err, v.Faults())
	}
}

func TestInvalidSecretsAreRefusedWithARemedy(t *testing.T) {
	long := strings.Repeat("x", MaxValue+1)
	for name, c := range map[string]struct {
		name, value string
		hosts       []string
		field, want string
	}{
		"name":            {"A token", value, []string{"a.example"}, "name", "a-z, 0-9"},
		"no name":         {"", value, []string{"a.example"}, "name", "1 to 64"},
		"slash in a name": {"a/b", value, []string{"a.example"}, "name", "1 to 64"},
		"short":           {"token", "1234567", []string{"a.example"}, "value", "at least 8"},
		"no value":        {"token", "", []string{"a.example"}, "value", "at least 8"},
		"long":            {"token", long, []string{"a.example"}, "value", "at most 65536"},
		"no hosts":        {"token", value, nil, "hosts", "such as api.github.com"},
		"too many hosts":  {"token", value, make([]string, MaxHosts+1), "hosts", "1 to 100"},
		"every host":      {"token", value, []string{"a.example", "**"}, "hosts[1]", "name those that need it"},
		"star":            {"token", value, []string{"*"}, "hosts[0]", "name those that need it"},
		"star inside":     {"token", value, []string{"a.*.example"}, "hosts[0]", "*.example.com"},
		"URL":             {"token", value, []string{"https://a.example"}, "hosts[0]", "use names"},
		"address":         {"token", value, []string{"10.0.0.1"}, "hosts[0]", "use names"},
		"everybody's":     {"token", value, []string{"*.com"}, "hosts", "name the hosts"},
		"pages of all":    {"token", value, []string{"*.github.io"}, "hosts", "name the hosts"},
		"twice":           {"token", value, []string{"a.example", "A.example."}, "hosts", "once"},
	} {
		t.Run(name, func(t *testing.T) {
			v := newVault(t)
			before := v.Version()
			_, err := v.Put(t.Context(), "a", c.name, []byte(c.value), c.hosts)
			var invalid *problem.InvalidError
			if !errors.As(err, &invalid) || invalid.Field != c.field || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v; want %s and %q", err, c.field, c.want)
			}
			if c.value != "" && strings.Contains(err.Error(), c.value) {
				t.Errorf("the error has the value: %.200v", err)
			}
			if len(v.List("a")) != 0 || v.Version() != before {
				t.Error("something changed")
			}
		})
	}
	v := newVault(t)
	put(t, v, "a", "own-network", value, "*.corp", "*.example.com")
	for _, owner := range []string{"", strings.Repeat("o", maxOwner+1)} {
		if _, err := v.Put(t.Context(), owner, "token", []byte(value), []string{"a.example"}); err == nil {
			t.Errorf("the owner %.10q was taken", owner)
		}
	}
	put(t, v, strings.Repeat("o", maxOwner), strings.Repeat("n", 64), value, "a.example")
}

func TestSecretsOfAnOwnerAreBounded(t *testing.T) {
	v := newVault(t)
	full := map[string]*entry{}
	for n := range MaxSecrets {
		full[fmt.Sprint(n)] = &entry{Secret: Secret{Name: fmt.Sprint(n)}}
	}
	v.replace("a", newOwnerSecrets(full))
	if _, err := v.Put(t.Context(), "a", "token", []byte(value), []string{"a.example"}); !errors.Is(err, ErrTooMany) {
		t.Errorf("got %v, want ErrTooMany", err)
	}
	put(t, v, "a", "7", value, "a.example") // it replaces one
	put(t, v, "b", "token", value, "a.example")
}

func TestSecretsOfAHostAreBounded(t *testing.T) {
	for name, c := range map[string]struct {
		bound []string // the hosts of so many secrets of value
		count int
		more  string // one more that is refused
		full  string // the host that it is refused for
		fits  string // one that is not
	}{
		"by name":             {[]string{"a.example.com"}, MaxHostSecrets, "a.example.com", "a.example.com", "b.example.com"},
		"below":               {[]string{"*.example.com"}, MaxHostSecrets, "*.example.com", "*.example.com", "example.com"},
		"a host below":        {[]string{"*.example.com"}, MaxHostSecrets, "a.b.example.com", "a.b.example.com", "example.org"},
		"a part below":        {[]string{"*.example.com"}, MaxHostSecrets, "*.b.example.com", "*.b.example.com", "example.org"},
		"names below it":      {[]string{"a.b.example.com"}, MaxHostSecrets, "*.example.com", "a.b.example.com", "*.a.example.com"},
		"parts that are":      {[]string{"*.b.example.com"}, MaxHostSecrets, "*.example.com", "*.b.example.com", "*.a.example.com"},
		"once, by both":       {[]string{"a.example.com", "*.example.com"}, MaxHostSecrets, "a.example.com", "a.example.com", "example.com"},
		"another's next door": {[]string{"a.example.com"}, MaxHostSecrets, "a.example.com", "a.example.com", "*.a.example.com"},
	} {
		t.Run(name, func(t *testing.T) {
			v := newVault(t)
			for n := range c.count {
				put(t, v, "a", fmt.Sprint(n), value, c.bound...)
			}
			_, err := v.Put(t.Context(), "a", "token", []byte(value), []string{"z.example.net", c.more})
			var full *HostFullError
			if !errors.As(err, &full) || full.Host != c.full || full.Secrets != MaxHostSecrets+1 || !errors.Is(err, ErrTooMany) {
				t.Errorf("one more: %v", err)
			}
			if _, err := v.Get("a", "token"); !errors.Is(err, ErrUnknown) {
				t.Errorf("it is stored: %v", err)
			}
			put(t, v, "a", "token", value, c.fits)
			put(t, v, "a", "0", "another-value", c.bound...) // it replaces one
			put(t, v, "b", "token", value, c.more)
		})
	}
}

func TestBytesOfAHostAreBounded(t *testing.T) {
	v := newVault(t)
	large := strings.Repeat("x", MaxValue)
	for n := range MaxHostBytes / MaxValue {
		put(t, v, "a", fmt.Sprint(n), large, "a.example")
	}
	_, err := v.Put(t.Context(), "a", "token", []byte(value), []string{"a.example"})
	if want := fmt.Sprintf("5 secrets of %d bytes", MaxHostBytes+len(value)); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), value) {
		t.Errorf("one more: %v; want %s", err, want)
	}
	put(t, v, "a", "token", value, "b.example")
	put(t, v, "a", "0", value, "a.example")
	put(t, v, "a", "token", value, "a.example")
}

func TestNothingChangesWhenTheStoreRefuses(t *testing.T) {
	docs := storetest.New(t)
	v := openVault(t, docs, newKey(t))
	put(t, v, "a", "token", value, "a.example")
	before := v.Version()
	docs.Close()
	if _, err := v.Put(t.Context(), "a", "token", []byte("another-value"), []string{"b.example"}); err == nil {
		t.Error("Put reported success")
	}
	if err := v.Delete(t.Context(), "a", "token"); err == nil {
		t.Error("Delete reported success")
	}
	if got, err := v.Use("a", "token", "a.example"); err != nil || string(got) != value || v.Version() != before {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := Open(t.Context(), docs, newKey(t)); err == nil {
		t.Error("a vault was opened without its secrets")
	}
}

func TestValuesAreCopied(t *testing.T) {
	v := newVault(t)
	given, hosts := []byte(value), []string{"a.example"}
	s, err := v.Put(t.Context(), "a", "token", given, hosts)
	if err != nil {
		t.Fatal(err)
	}
	clear(given)
	hosts[0], s.Hosts[0], v.List("a")[0].Hosts[0] = "x", "x", "x"
	if got, err := v.Use("a", "token", "a.example"); err != nil || string(got) != value {
		t.Errorf("got %q, %v", got, err)
	}
	if got := v.List("a")[0].Hosts[0]; got != "a.example" {
		t.Errorf("the host is %s", got)
	}
}

func TestValuesNeverShowThemselves(t *testing.T) {
	v := newVault(t)
	put(t, v, "a", "token", value, "a.example")
	values := v.BoundTo("a", "a.example")
	e := v.ofOwner("a").secrets["token"]
	_, errUse := v.Use("a", "token", "b.example")
	var log bytes.Buffer
	for _, h := range []slog.Handler{slog.NewTextHandler(&log, nil), slog.NewJSONHandler(&log, nil)} {
		slog.New(h).Info("m", "value", values[0], "all", values, "entry", e, "list", v.List("a"), "error", errUse)
	}
	text, err := json.Marshal(map[string]any{"one": values[0], "all": values, "list": v.List("a")})
	if err != nil {
		t.Fatal(err)
	}
	shown := log.String() + string(text) + fmt.Sprintf("%v %+v %#v %s %x %d %v %+v %#v %v %+v %#v %v", values[0], values[0], values[0], values[0], values[0], values[0],
		values, values, values, e, e, &values[0], errUse)
	for _, form := range []string{value, "canary", fmt.Sprintf("%x", value), "Y2FuYXJ5", "99 97 110", "0x63, 0x61"} {
		if strings.Contains(shown, form) {
			t.Errorf("%s is in %s", form, shown)
		}
	}
	if !strings.Contains(shown, "[secret token]") {
		t.Errorf("got %s", shown)
	}
}

func TestReadersAndWritersConcurrently(t *testing.T) {
	v := newVault(t)
	var wg sync.WaitGroup
	for n := range 8 {
		wg.Go(func() {
			for round := range 25 {
				if _, err := v.Put(t.Context(), "a", fmt.Sprint(n), []byte(value), []string{"a.example"}); err != nil {
					t.Error(err)
				}
				if got, err := v.Use("a", fmt.Sprint(n), "a.example"); err != nil || string(got) != value {
					t.Errorf("round %d: got %q, %v", round, got, err)
				}
				if !slices.ContainsFunc(v.BoundTo("a", "a.example"), func(v Value) bool { return v.Name == fmt.Sprint(n) }) {
					t.Error("it was put and is not bound")
				}
			}
		})
	}
	wg.Wait()
	if got := v.List("a"); len(got) != 8 || got[0].Version != 25 {
		t.Errorf("got %+v", got)
	}
}

// The index and the patterns agree on what is bound.
func FuzzBoundTo(f *testing.F) {
	f.Add("*.example.com", "x.example.com")
	f.Add("a.example", "a.example")
	f.Add("*.b", "..b")
	f.Fuzz(func(t *testing.T, host, asked string) {
		patterns, err := parsePatterns([]string{host})
		if err != nil {
			return
		}
		e := &entry{Secret: Secret{Name: "token"}, patterns: patterns}
		found := len(newOwnerSecrets(map[string]*entry{"token": e}).boundTo(asked)) == 1
		if bound := e.boundTo(asked); bound != found {
			t.Errorf("%q is bound to %q: %v, found: %v", host, asked, bound, found)
		}
	})
}

func BenchmarkBoundTo(b *testing.B) {
	v := newVault(b)
	secrets := map[string]*entry{}
	for n := range MaxSecrets {
		name := fmt.Sprint(n)
		secrets[name] = &entry{Secret: Secret{Name: name}, value: []byte(value), patterns: []pattern{{name + ".example", true}}}
	}
	v.replace("a", newOwnerSecrets(secrets))
	put(b, v, "a", "7", value, "api.github.com", "*.example.com")
	for name, host := range map[string]string{"bound": "api.github.com", "below": "a.b.example.com", "none": "packages.example.net"} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				v.BoundTo("a", host)
			}
		})
	}
}
