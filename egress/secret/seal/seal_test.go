package seal

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/doze-run/doze/testkit"
)

// keyOf returns a Key of keys that consist of one byte each.
func keyOf(t testing.TB, of ...byte) *Key {
	t.Helper()
	keys := make([][]byte, len(of))
	for i, b := range of {
		keys[i] = bytes.Repeat([]byte{b}, keySize)
	}
	k, err := newKey(keys)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func mustSeal(t testing.TB, k *Key, purpose, plain string) []byte {
	t.Helper()
	sealed, err := k.Seal(purpose, []byte(plain))
	if err != nil {
		t.Fatal(err)
	}
	return sealed
}

func write(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

func line(b byte) string {
	return base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{b}, keySize)) + "\n"
}

func TestSealedValuesOpenForTheirPurposeOnly(t *testing.T) {
	k := keyOf(t, 1)
	sealed := mustSeal(t, k, "secret/a/token/1", "the plain text")
	if bytes.Contains(sealed, []byte("plain")) {
		t.Error("the plain text is in what was sealed")
	}
	if got, err := k.Open("secret/a/token/1", sealed); err != nil || string(got) != "the plain text" {
		t.Errorf("got %q, %v", got, err)
	}
	for _, purpose := range []string{"secret/b/token/1", "secret/a/token/2", ""} {
		if got, err := k.Open(purpose, sealed); got != nil || !errors.Is(err, ErrBroken) {
			t.Errorf("for %q got %q, %v; want ErrBroken", purpose, got, err)
		}
	}
	if bytes.Equal(sealed, mustSeal(t, k, "secret/a/token/1", "the plain text")) {
		t.Error("the same was sealed to the same: it shows what is equal")
	}
}

func TestValuesOfAnotherKeyAreReported(t *testing.T) {
	sealed := mustSeal(t, keyOf(t, 1), "p", "plain")
	_, err := keyOf(t, 2).Open("p", sealed)
	if !errors.Is(err, ErrOtherKey) || !strings.Contains(err.Error(), "open p: ") {
		t.Errorf("got %v, want ErrOtherKey and the purpose", err)
	}
}

func TestOldKeysOpenAndTheFirstSeals(t *testing.T) {
	before := mustSeal(t, keyOf(t, 1), "p", "plain")
	k := keyOf(t, 2, 1)
	if got, err := k.Open("p", before); err != nil || string(got) != "plain" {
		t.Errorf("got %q, %v", got, err)
	}
	after := mustSeal(t, k, "p", "plain")
	if _, err := keyOf(t, 2).Open("p", after); err != nil {
		t.Errorf("the first key did not seal: %v", err)
	}
	if !k.Old(before) || k.Old(after) || k.Old(nil) {
		t.Errorf("old: %v, %v, %v; want only the old key's value to be old", k.Old(before), k.Old(after), k.Old(nil))
	}
}

// readOnly holds one document and fails each write.
type readOnly struct{ value []byte }

func (readOnly) PutDocument(context.Context, string, string, []byte) error {
	return errors.New("disk full")
}

func (readOnly) DeleteDocument(context.Context, string, string) error {
	return errors.New("disk full")
}

func (d readOnly) Documents(_ context.Context, _ string, yield func(string, []byte) error) error {
	return yield("ca", d.value)
}

func TestDocumentThatIsNotSealedAgainIsLoggedAsThePageSearches(t *testing.T) {
	page, err := os.ReadFile("../../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, search, _ := strings.Cut(string(page), "--grep '")
	search, _, ok := strings.Cut(search, "'")
	if !ok {
		t.Fatal("docs/operations.md does not search the log before it removes a key")
	}
	log := testkit.NewLog(t)
	d := Document{Store: readOnly{mustSeal(t, keyOf(t, 1), "ca", "plain")}, Key: keyOf(t, 2, 1), Kind: "ca", Name: "ca", Log: log.Logger()}
	if value, err := d.Read(t.Context()); err != nil || string(value) != "plain" {
		t.Errorf("got %q, %v", value, err)
	}
	if !log.Contains(search) {
		t.Errorf("the log has no line with %q:\n%s", search, log)
	}
}

func TestLargeValuesAreNotSealed(t *testing.T) {
	if _, err := keyOf(t, 1).Seal("p", make([]byte, maxPlain+1)); err == nil {
		t.Error("any size was sealed")
	}
}

func TestKeysNeverShowThemselves(t *testing.T) {
	k := keyOf(t, 'K')
	var log bytes.Buffer
	slog.New(slog.NewTextHandler(&log, nil)).Info("text", "key", k)
	slog.New(slog.NewJSONHandler(&log, nil)).Info("json", "key", k, "in", map[string]any{"key": k})
	text, err := json.Marshal(map[string]any{"key": k})
	if err != nil {
		t.Fatal(err)
	}
	shown := fmt.Sprintf("%v %+v %#v %s %q %x %d", k, k, k, k, k, k, k) + log.String() + string(text)
	for _, form := range []string{"KKKK", "4b4b", "S0tL", "75 75", "0x4b"} {
		if strings.Contains(shown, form) {
			t.Errorf("%s is in %s", form, shown)
		}
	}
	if strings.Count(shown, redacted) != 11 {
		t.Errorf("got %s", shown)
	}
}

func TestKeyIsMadeOnceForItsOwnerOnly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a", "seal.key")
	k, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
	again, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := again.Open("p", mustSeal(t, k, "p", "plain")); err != nil || string(got) != "plain" {
		t.Errorf("after another Open got %q, %v", got, err)
	}
	if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) != 1 {
		t.Errorf("%v are in the folder, %v; want the key only", entries, err)
	}
	another, err := Open(filepath.Join(t.TempDir(), "seal.key"))
	if err != nil {
		t.Fatal(err)
	}
	if another.newest == k.newest {
		t.Error("two nodes have the same key")
	}
}

func TestConcurrentCreatorsGetTheSameKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "seal.key")
	keys := make([]*Key, 16)
	var wg sync.WaitGroup
	for i := range keys {
		wg.Go(func() {
			var err error
			if keys[i], err = Open(path); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, k := range keys {
		if k != nil && k.newest != keys[0].newest {
			t.Fatal("two got different keys")
		}
	}
}

func TestBadFilesAreRefusedWithARemedy(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		mode os.FileMode
		want string
	}{
		"others may read":  {line('K'), 0o640, "chmod 600"},
		"others may write": {line('K'), 0o602, "chmod 600"},
		"empty":            {"", 0o600, "contains no key"},
		"comments only":    {header, 0o600, "contains no key"},
		"too short":        {"# one\nS0tLS0tLS0s=\n", 0o600, "line 2 of"},
		"no base64":        {"KKKK KKKK!\n", 0o600, "openssl rand -base64 32"},
		"second line":      {line('K') + "KKKK", 0o600, "line 2 of"},
		"too large":        {strings.Repeat("#\n", maxFile), 0o600, "not a file of keys"},
		"too many keys":    {strings.Repeat(line('K'), maxKeys+1), 0o600, "remove old ones"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "seal.key")
			write(t, path, c.text, c.mode)
			k, err := Open(path)
			if k != nil || err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path) {
				t.Fatalf("got %v, want an error with the path and %q", err, c.want)
			}
			if strings.Contains(err.Error(), "KKKK") || strings.Contains(err.Error(), "S0tL") {
				t.Errorf("the error shows the key: %v", err)
			}
			if now, _ := os.ReadFile(path); string(now) != c.text {
				t.Error("the file was changed")
			}
		})
	}
	if _, err := Open(filepath.Join(t.TempDir(), "file", "\x00")); err == nil {
		t.Error("a path that cannot be was taken")
	}
}

func TestCredentialSealsAndTheFileStillOpens(t *testing.T) {
	dir, path := t.TempDir(), filepath.Join(t.TempDir(), "seal.key")
	before, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, credential), line('C'), 0o440) // as systemd shows it with an access list
	t.Setenv(credentialVariable, dir)
	k, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := keyOf(t, 'C').Open("p", mustSeal(t, k, "p", "plain")); err != nil {
		t.Errorf("the credential does not seal: %v", err)
	}
	if _, err := k.Open("p", mustSeal(t, before, "p", "plain")); err != nil {
		t.Errorf("the file does not open: %v", err)
	}
}

func TestCredentialsNeedNoFile(t *testing.T) {
	dir, path := t.TempDir(), filepath.Join(t.TempDir(), "seal.key")
	write(t, filepath.Join(dir, credential), line('C'), 0o400)
	t.Setenv(credentialVariable, dir)
	if _, err := Open(path); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want no file", err)
	}
	// One that cannot be read is not passed over: another key would be made.
	write(t, filepath.Join(dir, credential), "nonsense", 0o400)
	if _, err := Open(path); err == nil {
		t.Error("a credential without a key was passed over")
	}
}

// No change to what was sealed goes unseen.
func FuzzOpen(f *testing.F) {
	k := keyOf(f, 1, 2)
	good := mustSeal(f, k, "p", "plain")
	f.Add("p", good)
	f.Add("q", good)
	f.Add("p", good[:len(good)-1])
	f.Add("p", good[:prefixSize])
	f.Add("p", []byte{})
	for i := range good {
		changed := bytes.Clone(good)
		changed[i] ^= 1
		f.Add("p", changed)
	}
	f.Fuzz(func(t *testing.T, purpose string, sealed []byte) {
		plain, err := k.Open(purpose, sealed)
		if same := purpose == "p" && bytes.Equal(sealed, good); same != (err == nil) {
			t.Errorf("%x opened for %q as %q, %v", sealed, purpose, plain, err)
		}
		if err != nil && !errors.Is(err, ErrBroken) && !errors.Is(err, ErrOtherKey) {
			t.Errorf("got %v", err)
		}
	})
}
