package main

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"strings"
	"testing"

	"github.com/doze-run/doze/policies/sdk/sdktest"
)

// newApp is the policy with a key, and that key.
func newApp(t *testing.T, config string) (*sdktest.Policy, *rsa.PrivateKey) {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	p := sdktest.New(t, config)
	p.Secrets["private_key"] = string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
	return p, key
}

func TestTheJWTMeetsGitHubsRequirements(t *testing.T) {
	p, key := newApp(t, `{"app":"Iv23liAbCdEf"}`)
	r := sdktest.Get("https://api.github.com/app")
	r.Header.Set("Authorization", "Bearer own")
	got := p.Send(r)
	token, ok := strings.CutPrefix(got.Header.Get("Authorization"), "Bearer ")
	parts := strings.Split(token, ".")
	if !ok || len(parts) != 3 {
		t.Fatalf("sent %v, denied %q", got.Header, got.Reason)
	}
	part := func(i int) []byte {
		b, err := base64.RawURLEncoding.DecodeString(parts[i])
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	var head struct{ Alg, Typ string }
	var claims struct {
		Iat, Exp int64
		Iss      string
	}
	if json.Unmarshal(part(0), &head) != nil || json.Unmarshal(part(1), &claims) != nil {
		t.Fatalf("got %s, %s", part(0), part(1))
	}
	if head.Alg != "RS256" || head.Typ != "JWT" || claims.Iss != "Iv23liAbCdEf" {
		t.Errorf("got %+v, %+v", head, claims)
	}
	now := p.Now.Unix()
	if claims.Iat != now-60 || claims.Exp != now+9*60 {
		t.Errorf("it counts from %d s to %d s", claims.Iat-now, claims.Exp-now)
	}
	sum := sha256.Sum256([]byte(parts[0] + "." + parts[1]))
	if err := rsa.VerifyPKCS1v15(&key.PublicKey, crypto.SHA256, sum[:], part(2)); err != nil {
		t.Error(err)
	}
}

func TestEachRequestGetsANewJWT(t *testing.T) {
	p, _ := newApp(t, `{"app":"1"}`)
	if got := p.Send(sdktest.Get("https://api.github.com/app")); got.Denied {
		t.Fatal(got.Reason)
	}
	p.Secrets = nil // as for a rule that has none
	if got := p.Send(sdktest.Get("https://other.example.com/app")); !got.Denied {
		t.Errorf("sent %v", got.Header)
	}
}

func TestInstallationTokensStayOutOfTheSandbox(t *testing.T) {
	for _, path := range []string{"/app/installations/1/access_tokens", "/app/installations/1/ACCESS_tokens", "/app/installations/1/access%5ftokens"} {
		p, _ := newApp(t, `{"app":"1"}`)
		if got := p.Send(sdktest.Request("POST", "https://api.github.com"+path, "")); !got.Denied {
			t.Errorf("%s went through", path)
		}
		p, _ = newApp(t, `{"app":"1","installation_tokens":true}`)
		if got := p.Send(sdktest.Request("POST", "https://api.github.com"+path, "")); got.Denied {
			t.Errorf("%s was refused: %s", path, got.Reason)
		}
	}
}

func TestInvalidKeysDenyRequests(t *testing.T) {
	p, _ := newApp(t, `{"app":"1"}`)
	p.Secrets["private_key"] = "no key"
	if got := p.Send(sdktest.Get("https://api.github.com/app")); !got.Denied || !strings.Contains(got.Reason, "private_key") {
		t.Errorf("got %+v", got)
	}
}

func TestTheAppIsRequired(t *testing.T) {
	for _, config := range []string{"", `{"app":"a\"b"}`, `{"app":7}`} {
		if _, err := sdktest.Start(config); err == nil || !strings.Contains(err.Error(), "app") {
			t.Errorf("%s: got %v", config, err)
		}
	}
}
