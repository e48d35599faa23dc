package signedurl_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/doze-run/doze/api/signedurl"
)

var (
	secret     = bytes.Repeat([]byte("k3y!"), 8)
	permission = signedurl.Permission{Purpose: "read-file", Method: "GET", Sandbox: "k3f9x2m7q2az", Owner: "operator"}
)

func generation(g string) func(string) []byte {
	return func(owner string) []byte { return []byte(g + owner) }
}

func sign(t testing.TB, s *signedurl.Signer, p signedurl.Permission, query url.Values, lifetime time.Duration) url.Values {
	t.Helper()
	signed, _, err := s.Sign(p, query, lifetime)
	if err != nil {
		t.Fatal(err)
	}
	return signed
}

func TestSignedURLIsValidForItsRequestOnly(t *testing.T) {
	signer := signedurl.New(secret, generation("1"))
	query := url.Values{"path": {"/srv/a b&c"}, "mode": {"0644"}}
	signed := sign(t, signer, permission, query, time.Hour)
	if len(query) != 2 {
		t.Errorf("the query became %v", query)
	}
	parsed, err := url.ParseQuery(signed.Encode())
	if err != nil {
		t.Fatal(err)
	}
	if err := signer.Verify(permission, parsed); err != nil {
		t.Fatal(err)
	}
	change := func(f func(url.Values)) url.Values {
		changed := url.Values{}
		for name, values := range signed {
			changed[name] = slices.Clone(values)
		}
		f(changed)
		return changed
	}
	for name, changed := range map[string]url.Values{
		"other path":           change(func(q url.Values) { q.Set("path", "/etc/passwd") }),
		"second path":          change(func(q url.Values) { q.Add("path", "/etc/passwd") }),
		"no mode":              change(func(q url.Values) { q.Del("mode") }),
		"another parameter":    change(func(q url.Values) { q.Set("recursive", "true") }),
		"empty parameter":      change(func(q url.Values) { q.Set("x", "") }),
		"later":                change(func(q url.Values) { q.Set("expires", "99999999999") }),
		"same time":            change(func(q url.Values) { q.Set("expires", "0"+q.Get("expires")) }),
		"two times":            change(func(q url.Values) { q.Add("expires", q.Get("expires")) }),
		"no time":              change(func(q url.Values) { q.Del("expires") }),
		"no signature":         change(func(q url.Values) { q.Del("signature") }),
		"two signatures":       change(func(q url.Values) { q.Add("signature", q.Get("signature")) }),
		"empty signature":      change(func(q url.Values) { q.Set("signature", "") }),
		"padded signature":     change(func(q url.Values) { q.Set("signature", q.Get("signature")+"=") }),
		"signature cut":        change(func(q url.Values) { q.Set("signature", q.Get("signature")[:20]) }),
		"fields joined":        change(func(q url.Values) { q.Set("path", "/srv/a b"); q.Set("c", "") }),
		"trailing bits differ": change(func(q url.Values) { q.Set("signature", otherEncoding(t, q.Get("signature"))) }),
	} {
		if err := signer.Verify(permission, changed); !errors.Is(err, signedurl.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, f := range []func(*signedurl.Permission){
		func(p *signedurl.Permission) { p.Purpose = "write-file" },
		func(p *signedurl.Permission) { p.Method = "PUT" },
		func(p *signedurl.Permission) { p.Sandbox = "k3f9x2m7q2aa" },
		func(p *signedurl.Permission) { p.Owner = "other" },
		func(p *signedurl.Permission) { p.Purpose, p.Owner = "read-fileo", "perator" },
	} {
		other := permission
		f(&other)
		if err := signer.Verify(other, signed); !errors.Is(err, signedurl.ErrInvalid) {
			t.Errorf("%+v: %v", other, err)
		}
	}
}

// otherEncoding sets bits of the last character that no byte of the signature has.
func otherEncoding(t *testing.T, signature string) string {
	t.Helper()
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	last := len(signature) - 1
	other := signature[:last] + string(alphabet[strings.IndexByte(alphabet, signature[last])|1])
	a, _ := base64.RawURLEncoding.DecodeString(signature)
	b, err := base64.RawURLEncoding.DecodeString(other)
	if other == signature || err != nil || !bytes.Equal(a, b) {
		t.Fatalf("%s and %s are not two forms of the same bytes", signature, other)
	}
	return other
}

func TestNewCredentialsOrSecretEndSignedURLs(t *testing.T) {
	signed := sign(t, signedurl.New(secret, generation("1")), permission, nil, time.Hour)
	if err := signedurl.New(secret, generation("1")).Verify(permission, signed); err != nil {
		t.Errorf("after a restart: %v", err)
	}
	for name, s := range map[string]*signedurl.Signer{
		"new credentials": signedurl.New(secret, generation("2")),
		"other secret":    signedurl.New(bytes.Repeat([]byte("x"), 32), generation("1")),
	} {
		if err := s.Verify(permission, signed); !errors.Is(err, signedurl.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSignedURLExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		signer := signedurl.New(secret, generation(""))
		signed, expires, err := signer.Sign(permission, nil, 90*time.Second)
		if err != nil || !expires.Equal(time.Now().Add(90*time.Second)) {
			t.Fatalf("expires %v, %v", expires, err)
		}
		time.Sleep(89 * time.Second)
		if err := signer.Verify(permission, signed); err != nil {
			t.Errorf("a second before: %v", err)
		}
		time.Sleep(time.Second)
		if err := signer.Verify(permission, signed); !errors.Is(err, signedurl.ErrExpired) {
			t.Errorf("then: %v", err)
		}
		changed := maps.Clone(signed)
		changed["expires"] = []string{"99999999999"}
		if err := signer.Verify(permission, changed); !errors.Is(err, signedurl.ErrInvalid) {
			t.Errorf("with another time: %v", err)
		}
	})
}

func TestLifetimeIsBounded(t *testing.T) {
	signer := signedurl.New(secret, generation(""))
	for _, lifetime := range []time.Duration{0, -time.Second, signedurl.MaxLifetime + 1, 1<<63 - 1} {
		if _, _, err := signer.Sign(permission, nil, lifetime); err == nil || !strings.Contains(err.Error(), "out of range") {
			t.Errorf("%s: %v", lifetime, err)
		}
	}
	sign(t, signer, permission, nil, 1)
	sign(t, signer, permission, nil, signedurl.MaxLifetime)
}

func TestSignerNeverShowsItsSecret(t *testing.T) {
	signer := signedurl.New(secret, generation(""))
	var log bytes.Buffer
	slog.New(slog.NewTextHandler(&log, nil)).Info("signed", "signer", signer)
	text, err := json.Marshal(map[string]any{"signer": signer})
	if err != nil {
		t.Fatal(err)
	}
	for _, shown := range []string{log.String(), string(text), fmt.Sprint(signer), fmt.Sprintf("%+v %#v %x %s %d", signer, signer, signer, signer, signer)} {
		if strings.Contains(shown, "k3y!") || strings.Contains(shown, "6b337921") || strings.Contains(shown, "107 51") || !strings.Contains(shown, "[signer]") {
			t.Errorf("shown as %s", shown)
		}
	}
}

func FuzzVerify(f *testing.F) {
	signer := signedurl.New(secret, generation(""))
	signed := sign(f, signer, permission, url.Values{"path": {"/a"}}, time.Hour)
	f.Add(signed.Encode())
	f.Add("expires=1&signature=AAAA")
	f.Fuzz(func(t *testing.T, query string) {
		values, err := url.ParseQuery(query)
		if err != nil {
			return
		}
		if err := signer.Verify(permission, values); err == nil && values.Encode() != signed.Encode() {
			t.Errorf("%q is valid", query)
		}
	})
}
